"""What a process begins with: nothing, the state as it was, or a state that is behind what routers have got."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbus.config import Config, load
from kvbus.core.events import Started
from kvbus.daemon.build import next_seqs, reserve_seqs
from kvbus.daemon.disk import Disk
from kvbus.daemon.placement import Placement, place
from kvbus.daemon.resume import Beginning, identity, resume
from kvbus.daemon.seq_reservation import AHEAD, SeqReservations
from tests.typed import there

DISK = Disk()


def of(name: str) -> Config:
    return load(None, env={}, overrides={"sources": [{"endpoint": "ipc:///engine", "name": name}], "outputs": [{}]})


@pytest.fixture
def config() -> Config:
    return of("a")


@contextmanager
def process(config: Config, tmp_path: Path, *, state: bool = True) -> Iterator[tuple[Beginning, SeqReservations]]:
    placement = place(Placement(), config)
    reservations = reserve_seqs(config, placement, tmp_path / "seq", DISK)
    directory = tmp_path / "state" if state else None
    found = resume(config, placement, directory, reservations, DISK, 0.0)
    if found.store is not None:
        found.store.begin(found.relay)
    try:
        yield found, reservations
    finally:
        if found.store is not None:
            found.store.close()
        reservations.release()


def test_without_a_directory_there_is_nothing(config: Config, tmp_path: Path) -> None:
    with process(config, tmp_path, state=False) as (found, _):
        assert (found.store, found.restored) == (None, False)


def test_a_state_goes_on_as_if_nothing_had_happened(config: Config, tmp_path: Path) -> None:
    with process(config, tmp_path) as (found, _):
        assert not found.restored
        found.relay.handle(Started(1.0), 0.0)
    with process(config, tmp_path) as (again, _):
        assert again.restored


def test_a_state_behind_the_numbering_is_no_truth(config: Config, tmp_path: Path) -> None:
    with process(config, tmp_path):
        pass
    with process(config, tmp_path, state=False) as (_, reservations):
        reservations.use(0, 0, 2 * AHEAD)
    with process(config, tmp_path) as (again, _):
        assert not again.restored
        assert next_seqs(again.relay) == {(0, 0): 3 * AHEAD}


def test_a_state_of_other_sources_is_refused_and_no_number_goes_back(config: Config, tmp_path: Path) -> None:
    with process(config, tmp_path) as (_, reservations):
        reservations.use(0, 0, 7)
    with process(of("b"), tmp_path) as (found, reservations):
        assert not found.restored
        assert there(found.store).refused
        assert reservations.first(0, 0) >= 7 + AHEAD


def test_a_state_is_known_by_its_sources_and_outputs(config: Config) -> None:
    assert identity(config, {stream.index: stream for stream in config.streams()}) == ["0 a count", "routers"]


def test_what_was_counted_by_another_rule_is_learned_anew(config: Config, tmp_path: Path) -> None:
    """An engine that removes the last copy alone never removes again what one removal has left live."""
    with process(config, tmp_path):
        pass
    with process(config.model_copy(update={"duplicates": "last"}), tmp_path) as (found, _):
        assert not found.restored
        assert there(found.store).refused
