"""An answer that is broken off anywhere, and a live queue that goes on: a router that trusts numbers alone ends exact.

The router asks by seq only where it sees a gap, and never looks at what is inside. The connection on which it asks
breaks after any number of messages. Its live connection goes on, with all of the stream queued, or from a state on that
kvbus sent because it had to drop batches. It reads before, between and after its requests, which come from an address
that kvbus knows, or from another.
"""

from __future__ import annotations

import random

import pytest

from kvbus.core.blocks import compaction
from tests.properties.test_state_on_subscription import SLICE, Stage, drop
from tests.properties.test_state_on_subscription import Router as Applying

WORLDS = 500


class Trusting(Applying):
    """Applies what has the next number, drops what is older, and asks where a number is missing."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.next = 0
        self.breaks = True
        self.broken = 0

    def receive(self, stage: Stage, seq: int, payload: bytes) -> None:
        while seq > self.next and not self.replay(stage):
            pass
        if seq >= self.next:
            self.apply(payload)
            self.next = seq + 1

    def replay(self, stage: Stage) -> bool:
        """Ask once; whether the answer was whole. It may break off after any message."""
        answer = stage.replay(self.next)
        whole = not self.breaks or self.rng.random() < 0.3
        cut = len(answer) if whole else self.rng.randint(0, len(answer))
        for seq, payload in answer[:cut]:
            if seq >= self.next:
                self.apply(payload)
                self.next = seq + 1
        self.broken += not whole
        return whole


class AnyAddress(Stage):
    """A stage whose routers ask from the address of their subscription, or from another."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng.choice([1, 1, 2]), rng.choice([1, 3, 10, 10_000]), filled=rng.random() < 0.5)
        self._rng = rng

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        self.has_state = self._rng.random() < 0.5
        return super().replay(start)


def world(seed: int) -> tuple[Trusting, Stage]:
    """A router with one to three connections in a row, and a stream that trims its journal soon or never."""
    rng = random.Random(seed)
    stage = AnyAddress(rng)
    router = Trusting(rng)
    router.connect(stage)
    for _ in range(rng.randint(5, 60)):
        step = rng.random()
        assert router.connection is not None
        if step < 0.4:
            for _ in range(rng.randint(1, 6)):
                node = rng.randint(1, 12)
                stage.say(rng.randrange(2), [(rng.choice(["store", "store", "remove"]), None, "GPU", [node])])
        elif step < 0.5:
            stage.send_states()
        elif step < 0.6:
            drop(stage, router)
            router.connect(stage)
        elif step < 0.7:
            stage.lose(router.connection)
        else:
            for _ in range(rng.randint(0, 6)):
                router.take(stage)
    stage.send_states()
    router.breaks = False
    stage.say(0, [("store", None, "GPU", [40])])  # new to everybody: whatever is missing before it shows
    while router.take(stage):
        pass
    return router, stage


@pytest.fixture(autouse=True)
def states_of_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "MOST_BLOCKS", SLICE)
    monkeypatch.setattr(compaction, "BLOCKS_PER_BATCH", SLICE)


def test_no_interruption_leaves_a_trusting_router_wrong() -> None:
    wrong: list[int] = []
    broken = 0
    for seed in range(WORLDS):
        router, stage = world(seed)
        broken += router.broken > 0
        if router.views.blocks != stage.truth:
            wrong.append(seed)
    assert broken > WORLDS / 4
    assert not wrong, f"{len(wrong)} of {broken} worlds with an interruption"


def test_where_no_state_is_sent_an_interruption_may_not_show() -> None:
    """The limit of ``on_subscribe: nothing``, as docs/PROTOCOL.md has it.

    Batch 2 is lost, the journal has not kept it, and the rest waits in the live queue. The answer is the state, in the
    seqs from 2 on. It breaks off after the first, and the live queue goes on with the next seq.
    """
    stage = Stage(1, 1, filled=True)
    stage.has_state = False
    router = Trusting(random.Random(0))
    router.connect(stage)
    assert router.connection is not None
    router.connection.waiting = False
    for node in range(1, 11):
        stage.say(0, [("store", None, "GPU", [node])])
    first, second, _, *rest = router.connection.live
    router.connection.live.clear()
    for seq, payload in (first, second):
        router.receive(stage, seq, payload)
    answer = stage.replay(router.next)
    for seq, payload in answer[:1]:
        router.receive(stage, seq, payload)
    for seq, payload in rest:
        router.receive(stage, seq, payload)
    assert router.views.blocks < stage.truth
