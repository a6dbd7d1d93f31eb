"""All cases that are played to routers.

A case has messages of a simulated engine with a fault, or the messages of a test vector of docs/spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import msgspec

from kvbus.tools.conform.engine.events import POSITIONAL
from kvbus.tools.conform.report import Clause, Level, clause
from kvbus.tools.conform.router.views import HeldBlock, canonical
from kvbus.tools.conform.vectors import CLEARED, VECTORS, Frames, Vector, message, pack, removed, stored


class Batch(NamedTuple):
    """A step of a case: publish the next batch of a rank.

    If ``lost`` is true, the batch is not sent live, and only a replay has it.
    """

    events: Sequence[Any] = ()
    lost: bool = False
    rank: int = 0


class Message(NamedTuple):
    """A step of a case: send a message whose frames are given.

    The seq in ``frames`` is counted from the first seq of the case, which is therefore added when the message is
    sent. A malformed message is sent without any change. If ``lost`` is true, the message is not sent live, and only a
    replay has it.
    """

    frames: Frames
    lost: bool = False


class Again(NamedTuple):
    """A step of a case: send an earlier batch of a rank live. The batch is then late, or sent twice.

    ``batch`` is its position among the rank's batches, counted from 0.
    """

    batch: int
    rank: int = 0


class Restart(NamedTuple):
    """A step of a case: begin a new epoch with an empty replay buffer.

    If ``connected`` is true, the connection stays, as if a proxy were between the engine and the router.
    """

    rank: int = 0
    connected: bool = False


class Seen(NamedTuple):
    """A step of a case: wait until the router has read all messages that were sent.

    Without this step, the next step may come too early. For example, a removal may be lost, but the router does not
    hold the block yet, so that nothing is wrong.
    """


class Pause(NamedTuple):
    """A step of a case: send nothing for ``seconds`` seconds."""

    seconds: float


class Join(NamedTuple):
    """A step of a case: start the router. Without this step the router starts before the first step of the case."""


class Answers(NamedTuple):
    """A step of a case: from now on, answer replay requests with faults.

    ``first`` is the position of the oldest batch that the answers have. ``late`` is the number of seconds by which the
    answers are delayed. ``keep`` is the number of batches after which the next answer ends without END; None for a
    complete answer.
    """

    first: int = 0
    late: float = 0.0
    keep: int | None = None


Step = Batch | Message | Again | Restart | Seen | Pause | Join | Answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The steps of a simulated engine, and the blocks that a router must hold after them.

    Attributes:
        name: unique name of the case.
        clauses: numbers of the clauses that the case tests.
        title: description of the steps.
        steps: the steps of the engine.
        cache: the blocks in the engine's cache after the last step.
        level: requirement level of the clauses.
        marker: whether the engine stores a marker block after the last step, which shows that the router has read
            everything. A case in which the last batches are lost has no marker, because the router would notice the
            loss at the marker's seq.
        framing: number of frames of each message in a replay answer, ``3`` or ``4``.
        heartbeats: whether the publisher sends PINGs, and disconnects a router that does not answer them.
        maps: whether the case is about events as maps. They stay maps even for a router that reads only arrays.
        arrays: whether `as_arrays` has converted the case. Marker blocks and clears are then sent as arrays too.
        first: whether the case needs a publisher that has not sent anything before.
        timeouts: factor by which the settling time is multiplied in this case. The settling time is the maximum time
            after the last step until the router must hold the right blocks.
    """

    name: str
    clauses: tuple[str, ...]
    title: str
    steps: tuple[Step, ...]
    cache: frozenset[HeldBlock]
    level: Level = Level.MUST
    marker: bool = True
    framing: str = "4"
    heartbeats: bool = False
    maps: bool = False
    arrays: bool = False
    first: bool = False
    timeouts: float = 1.0

    @property
    def ranks(self) -> int:
        """Number of publishers that the case needs, one for each rank."""
        return 1 + max(getattr(step, "rank", 0) for step in self.steps)

    @property
    def joins(self) -> bool:
        """Whether the router starts during the case, and not before its first step."""
        return any(isinstance(step, Join) for step in self.steps)


def device(*hashes: int, rank: int = 0) -> frozenset[HeldBlock]:
    """Return blocks with these hashes on the device of a rank, as a router should hold them."""
    return frozenset(HeldBlock(canonical(block), "GPU", None, rank) for block in hashes)


