"""Tests that every router gets the state when it subscribes and becomes exact.

Some of the routers check seqs and request replays, and some do not. The relay is real. Connections, routers and replays
advance step by step, in an order that Hypothesis chooses. A connection may break anywhere, also between two batches of
a state.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.profiles import Profile, Wire
from tests.doubles.payloads import unpack
from tests.doubles.stage import FAMILIES, Checking, Stage, Trusting, cut_states
from tests.properties.test_normalize import EVENTS, Model, Naming, named, play

SLICE = 2
"""Number of blocks per batch of a state. It is small, so that a state has several batches."""


def specs(count: int, *, ranked: bool = False, **more: Any) -> list[SourceSpec]:
    """Return the descriptions of sources whose engines answer no replay requests.

    The sources are the ranks of one engine if ``ranked``, otherwise separate engines.
    """
    more = {"replay": False, "probe_interval": 0.0} | more
    return [SourceSpec(f"e{i}", i if ranked else 0, **more) for i in range(count)]


class Modelled(Stage):
    """A relay with substitutes for its sockets (see `Stage`), and with simple models of its engines' caches.

    Its output sends the state on subscription.
    """

    def __init__(self, sources: list[SourceSpec], outputs: list[OutputSpec], kind: str = "unsigned") -> None:
        self.models = [Model() for _ in sources]
        self.naming = Naming(kind)
        super().__init__(sources, outputs)

    def say(self, source: int, wanted: Any) -> None:
        i = source % len(self.models)
        (events,) = play(self.models[i], self.naming, [wanted])
        self.send(i, *events)

    @property
    def truth(self) -> set[Any]:
        return {(i, *key) for i, model in enumerate(self.models) for key in named(model, self.naming)}


def stage_of(sources: int, journal: int, *, filled: bool) -> Modelled:
    profile = Profile(Wire(), "4", filled)
    output = OutputSpec("out", profile, [None], merged=sources > 1, heartbeat=0.0, journal_batches=journal)
    return Modelled(specs(sources), [output])


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(0, 2), st.lists(EVENTS, max_size=6)),
        st.tuples(st.sampled_from(["connect", "cut", "lose", "new"]), st.integers(0, 2), st.none()),
        st.tuples(st.sampled_from(["take", "break"]), st.integers(0, 2), st.integers(0, 6)),
        st.tuples(st.sampled_from(["send", "beat"]), st.just(0), st.none()),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=400)
@given(STEPS, st.integers(1, 3), st.sampled_from([1, 3, 10_000]), st.booleans(), st.permutations(FAMILIES))
def test_every_connected_router_is_exact_at_the_end(
    steps: Any, sources: int, journal: int, filled: bool, families: list[type[Trusting]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut_states(patch, SLICE, SLICE)
        stage = stage_of(sources, journal, filled=filled)
        routers = [family() for family in families]
        stage.play(routers, steps)
        stage.connect_all(routers)
        stage.say(0, [("store", None, "GPU", [1])])
        stage.read_all(routers)
        for router in routers:
            router.holds(stage.truth)


def test_a_connected_router_gets_empty_batches_while_another_gets_the_state() -> None:
    stage = stage_of(1, 100, filled=False)
    there, late = Checking(), Checking()
    there.connect(stage)
    stage.send_states()
    for node in range(6):
        stage.say(0, [("store", None, "GPU", [node])])
    stage.read_all([there])
    before = there.next
    late.connect(stage)
    stage.send_states()
    assert there.connection is not None
    assert [unpack(payload)[1] for _, payload in there.connection.live] == [[]]
    assert [seq for seq, _ in there.connection.live] == [before]
    late.take(stage)
    late.holds(stage.truth)


def test_the_first_transfer_does_not_begin_at_seq_0() -> None:
    """A state on subscription never has seq 0.

    If batch 0 begins with AllBlocksCleared, a reader concludes that the engine is SGLang, whose clears apply to every
    tier.
    """
    stage = stage_of(1, 100, filled=False)
    router = Trusting()
    router.connect(stage)
    stage.send_states()
    assert router.connection is not None
    assert router.connection.reader is not None
    assert router.connection.reader.transfer.first_seq == 1
