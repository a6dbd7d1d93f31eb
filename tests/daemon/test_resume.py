"""Tests for the saved state with which a kvbus process starts.

In these tests, there is no saved state, or it is exact, or it is older than what the routers have received.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from kvbus.config import Config, load
from kvbus.core.events import Started
from kvbus.daemon.build import next_seqs, reserve_seqs
from kvbus.daemon.placement import Placement, assign_slots
from kvbus.daemon.resume import Beginning, identity, resume
from kvbus.state.contract import MARGIN
from kvbus.state.reservations import SeqReservations
from kvbus.state.sqlite import RESERVE_AHEAD as AHEAD
from kvbus.state.sqlite import SqliteStore
from kvbus.state.writer import StateWriter
from tests.state.left import opened


def config_of(name: str) -> Config:
    return load(None, env={}, overrides={"sources": [{"endpoint": "ipc:///engine", "name": name}], "outputs": [{}]})


@pytest.fixture
def config() -> Config:
    return config_of("a")


class Process(NamedTuple):
    found: Beginning
    reservations: SeqReservations
    store: SqliteStore


@contextmanager
def process(config: Config, tmp_path: Path, *, boot: bytes | None = None) -> Iterator[Process]:
    """Run a kvbus process without sockets on a state directory, and end it as a kill does."""
    placement = assign_slots(Placement(), config)
    with opened(tmp_path, boot=boot) as store:
        reservations = SeqReservations(store)
        reserve_seqs(reservations, config, placement)
        writer = StateWriter(store, time.monotonic)
        found = resume(config, placement, writer, reservations, 0.0)
        writer.begin(found.relay)
        yield Process(found, reservations, store)
        writer.flush()


def test_no_state_is_restored_without_a_store(config: Config) -> None:
    placement, reservations = assign_slots(Placement(), config), SeqReservations(None)
    reserve_seqs(reservations, config, placement)
    assert not resume(config, placement, None, reservations, 0.0).restored


def test_a_state_is_restored_after_a_kill(config: Config, tmp_path: Path) -> None:
    with process(config, tmp_path) as (found, _, _):
        assert not found.restored
        found.relay.handle(Started(1.0), 0.0)
    with process(config, tmp_path) as (again, _, _):
        assert again.restored


def test_a_state_of_another_boot_is_not_used_until_it_is_written_again(config: Config, tmp_path: Path) -> None:
    """kvbus does not trust a state of an earlier boot of the machine.

    It was not synced to the disk before a crash, so routers may have received batches that it lacks.
    """
    with process(config, tmp_path, boot=bytes(16)) as (_, reservations, _):
        reservations.use(0, 0, 7)
    used = 7 + AHEAD
    with process(config, tmp_path, boot=b"1" * 16) as (again, _, _):
        assert not again.restored
        assert next_seqs(again.relay) == {(0, 0): used + MARGIN}
    with process(config, tmp_path, boot=b"1" * 16) as (again, _, _):
        assert again.restored
        assert next_seqs(again.relay) == {(0, 0): used + MARGIN}


def test_an_old_state_stays_old_if_kvbus_is_killed_before_a_new_one(config: Config, tmp_path: Path) -> None:
    with process(config, tmp_path, boot=bytes(16)) as (_, reservations, _):
        reservations.use(0, 0, 7)
    with opened(tmp_path, boot=b"1" * 16) as store:
        assert store.older
        store.reserve(store.reserved)
    with process(config, tmp_path, boot=b"1" * 16) as (again, _, _):
        assert not again.restored
        assert next_seqs(again.relay)[0, 0] > 7 + MARGIN


def test_a_state_of_other_sources_is_refused_and_no_seq_goes_back(config: Config, tmp_path: Path) -> None:
    with process(config, tmp_path) as (_, reservations, _):
        reservations.use(0, 0, 7)
    with process(config_of("b"), tmp_path) as (found, reservations, store):
        assert not found.restored
        assert store.refused == 1
        assert reservations.first(0, 0) == 7 + AHEAD
    with process(config_of("b"), tmp_path) as (found, _, store):
        assert found.restored
        assert store.refused == 0


def test_a_state_is_identified_by_its_sources_and_outputs(config: Config) -> None:
    streams = {stream.index: stream for stream in config.streams()}
    assert identity(config, streams, 2) == ["0 a count", "2 slots", "routers"]


def test_a_state_is_refused_if_the_setting_duplicates_has_changed(config: Config, tmp_path: Path) -> None:
    """If the setting ``duplicates`` has changed, kvbus does not use the saved state, whose copies were counted by
    the old rule.

    With ``duplicates: last``, the engine sends one removal for all copies, so a block with several counted copies would
    stay live for ever.
    """
    with process(config, tmp_path):
        pass
    with process(config.model_copy(update={"duplicates": "last"}), tmp_path) as (found, _, store):
        assert not found.restored
        assert store.refused


@pytest.mark.parametrize(
    "rule",
    [
        {"block_size": 8},
        {"groups": "all"},
        {"without_media": ("CPU",)},
        {"orphans": "drop"},
        {"on_lost": "keep"},
    ],
    ids=str,
)
def test_a_state_is_refused_if_a_rule_for_kept_blocks_has_changed(
    config: Config, rule: dict[str, object], tmp_path: Path
) -> None:
    """If a setting that decides which blocks kvbus keeps has changed, kvbus does not use the saved state.

    Otherwise kvbus would apply the new rule to the stores in the write-ahead log, and leave out blocks that routers
    hold. It would never remove these blocks at the routers. Blocks from the checkpoint would stay although the new rule
    excludes them.
    """
    with process(config, tmp_path):
        pass
    changed = config.model_copy(update=rule)
    with process(changed, tmp_path) as (found, _, store):
        assert not found.restored
        assert store.refused
    with process(changed, tmp_path) as (found, _, store):
        assert found.restored
    with process(config, tmp_path) as (found, _, store):
        assert not found.restored


def test_a_state_is_refused_if_the_setting_clears_has_changed(tmp_path: Path) -> None:
    """kvbus does not use a saved state if ``sources[].clears`` has changed since.

    Under the new setting, the clears in the write-ahead log would remove other blocks than routers have removed.
    """
    engine = {"endpoint": "ipc:///engine", "name": "a"}
    with process(load(None, env={}, overrides={"sources": [engine], "outputs": [{}]}), tmp_path):
        pass
    changed = load(None, env={}, overrides={"sources": [engine | {"clears": "all"}], "outputs": [{}]})
    with process(changed, tmp_path) as (found, _, store):
        assert not found.restored
        assert store.refused