class Churn:
    """A simulated cache of 24 blocks in chains of 8.

    Each batch stores a block and, if the cache is full, evicts a block.
    """

    def __init__(self, first: int = 100) -> None:
        self._first = first

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield the batches from position ``start`` up to position ``stop`` - 1."""
        for at in range(start, stop):
            block = self._first + at
            evicted = [removed(self._evicted(at))] if at >= 24 else []
            yield Batch([*evicted, stored(block, parent=block - 1 if at % 8 else None)])

    def live(self, count: int) -> frozenset[HeldBlock]:
        """Return the blocks that are live after the first ``count`` batches."""
        gone = {self._evicted(at) for at in range(24, count)}
        return device(*({self._first + at for at in range(count)} - gone))

    def _evicted(self, at: int) -> int:
        """Return the hash of the block that the batch at position ``at`` evicts.

        While a chain grows, the third chain before it is evicted, beginning with the last block.
        """
        return self._first + 8 * (at // 8 - 3) + 7 - at % 8


def changed(step: Step, change: Callable[[Any], Any]) -> Step:
    """Return a copy of a step in which the function ``change`` was applied to each event."""
    if isinstance(step, Batch):
        return step._replace(events=[change(event) for event in step.events])
    if not isinstance(step, Message):
        return step
    try:
        batch = msgspec.msgpack.decode(step.frames[-1])
        payload = pack([batch[0], [change(event) for event in batch[1]], *batch[2:]])
    except (msgspec.DecodeError, TypeError, ValueError):  # a payload that is not a batch stays unchanged
        return step
    return step._replace(frames=[*step.frames[:-1], payload])


def positional(event: Any) -> Any:
    """Convert an event from a map to an array.

    Nulls at the end of the array are left out, but only those after the medium.
    """
    if not isinstance(event, dict):
        return event
    fields = POSITIONAL.get(event["type"], ())
    values = [event.get(name) for name in fields]
    while values and values[-1] is None and fields[len(values) - 1] != "medium":
        values.pop()
    return [event["type"], *values]


def as_arrays(case: Case) -> Case:
    """Return a copy of a case for a router that reads only arrays. A case about maps keeps its maps."""
    steps = case.steps if case.maps else tuple(changed(step, positional) for step in case.steps)
    return replace(case, arrays=True, steps=steps)


CLAUSES: Final[dict[str, Clause]] = {
    number: clause(number, title)
    for number, title in {
        "1.1": "the router reads a PUB socket",
        "1.5": "the router answers a PING",
        "2.1": "messages that do not have three frames do no harm",
        "2.2": "sequence frames of any length and value do no harm",
        "2.3": "the router accepts any topic",
        "3.1": "an epoch may begin with any number",
        "3.2": "a number that goes back begins a new epoch",
        "3.3": "a restarted engine may continue its numbers",
        "3.4": "a missing batch is replayed, or the blocks are dropped",
        "3.5": "no batch is applied twice",
        "3.6": "an empty batch counts as a batch",
        "3.7": "a pause is not the end of a stream",
        "4.1": "a replay request has the right form",
        "4.2": "the router reads replay answers",
        "4.4": "an answer that begins late, but has the state, is applied",
        "4.5": "an answer that begins late is treated as a loss",
        "4.7": "a request with an incomplete answer is repeated",
        "5.1": "the router applies the state on subscription",
        "6.1": "the router reads [ts, events, rank]",
        "6.2": "the router reads maps and arrays",
        "6.3": "null and an absent key mean the same",
        "6.4": "the blocks of a store form a chain",
        "6.5": "a store with too few tokens is not applied",
        "6.6": "the router reads hashes of 64 bits and of bytes",
        "6.9": "the router accepts only valid token ids and pairs",
        "6.10": "the events of a batch are applied in order",
        "6.11": "a block with an unknown parent is kept",
        "6.12": "the children of a removed block are kept",
        "6.13": "only the unreadable event is lost",
        "7.2": "copies of a block are counted",
        "8.1": "blocks of different groups are kept apart",
        "9.1": "the router reads all names of media",
        "9.2": "blocks on different media are kept apart",
        "10.2": "blocks of different ranks are kept apart",
        "11.1": "a clear removes the blocks of its rank, and no others",
        "11.4": "the router obeys a clear",
        "12.1": "the router accepts large batches",
        "12.2": "a peer cannot make the router use unlimited memory",
        "13.1": "unknown events and fields are skipped",
    }.items()
}
"""By number: the clauses for routers that at least one case tests."""

FLOW: Final = Churn()
COUNT: Final = 64
OTHER: Final = Churn(first=300)
"""The simulated cache after a restart of the engine. It shares no block with `FLOW`, the cache before the restart."""


def flow(*, start: int = 0, stop: int = COUNT, lost: range = range(0)) -> list[Batch]:
    """Return the batches of the simulated cache `FLOW` from position ``start`` up to ``stop`` - 1.

    The batches at the positions ``lost`` are not sent live.
    """
    return [each._replace(lost=at in lost) for at, each in enumerate(FLOW.batches(start, stop), start=start)]


def _twice() -> list[Step]:
    return [step for at, each in enumerate(flow()) for step in (each, Again(at))]


def _swapped() -> list[Step]:
    """Return steps in which the second batch of each pair of batches arrives first."""
    steps: list[Step] = []
    for at, each in enumerate(flow()):
        steps.append(each._replace(lost=at % 2 == 0))
        if at % 2:
            steps.append(Again(at - 1))
    return steps


def _own(block: int) -> dict[str, Any]:
    """Return a BlockStored event for a block whose tokens no other block of its case has.

    The tokens of blocks from `stored` repeat after 1,000 blocks.
    """
    return stored(block, token_ids=[20_000 + 2 * block, 20_001 + 2 * block])


_LONG: Final = 2_195
"""Number of BlockStored events of 64 blocks with which a batch is just smaller than 4 MiB.

