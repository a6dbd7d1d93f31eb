"""One publisher as it stands: whose rank it is, and what it may be said to hold."""

import pytest

from kvbus.core.normalizing.rules import Rules
from kvbus.core.sequencing.settings import Settings, State
from kvbus.core.source import Source
from kvbus.core.source_spec import NOBODY, SourceSpec
from kvbus.core.types import Filtered
from kvbus.core.wire.profiles import PROFILES
from tests.doubles.payloads import payload, store
from tests.typed import well_formed


def made(**settings):
    return Source(SourceSpec("engine", 3, Settings(**settings), Rules(), topic=b"kv"))


def test_it_begins_as_it_is_configured():
    source = made()
    assert (source.rank, source.topic, source.state) == (3, b"kv", State.CONNECTING)
    assert not source.gone
    assert Source(NOBODY).gone


def test_the_first_rank_of_an_epoch_holds_and_others_are_counted():
    source = made()
    for rank in (5, 5, 6, 7):
        source.see_rank(rank)
    assert source.rank == 5
    assert source.stats.filtered[Filtered.OTHER_RANK] == 2


def test_it_is_partial_where_its_index_is_full():
    source = Source(SourceSpec("engine", 0, Settings(), Rules(max_blocks=1)))
    assert not source.partial
    source.normalizer.apply(well_formed(payload(store([1, 2]))))
    assert source.partial


def test_it_is_partial_where_its_history_is_not_known():
    source = made(replay=False)
    source.sequencer.up(0.0)
    source.sequencer.live(5, b"x", 0.0)
    source.sequencer.tick(1e6)
    assert source.state == State.LIVE
    assert source.partial


@pytest.mark.parametrize(("profile", "passes"), [("vllm", True), ("aibrix", False)])
def test_what_needs_no_change_passes_where_a_profile_says_the_same(profile, passes):
    assert made().says(PROFILES[profile].wire) is passes
