"""What a user says of the router that is tried: the options of ``kvbus conform router`` and of the pytest plugin."""

from __future__ import annotations

from typing import Final, NamedTuple


class Option(NamedTuple):
    """An option.

    Attributes:
        name: without dashes.
        help: what it means.
        metavar: what stands behind it; empty for a flag.
        default: of a flag False, of a repeatable one no values, of seconds a number, otherwise a text.
    """

    name: str
    help: str
    metavar: str = ""
    default: bool | tuple[str, ...] | float | str = ""

    @property
    def key(self) -> str:
        """The name as Python has it."""
        return self.name.replace("-", "_")


WAYS: Final = (
    Option("driver", "Start this program for each case: JSON lines on its input and output.", "CMD"),
    Option("view-url", "GET this to see what a running router holds.", "URL"),
    Option("score-url", "POST prompts here; the answer says how much of them is cached.", "URL"),
    Option("dynamo-indexer", "A running indexer of Dynamo; each case is a model of its own.", "URL"),
    Option("client", "kvbus's own library: what it looks like when all is kept.", default=False),
)
"""To ask a router what it holds; one of them is named."""

OPTIONS: Final = (
    Option(
        "score-body",
        'The body for a score URL; "{tokens}" stands for the list of tokens.',
        "JSON",
        '{"token_ids": "{tokens}"}',
    ),
    Option("score-pointer", "Where the score is in the answer, as a JSON pointer.", "POINTER"),
    Option("score-blocks", "The score counts blocks, and not tokens.", default=False),
    Option(
        "engine",
        "Where the router reads a rank; once for each. The kit binds it. [default: rank 0 at ports 5557 and 5558 of "
        "loopback for a running router, new ports for each case otherwise]",
        "LIVE,REPLAY",
        (),
    ),
    Option(
        "reads",
        "Where a driver, Dynamo's indexer or the client reads a rank, if something is between it and the engine.",
        "LIVE,REPLAY",
        (),
    ),
    Option("topic", "The topic of all batches, such as kv@pod@model.", "TOPIC"),
    Option("arrays", "Send events as arrays: for a router that reads no maps, and breaks 6.2 so.", default=False),
    Option("settle", "Seconds that the router has to come to what it must hold.", "S", 5.0),
    Option("connect", "Seconds that the router has to subscribe.", "S", 60.0),
)
"""Of all ways."""