Each block needs two hashes of 9 bytes and two tokens of 5 bytes.
"""


def _long() -> Batch:
    """Return a batch that stores a prompt by `_LONG` events, and evicts all its blocks except the first two."""
    stores = [
        stored(
            *range(first, first + 64),
            parent=first - 1 or None,
            token_ids=[*range(10**6 + 2 * first, 10**6 + 2 * first + 128)],
        )
        for first in range(1, 64 * _LONG, 64)
    ]
    return Batch([*stores, removed(*range(64 * _LONG, 2, -1))])


FAULTS: Final = (
    Case(name="flow", clauses=("1.1", "6.4", "6.10"), title="64 batches that store and evict, without a fault",
         steps=(*flow(),), cache=FLOW.live(COUNT)),
    Case(name="loss", clauses=("3.4",), title="every ninth of 64 batches is lost, and can be replayed",
         steps=(*flow(lost=range(8, COUNT, 9)),), cache=FLOW.live(COUNT)),
    Case(name="long-loss", clauses=("3.4",), title="20 batches in a row are lost, and can be replayed",
         steps=(*flow(stop=30), Seen(), *flow(start=30, lost=range(30, 50))), cache=FLOW.live(COUNT)),
    Case(name="late-answer", clauses=("3.4",), title="a replay is answered a second late, while batches flow",
         steps=(Answers(late=1.0), *flow(stop=30), *flow(start=30, stop=40, lost=range(30, 35)), Pause(0.3),
                *flow(start=40)),
         cache=FLOW.live(COUNT), timeouts=2.0),
    Case(name="trimmed", clauses=("4.5",), title="20 batches are lost, and half of them cannot be replayed any more",
         steps=(*flow(stop=30), Seen(), Answers(first=40), *flow(start=30, stop=50, lost=range(30, 50)),
                *flow(start=50)),
         cache=FLOW.live(COUNT)),
    Case(name="trimmed-state", clauses=("4.4", "4.5"), title="20 batches are lost, and the answer has the state",
         steps=(*flow(stop=30), Seen(), Answers(first=50), *flow(start=30, stop=50, lost=range(30, 50)),
                Batch([CLEARED, stored(900), stored(901, parent=900)], lost=True), Batch([stored(902, parent=901)])),
         cache=device(900, 901, 902)),
    Case(name="broken-off", clauses=("4.7",), title="an answer breaks off without END",
         steps=(*flow(stop=30), Seen(), Answers(keep=2), *flow(start=30, lost=range(30, 50))),
         cache=FLOW.live(COUNT), timeouts=4.0),
    Case(name="unanswered", clauses=("4.7",), title="a request is not answered at all",
         steps=(*flow(stop=30), Seen(), Answers(keep=0), *flow(start=30, lost=range(30, 50))),
         cache=FLOW.live(COUNT), timeouts=4.0),
    Case(name="duplicates", clauses=("3.5",), title="each batch arrives twice", steps=(*_twice(),),
         cache=FLOW.live(COUNT)),
    Case(name="reordered", clauses=("3.4", "3.5"), title="in each pair of batches, the second arrives first",
         steps=(*_swapped(),), cache=FLOW.live(COUNT)),
    Case(name="tail-loss", clauses=("3.6",), title="the last ten batches are lost, and an empty batch comes",
         steps=(*flow(stop=54), Seen(), *flow(start=54, lost=range(54, COUNT)), Batch()),
         cache=FLOW.live(COUNT), marker=False),
    Case(name="pause", clauses=("3.7",), title="three seconds of silence", steps=(*flow(), Seen(), Pause(3.0)),
         cache=FLOW.live(COUNT)),
    Case(name="late-join", clauses=("3.4",), level=Level.SHOULD,
         title="the router joins after 64 batches; a replay has them", steps=(*flow(), Join()), cache=FLOW.live(COUNT)),
    Case(name="state", clauses=("5.1",), title="the router joins late, and is sent the state",
         steps=(*flow(), Answers(first=COUNT), Join(),
                Batch([CLEARED, stored(900), stored(901, parent=900)]), Batch([stored(902, parent=901)])),
         cache=device(900, 901, 902)),
    Case(name="high-numbers", clauses=("3.1",), title="an epoch begins with the number 2,000,000",
         steps=(Message(message(2_000_000, stored(1, 2))), Message(message(2_000_001, stored(3, parent=2)))),
         cache=device(1, 2, 3), first=True),
    Case(name="large-batch", clauses=("12.1",), title="a batch of 4,096 events",
         steps=(Batch([*map(_own, range(1, 2049)), *map(removed, range(2, 2049)), _own(2)]),),
         cache=device(1, 2)),
    Case(name="long-batch", clauses=("12.1",), title="a batch of 4 MiB, which stores and evicts a long prompt",
         steps=(_long(),), cache=device(1, 2)),
    Case(name="two-ranks", clauses=("10.2",), title="a rank removes a block that another rank holds as well",
         steps=(Batch([stored(1), stored(2)]), Batch([stored(1), stored(3)], rank=1), Seen(),
                Batch([removed(1)], rank=1)),  # this removal is sent after the router has read the batches before it
         cache=device(1, 2) | device(3, rank=1)),
    Case(name="two-ranks-clear", clauses=("10.2", "11.1"), title="one of two ranks is cleared",
         steps=(Batch([stored(1), stored(2)]), Batch([stored(3), stored(4)], rank=1), Seen(),
                Batch([CLEARED], rank=1), Batch([stored(5)], rank=1)),
         cache=device(1, 2) | device(5, rank=1)),
    Case(name="two-ranks-restart", clauses=("10.2", "3.2"), title="one of two ranks restarts",
         steps=(Batch([stored(1), stored(2)]), Batch([stored(3), stored(4)], rank=1), Seen(),
                Restart(rank=1), Batch([stored(5)], rank=1)),
         cache=device(1, 2) | device(5, rank=1)),
    Case(name="heartbeats", clauses=("1.5",), title="the publisher closes a connection whose peer does not answer PING",
         steps=(Batch([stored(1)]), Seen(), Pause(3.0), Batch([stored(2)])), cache=device(1, 2), heartbeats=True),
)  # fmt: skip

RESTARTS: Final = (
    Case(name="restart-behind", clauses=("3.3", "11.4"), title="a restart with a clear, which continues the numbers",
         steps=(*flow(stop=40), Seen(), Batch([CLEARED]), *OTHER.batches(0, 10)), cache=OTHER.live(10)),
    Case(name="restart-connected", clauses=("3.2",), title="a restart behind a proxy: no connection ends",
         steps=(*flow(stop=40), Seen(), Restart(connected=True), *OTHER.batches(0, 10)), cache=OTHER.live(10)),
    Case(name="restart", clauses=("3.2",), title="a restart: numbers begin with 0 again",
         steps=(*flow(stop=40), Seen(), Restart(), *OTHER.batches(0, 10)), cache=OTHER.live(10)),
    Case(name="restart-longer", clauses=("3.2",), title="a restart, and the new epoch becomes longer than the old",
         steps=(*flow(stop=40), Seen(), Restart(), *OTHER.batches(0, COUNT)), cache=OTHER.live(COUNT)),
)  # fmt: skip
"""The cases with restarts. They are played last, because a router that fails at a restart fails all later cases."""


_SHOULD: Final = {"publisher-id", "arrays"}
"""Names of test vectors about clauses that are a SHOULD in the specification."""

_OF_MAPS: Final = {"nulls-left-out", "unknown-field"}
"""Names of test vectors that test events as maps. They cannot be converted to arrays."""


def _number(frames: Frames) -> bytes:
    return frames[-2][:8] if len(frames) > 1 else b""


def of_vector(name: str, vector: Vector, *, small: bool = False) -> Case:
    """Convert a test vector to a case. A batch that is only in the vector's replay answer is lost in the live stream.

    Unless ``small`` is true, small hashes are made larger by `wide`.
    """
    sent = {_number(frames) for frames in vector.live}
    answered = {_number(frames): frames for frames in vector.replay[:-1]}
    steps = [Message(frames) for frames in vector.live]
    for number, frames in answered.items():
        if number not in sent:
            steps.insert(next(at for at, step in enumerate(steps) if _number(step.frames) > number),
                         Message([b"", *frames[-2:]], lost=True))  # fmt: skip
    return Case(
        name=name,
        clauses=tuple(vector.clauses),
        title=vector.title,
        steps=tuple(steps if small else map(_wide_step, steps)),
        cache=frozenset(
            HeldBlock(canonical(block if small else wide(block)), medium, group, 0)
            for group, medium, block in vector.view
        ),
        level=Level.SHOULD if name in _SHOULD else Level.MUST,
        maps=name in _OF_MAPS,
        # A case with byte hashes needs a publisher that has sent nothing yet: a stream has only one type of hashes
        # (clause 6.6), and other cases send integers.
        first=isinstance(vector.view[0][2] if vector.view else 0, bytes),
        framing="3" if vector.replay and len(vector.replay[0]) == 3 else "4",
    )


WIDE: Final = 2**62
"""Number that is added to the small hashes of test vectors.

