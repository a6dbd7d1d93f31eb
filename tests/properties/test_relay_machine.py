"""The whole pure relay against the truth: engines, network, kvbus and routers, in any order Hypothesis can think of.

What a :class:`~tests.properties.world.World` is made of and what must hold is there. A failure is printed as a script
that can be pasted into ``test_regressions.py``.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.properties.world import Setup, World

SOURCE = st.integers(0, 3)
PLACE = st.integers(0, 7)
MEDIUM = st.sampled_from(["GPU", "GPU", "CPU"])
CHANGE = st.one_of(
    st.tuples(st.sampled_from(["store", "remove", "remove"]), st.integers(1, 7), MEDIUM),
    st.tuples(st.just("chain"), st.integers(2, 7), MEDIUM),
    st.tuples(st.sampled_from(["tail", "untail"]), st.integers(1, 7), MEDIUM),
    st.just(("clear",)),
    st.tuples(st.just("clear"), st.none(), MEDIUM),
)
SETUPS = st.builds(
    Setup,
    engines=st.lists(st.sampled_from(["replay", "replay", "replay", "deaf", "snapshot"]), min_size=1, max_size=3).map(
        tuple
    ),
    outputs=st.sampled_from(
        [
            ("vllm",),
            ("merged:vllm",),
            ("dynamo", "aibrix"),
            ("llm-d", "merged:dynamo"),
            ("sglang", "aibrix", "merged:llm-d"),
            ("merged:aibrix",),
        ]
    ),
    buffer_steps=st.sampled_from([3, 10, 1000]),
    bytes_hashes=st.booleans(),
    duplicates=st.sampled_from(["count", "detect", "ignore"]),
    orphans=st.sampled_from(["pass", "pass", "drop"]),
    on_lost=st.sampled_from(["clear", "clear", "keep"]),
    timeout=st.sampled_from([5.0, 1e9]),
    reorder_batches=st.sampled_from([4, 1000]),
    reorder_bytes=st.sampled_from([300, 10**9]),
    journal_batches=st.sampled_from([1, 3, 10_000]),
    journal_bytes=st.sampled_from([500, 10**9]),
    max_blocks=st.sampled_from([5, 10**6, 10**6]),
    block_size=st.sampled_from([None, 2]),
    blocks_per_batch=st.sampled_from([None, 1, 3]),
    host=st.booleans(),
)


class RelayMachine(RuleBasedStateMachine):
    """Hypothesis chooses; the world does."""

    @initialize(setup=SETUPS)
    def begin(self, setup: Setup) -> None:
        self.world = World(setup)
        for source in range(len(setup.engines)):
            self.take("publish", source, [("chain", 2, "GPU"), ("remove", 1, "GPU"), ("remove", 2, "GPU")], 1)

    def take(self, name: str, *args: Any) -> None:
        try:
            getattr(self.world, name)(*args)
        except Exception as error:
            script = "\n".join(self.world.lines_of_script())
            raise AssertionError(f"{type(error).__name__}: {error}\n\nas a test:\n\n{script}\n") from error

    @rule(source=SOURCE, changes=st.lists(CHANGE, min_size=1, max_size=4), times=st.integers(1, 5))
    def publish(self, source: int, changes: list[Any], times: int) -> None:
        self.take("publish", source, changes, times)

    @rule(source=SOURCE)
    def skip_a_number(self, source: int) -> None:
        self.take("skip_a_number", source)

    @rule(source=SOURCE, proxied=st.sampled_from([False, False, False, True]))
    def restart_engine(self, source: int, proxied: bool) -> None:
        self.take("restart_behind_a_proxy" if proxied else "restart_engine", source)

    @rule(source=SOURCE, seq=st.sampled_from([0, 1, 2, 5, 9, 2**40, 2**62]), block=st.integers(1, 7))
    def stranger(self, source: int, seq: int, block: int) -> None:
        self.take("stranger", source, seq, block)

    @rule(source=SOURCE)
    def connect(self, source: int) -> None:
        self.take("connect", source)

    @rule(source=SOURCE)
    def disconnect(self, source: int) -> None:
        self.take("disconnect", source)

    @rule(
        source=SOURCE,
        at=st.sampled_from([0, 0, 0, 1, 2, 5]),
        how=st.sampled_from(["once", "once", "once", "twice", "lost"]),
    )
    def live_batch(self, source: int, at: int, how: str) -> None:
        self.take("live_batch", source, at, how)

    @rule(source=SOURCE)
    def all_live_batches(self, source: int) -> None:
        self.take("all_live_batches", source)

    @rule(source=SOURCE, count=st.integers(1, 20))
    def answer(self, source: int, count: int) -> None:
        self.take("answer", source, count)

    @rule(source=SOURCE)
    def answers_are_lost(self, source: int) -> None:
        self.take("answers_are_lost", source)

    @rule(source=SOURCE, request=st.integers(0, 50), seq=st.integers(0, 20))
    def a_reply_to_nothing(self, source: int, request: int, seq: int) -> None:
        self.take("a_reply_to_nothing", source, request, seq)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.take("time_passes", seconds)

    @rule()
    def checkpoint_begins(self) -> None:
        self.take("checkpoint_begins")

    @rule(new_generation=st.booleans())
    def kvbus_is_killed(self, new_generation: bool) -> None:
        self.take("kvbus_is_killed", new_generation)

    @rule()
    def kvbus_is_killed_without_state(self) -> None:
        self.take("kvbus_is_killed_without_state")

    @rule(place=PLACE, deaf=st.booleans())
    def router_link(self, place: int, deaf: bool) -> None:
        self.take("router_link", place, deaf)

    @rule(place=PLACE)
    def router_restarts(self, place: int) -> None:
        self.take("router_restarts", place)

    @rule(place=PLACE)
    def late_router_asks(self, place: int) -> None:
        self.take("late_router_asks", place)

    @rule(place=PLACE, messages=st.integers(1, 4))
    def late_router_reads(self, place: int, messages: int) -> None:
        self.take("late_router_reads", place, messages)

    @rule(place=PLACE, batches=st.integers(0, 3))
    def subscriber_connects(self, place: int, batches: int) -> None:
        self.take("subscriber_connects", place, batches)

    @rule(place=PLACE)
    def subscriber_resumes(self, place: int) -> None:
        self.take("subscriber_resumes", place)

    @rule(place=PLACE, batches=st.integers(1, 3))
    def subscriber_reads(self, place: int, batches: int) -> None:
        self.take("subscriber_reads", place, batches)

    @rule(place=PLACE)
    def subscriber_is_cut(self, place: int) -> None:
        self.take("subscriber_is_cut", place)

    @rule(place=PLACE)
    def router_asks_for_a_snapshot(self, place: int) -> None:
        self.take("router_asks_for_a_snapshot", place)

    @rule()
    def quiescence(self) -> None:
        self.take("quiescence")


RelayMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestRelayMachine = RelayMachine.TestCase
