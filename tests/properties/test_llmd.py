"""Tests that llm-d's subscriber with replay becomes exact at any seq, whatever happens to its connections.

The relay is real, and the subscriber has llm-d's rules (`tests.doubles.llmd`). Hypothesis chooses the steps: the router
loses its connection in the middle of a state, is slow, cannot reach the replay port, or starts again; or kvbus loses its
state, so that its seqs jump. At the end the router has the engines' blocks, after at most one cooldown of llm-d.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbus.core import answering
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.wire.profiles import PROFILES
from tests.doubles.stage import Llmd, cut_states
from tests.properties.test_normalize import EVENTS
from tests.properties.test_state_on_subscription import SLICE, Modelled, specs

FILLER = 50
"""Maximum number of empty batches in an answer of these tests."""

JUMPS = [FILLER // 2, FILLER, 2 * FILLER, 10**12]


class World(Modelled):
    """A relay with one llm-d subscriber."""

    def __init__(self, sources: int, journal: int, first_seq: int) -> None:
        topic = b"kv@pod@model"
        more: dict[str, Any] = {"merged": sources > 1, "heartbeat": 0.0, "journal_batches": journal}
        output = OutputSpec("out", PROFILES["llm-d"], [topic], **more)
        super().__init__(specs(sources), [output])
        self.relay.outputs[0].streams[0].next_seq = first_seq
        self.router = Llmd()

    def jump(self, count: int) -> None:
        """Continue at higher seqs with an empty journal, as a kvbus that has lost its state, and cut the connection."""
        self.router.cut(self)
        stream = self.relay.outputs[0].streams[0]
        stream.resume_at(stream.next_seq + count)
        self.beat()

    def wait(self, seconds: float) -> None:
        self.router.now += seconds

    def end(self) -> None:
        """End all faults, and let the router read until it has everything."""
        self.router.unreachable = 0
        if self.router.connection is None:
            self.router.connect(self)
        for node in range(100, 106):
            if node % 3 == 0:
                self.wait(self.router.rules.cooldown)
            else:  # a new block makes a gap visible, or ends a cooldown
                self.say(0, [("store", None, "GPU", [node])])
            self.send_states()
            while self.router.take(self):
                pass


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(0, 2), st.lists(EVENTS, max_size=6)),
        st.tuples(st.sampled_from(["connect", "cut", "lose", "new", "send", "beat"]), st.just(0), st.none()),
        st.tuples(st.just("take"), st.just(0), st.integers(0, 6)),
        st.tuples(st.sampled_from(["jump"]), st.sampled_from(JUMPS), st.none()),
        st.tuples(st.just("unreachable"), st.integers(1, 5), st.none()),
        st.tuples(st.just("wait"), st.sampled_from([0.1, 29.0, 31.0]), st.none()),
    ),
    min_size=5,
    max_size=60,
)


def play(world: World, steps: Any) -> None:
    router = world.router
    for what, count, more in steps:
        if what == "unreachable":
            router.unreachable = count
        else:
            routers = [router]
            world.play(routers, [(what, count, more)])
            world.router = router = routers[0]


STORED = [("store", None, "GPU", [1, 2, 3, 4])]

WITHOUT_STATE: Any = [
    ("say", 0, STORED),
    ("unreachable", 4, None),  # its first request fails, so it drops the state
    ("connect", 0, None),
    ("send", 0, None),
    ("take", 0, 9),
    ("wait", 31.0, None),
    ("say", 0, [("store", None, "GPU", [5])]),
    ("take", 0, 9),  # it takes END, and this batch
    ("cut", 0, None),
    ("say", 0, [("store", None, "GPU", [6])]),
]
"""Steps after which a router continues from a seq at which it lacks the state."""


@settings(max_examples=400)
@given(STEPS, st.integers(1, 2), st.sampled_from([1, 3, 10_000]), st.sampled_from([0, 1, FILLER, 10**12]))
@example(WITHOUT_STATE, 1, 3, 10**12)
@example(WITHOUT_STATE, 1, 3, 0)
@example([("say", 0, STORED), ("connect", 0, None), ("send", 0, None), ("take", 0, 9)], 1, 1, 10**12)
@example([("connect", 0, None), ("say", 0, STORED), ("send", 0, None), ("take", 0, 9), ("jump", 10**12, None)], 1, 1, 0)
def test_llm_d_has_the_engines_blocks_at_the_end(steps: Any, sources: int, journal: int, first_seq: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "MAX_FILLER", FILLER)
        cut_states(patch, SLICE, SLICE)
        world = World(sources, journal, first_seq)
        play(world, steps)
        world.end()
        assert world.router.views.blocks == world.truth