The hashes of engines have 64 bits, and some routers accept only such hashes.
"""


def wide(value: Any) -> Any:
    """Make a small integer hash as large as an engine's: add `WIDE`, or subtract it from a negative hash.

    Return any other value unchanged.
    """
    if not isinstance(value, int) or abs(value) >= 2**32:
        return value
    return value + WIDE if value >= 0 else value - WIDE


def _wide_event(event: Any) -> Any:
    if isinstance(event, list):
        hashes = [[wide(block) for block in each] if at == 1 else each for at, each in enumerate(event)]
        return [wide(each) if at == 2 else each for at, each in enumerate(hashes)]
    changed = dict(event)
    if "block_hashes" in event:
        changed["block_hashes"] = [wide(block) for block in event["block_hashes"]]
    if "parent_block_hash" in event:
        changed["parent_block_hash"] = wide(event["parent_block_hash"])
    return changed


def _wide_step(step: Step) -> Step:
    return changed(step, _wide_event)


def _wide_case(case: Case) -> Case:
    cache = frozenset(block._replace(hash=canonical(wide(block.hash))) for block in case.cache)
    return replace(case, steps=tuple(map(_wide_step, case.steps)), cache=cache)


_SMALL: Final = replace(
    of_vector("small-hashes", VECTORS["stores"], small=True),
    clauses=("6.6",),
    title="small hashes, which take few bytes",
)

_MAPS: Final = replace(of_vector("maps", VECTORS["stores"]), clauses=("6.2",), title="events as maps", maps=True)

CASES: Final = (
    of_vector("stores", VECTORS["stores"]),
    *map(_wide_case, FAULTS),
    *(of_vector(name, vector) for name, vector in VECTORS.items() if name != "stores"),
    _SMALL,
    _MAPS,
    *map(_wide_case, RESTARTS),
)
"""All cases, in the order in which they are played. The first case is the simplest."""
