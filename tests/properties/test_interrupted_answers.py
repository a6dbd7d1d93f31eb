"""Tests for a router that checks only seqs: it becomes exact even if the connection of a replay request breaks.

The router requests a replay when it sees a gap in the seqs, and does not look at the events. The connection of its
request breaks after any number of messages. Its live connection continues, either with all batches or from a state that
kvbus sent because it had to drop batches. The router reads live batches before, between and after its requests.

Some routers repeat the request until an answer ends with END. A router that does not do so may keep only a part of a
state, so it is exact only if each state is one batch.
"""

from __future__ import annotations

import random

import pytest

from tests.doubles.stage import Stage, cut_states
from tests.doubles.stage import Trusting as Applying
from tests.properties.test_state_on_subscription import SLICE, Modelled, stage_of

WORLDS = 500


class Trusting(Applying):
    """A router that applies the batch with the next seq, drops older batches, and requests a replay at a gap."""

    def __init__(self, rng: random.Random, *, asks_on: bool) -> None:
        super().__init__()
        self.rng = rng
        self.asks_on = asks_on
        self.next = 0
        self.breaks = True
        self.broken = 0

    def receive(self, stage: Stage, seq: int, payload: bytes) -> None:
        if seq > self.next:
            whole = self.replay(stage)
            while not whole and (self.asks_on or seq > self.next):
                whole = self.replay(stage)
        if seq >= self.next:
            self.apply(payload)
            self.next = seq + 1

    def replay(self, stage: Stage) -> bool:
        """Send one replay request. Return whether the answer was complete; it may break off after any message."""
        answer = stage.replay(self.place, self.next)
        whole = not self.breaks or self.rng.random() < 0.3
        cut = len(answer) if whole else self.rng.randint(0, len(answer))
        for seq, payload in answer[:cut]:
            if seq >= self.next:
                self.apply(payload)
                self.next = seq + 1
        self.broken += not whole
        return whole


def world(seed: int, *, asks_on: bool) -> tuple[Trusting, Modelled]:
    """Run a router that reconnects several times, on a stream whose journal is trimmed early or never.

    Return the router and the stream's relay with its engines.

    ``asks_on`` says whether the router repeats a replay request until it gets a complete answer. Otherwise it repeats
    the request only until it has all batches before the live batch that showed the gap.
    """
    rng = random.Random(seed)
    sources = rng.choice([1, 1, 2]) if asks_on else 1  # a state has at least one batch for each source
    stage = stage_of(sources, rng.choice([1, 3, 10, 10_000]), filled=rng.random() < 0.5)
    router = Trusting(rng, asks_on=asks_on)
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
            router.cut(stage)
            router.connect(stage)
        elif step < 0.7:
            stage.lose(router.connection)
        else:
            for _ in range(rng.randint(0, 6)):
                router.take(stage)
    stage.send_states()
    router.breaks = False
    stage.say(0, [("store", None, "GPU", [40])])  # store a new block: its batch makes an earlier gap visible
    while router.take(stage):
        pass
    return router, stage


@pytest.mark.parametrize("most", [SLICE, 1000], ids=["asks on until END", "a state is one batch"])
def test_a_router_is_exact_after_any_interruptions_of_answers(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    cut_states(monkeypatch, most // SLICE, most)
    wrong: list[int] = []
    broken = 0
    for seed in range(WORLDS):
        router, stage = world(seed, asks_on=most == SLICE)
        broken += router.broken > 0
        if router.views.blocks != stage.truth:
            wrong.append(seed)
    assert broken > WORLDS / 4
    assert not wrong, f"{len(wrong)} of {broken} worlds with an interruption"


def test_a_router_may_not_notice_an_interruption_of_a_state_of_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is a limit that docs/PROTOCOL.md states: a router has to repeat its request until an answer ends with END.

    Batch 2 is lost, the journal no longer has it, and the later batches wait in the live queue. The answer is a state
    in the seqs from 2. It breaks off after its first batch, and the live queue continues with the next seq.
    """
    stage = stage_of(1, 1, filled=True)
    cut_states(monkeypatch, 1)
    router = Trusting(random.Random(0), asks_on=False)
    router.connect(stage)
    assert router.connection is not None
    router.connection.waiting = False
    for node in range(1, 11):
        stage.say(0, [("store", None, "GPU", [node])])
    first, second, _, *rest = router.connection.live
    router.connection.live.clear()
    for seq, payload in (first, second):
        router.receive(stage, seq, payload)
    answer = stage.replay(router.place, router.next)
    for seq, payload in answer[:1]:
        router.receive(stage, seq, payload)
    for seq, payload in rest:
        router.receive(stage, seq, payload)
    assert router.views.blocks < stage.truth
