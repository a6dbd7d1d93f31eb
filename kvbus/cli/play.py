"""``kvbus play``: publish a capture as an engine would."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import click

from kvbus.cli.until import run_until_signal, say, until
from kvbus.tools.capture.format import read_capture
from kvbus.tools.capture.play import Faults, Stats, play
from kvbus.transport.engine.publisher import EnginePublisher, Framing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvbus.tools.capture.format import Message

_PROBABILITY = click.FloatRange(0, 1)


@click.command("play")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--endpoint", default="tcp://*:5557", show_default=True, help="Endpoint of the live stream.")
@click.option(
    "--replay-endpoint",
    metavar="ENDPOINT",
    help="Endpoint that answers replay requests. Without it, nothing answers them.",
)
@click.option(
    "--bind/--connect",
    default=None,
    help="Listen at the endpoint, or connect to it. By default, as in vLLM, listen at a wildcard or an ipc endpoint, "
    "and connect to any other host.",
)
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Batches per second.  [default: 200]")
@click.option(
    "--speed", type=click.FloatRange(0, min_open=True), help="Play N times as fast as recorded, not at --rate."
)
@click.option(
    "--framing",
    type=click.Choice(["3", "4", "sim"]),
    default="4",
    show_default=True,
    help="Frames of each message in a replay answer: 3 (vLLM up to 0.25, SGLang up to 0.5.21), 4 (later releases), or "
    "sim (llm-d-inference-sim).",
)
@click.option("--topic", help="Topic of every message, instead of the recorded one.")
@click.option(
    "--buffer-steps",
    type=click.IntRange(2),
    default=10_000,
    show_default=True,
    help="Number of newest batches that kvbus play keeps for replays.",
)
@click.option("--loop", is_flag=True, help="After the last batch, begin again with the first, as a new epoch.")
@click.option(
    "--subscribers", type=click.IntRange(0), default=0, help="Number of subscribers to wait for at each epoch's start."
)
@click.option(
    "--exit-after",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Exit this many seconds after the last batch, and serve replays until then; by default at Ctrl-C.",
)
@click.option(
    "--drop",
    type=_PROBABILITY,
    default=0.0,
    help="Probability that a batch is dropped from the live stream but kept for replays.",
)
@click.option("--duplicate", type=_PROBABILITY, default=0.0, help="Probability that a batch is sent twice.")
@click.option("--swap", type=_PROBABILITY, default=0.0, help="Probability that a batch is sent after the next batch.")
@click.option(
    "--hole",
    type=_PROBABILITY,
    default=0.0,
    help="Probability that a batch is neither sent nor kept for replays, so that its seq is missing.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the faults.")
def command(
    *,
    file: Path,
    endpoint: str,
    replay_endpoint: str | None,
    bind: bool | None,
    rate: float | None,
    speed: float | None,
    framing: str,
    topic: str | None,
    buffer_steps: int,
    loop: bool,
    subscribers: int,
    exit_after: float | None,
    drop: float,
    duplicate: float,
    swap: float,
    hole: float,
    seed: int,
) -> None:
    """Publish a capture as its engine did.

    \b
    Examples:
      kvbus play stream.jsonl --endpoint 'tcp://*:5557' --replay-endpoint 'tcp://*:5558'
      kvbus play stream.jsonl --endpoint tcp://127.0.0.1:5557 --bind --speed 1
      kvbus play stream.jsonl --drop 0.05 --duplicate 0.02 --swap 0.02 --seed 7 --replay-endpoint 'tcp://*:5558'
      kvbus play stream.jsonl --rate 1000 --subscribers 1 --exit-after 0
      kvbus play stream.jsonl --loop --buffer-steps 100 --framing 3

    FILE is a file of `kvbus record`: JSON lines of t, topic, seq and payload. A file whose name ends in .gz is
    compressed. - is standard input. kvbus play keeps the recorded sequence numbers. If a number is lower than the one
    before it, the engine had restarted. kvbus play then closes its sockets, opens them again, and empties the replay
    buffer.

    After the last batch kvbus play runs on like an idle engine, and answers replay requests until Ctrl-C (see
    --exit-after). --drop, --duplicate, --swap and --hole are probabilities of a fault for each batch, from 0 to 1.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    if rate is not None and speed is not None:
        raise click.UsageError("--rate and --speed exclude each other: --rate 200 or --speed 1")
    if loop and str(file) == "-":
        raise click.UsageError("--loop needs a file: standard input can be read only once")
    # Read the beginning of the file before a port is bound, so that an error in the file is the first one to be
    # reported.
    first = None if str(file) == "-" else next(read_capture(file), None)
    publisher = EnginePublisher(
        endpoint,
        replay_endpoint,
        topic=topic.encode() if topic is not None else first.topic if first is not None else b"",
        framing=cast("Framing", framing),
        buffer_steps=buffer_steps,
        bind=bind,
    )
    faults = Faults(drop=drop, duplicate=duplicate, swap=swap, hole=hole, seed=seed)
    pace: Literal["rate", "recorded"] = "rate" if speed is None else "recorded"
    stats = Stats()

    def read() -> Iterator[Message]:
        return read_capture(file)

    async def session(stop: asyncio.Event) -> None:
        open_publisher(publisher)
        try:
            await until(stop, published())
        finally:
            publisher.close(linger=1.0)
            say(_summary(stats))

    async def published() -> None:
        await play(
            publisher,
            read,
            pace=pace,
            rate=rate or 200.0,
            speed=speed or 1.0,
            loop=loop,
            faults=faults,
            subscribers=subscribers,
            stats=stats,
        )
        if exit_after is None:
            say(f"{file} is at its end; " + ("serving replay" if replay_endpoint else "idle") + " until Ctrl-C")
            await asyncio.Event().wait()
        await asyncio.sleep(exit_after or 0)

    run_until_signal(session)


def open_publisher(publisher: EnginePublisher) -> None:
    """Start a publisher, and print whether it binds its endpoint or connects to it.

    This depends on the endpoint and on ``--bind``, and the user may expect the opposite.

    Raises:
        click.UsageError: an endpoint is malformed.
        BindError: an endpoint cannot be bound.
    """
    try:
        publisher.start()
    except ValueError as error:
        raise click.UsageError(f"{error}; for example --endpoint 'tcp://*:5557'") from error
    if publisher.bind:
        say(f"publishing on {publisher.endpoint}")
    else:
        say(f"publishing to {publisher.endpoint}: connecting, as vLLM does to a concrete host;")
        say("  the subscriber must bind it, or use --bind here to listen")
    if publisher.replay_endpoint is not None:
        say(f"replay on {publisher.replay_endpoint}, framing {publisher.framing}")


def _summary(stats: Stats) -> str:
    epochs = "1 epoch" if stats.epochs == 1 else f"{stats.epochs} epochs"
    faults = {
        "dropped": stats.dropped,
        "duplicated": stats.duplicated,
        "swapped": stats.swapped,
        "holes": stats.holes,
    }
    counts = "".join(f", {count} {name}" for name, count in faults.items() if count)
    return f"published {stats.published} batches in {epochs}{counts}"
