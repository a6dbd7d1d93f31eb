"""Tests for seq reservations: after a restart, kvbus uses no seq below a used one, even if it was killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvbus.state.contract import Reserved, StoreError
from kvbus.state.reservations import SeqReservations
from kvbus.state.sqlite import RESERVE_AHEAD as AHEAD
from kvbus.state.sqlite import SqliteStore
from tests.state.left import opened, rows

NAMES = ["routers tcp://*:5657", "routers tcp://*:5658"]


def named(store: SqliteStore | None, names: Sequence[str] = NAMES) -> SeqReservations:
    """Return the seq reservations of one output whose streams have these names."""
    made = SeqReservations(store)
    for slot, name in enumerate(names):
        made.add(0, slot, name)
    return made


@contextlib.contextmanager
def process(directory: Path, names: Sequence[str] = NAMES) -> Iterator[SeqReservations]:
    """Yield the seq reservations of a process that ends without closing them, as after a kill."""
    with opened(directory) as store:
        yield named(store, names)


def ended(directory: Path, *next_seqs: int) -> None:
    """Run a process that uses seqs up to ``next_seqs`` and shuts down gracefully."""
    with process(directory) as reservations:
        reservations.close({(0, slot): seq for slot, seq in enumerate(next_seqs)})


def firsts(reservations: SeqReservations) -> list[int]:
    return [reservations.first(0, 0), reservations.first(0, 1)]


def test_the_first_process_begins_at_seq_0(tmp_path: Path) -> None:
    with process(tmp_path) as reservations:
        assert firsts(reservations) == [0, 0]


def test_seqs_continue_without_a_gap_after_a_graceful_shutdown(tmp_path: Path) -> None:
    with process(tmp_path) as reservations:
        reservations.use(0, 0, 0)
        reservations.close({(0, 0): 7, (0, 1): 0})
    with process(tmp_path) as again:
        assert firsts(again) == [7, 0]


@pytest.mark.parametrize("used", [0, 1, AHEAD - 1, AHEAD, AHEAD + 1, 10 * AHEAD + 3])
def test_seqs_continue_above_all_used_seqs_after_a_kill(tmp_path: Path, used: int) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from kvbus.state.reservations import SeqReservations\n"
        "from tests.state.left import opened\n"
        "with opened(Path(sys.argv[1])) as store:\n"
        "    reservations = SeqReservations(store)\n"
        "    for slot, name in enumerate(sys.argv[3:]): reservations.add(0, slot, name)\n"
        "    for seq in range(int(sys.argv[2]) + 1): reservations.use(0, 1, seq)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path), str(used), *NAMES], timeout=60, check=False)
    assert killed.returncode == -9
    with process(tmp_path) as reservations:
        assert used < reservations.first(0, 1) <= used + AHEAD
        assert reservations.first(0, 0) == 0


def test_a_seq_is_reserved_on_disk_before_it_is_used(tmp_path: Path) -> None:
    with process(tmp_path) as reservations:
        reservations.use(0, 0, 41)
        assert f"{41 + AHEAD:x}" in "".join(rows(tmp_path)).lower()


def test_a_reservation_belongs_to_its_stream_name(tmp_path: Path) -> None:
    ended(tmp_path, 5, 6)
    with process(tmp_path, ["routers tcp://*:7000", NAMES[1]]) as reservations:
        assert firsts(reservations) == [0, 6]


def test_the_highest_number_of_slots_of_a_merged_stream_is_kept(tmp_path: Path) -> None:
    with process(tmp_path) as reservations:
        assert reservations.slots(0) == 0
        reservations.widen(0, 3)
        reservations.widen(0, 2)
        reservations.use(0, 0, 7)
    with process(tmp_path) as again:
        assert again.slots(0) == 3
        assert again.first(0, 0) == 7 + AHEAD


def test_reservations_without_a_store_are_not_kept() -> None:
    reservations = named(None)
    reservations.use(0, 0, 12)
    reservations.close({(0, 0): 13, (0, 1): 0})
    assert named(None).first(0, 0) == 0


def test_a_stream_without_a_final_seq_keeps_its_reservation(tmp_path: Path) -> None:
    with process(tmp_path) as reservations:
        reservations.use(0, 0, 10)
        reservations.use(0, 1, 10)
        reservations.close({(0, 0): 11, (7, 7): 5})
    with process(tmp_path) as again:
        assert firsts(again) == [11, 10 + AHEAD]


def test_a_stream_that_returns_has_its_old_reservation(tmp_path: Path) -> None:
    with process(tmp_path) as reservations:
        reservations.use(0, 1, 10)
        reservations.add(0, 1, NAMES[1])
        assert reservations.first(0, 1) == 10 + AHEAD


def test_skipping_seqs_is_written_with_the_first_used_seq(tmp_path: Path) -> None:
    ended(tmp_path, 3, 9000)
    with process(tmp_path) as reservations:
        before = rows(tmp_path)
        reservations.skip(7000, output=0)
        assert firsts(reservations) == [7000, 9000]
        assert rows(tmp_path) == before
    with process(tmp_path) as reservations:
        assert firsts(reservations) == [3, 9000]
        reservations.skip(7000, output=0)
        reservations.use(0, 0, 7000)
    with process(tmp_path) as again:
        assert again.first(0, 0) == 7000 + AHEAD


def test_a_forgotten_stream_leaves_no_reservation_and_a_free_slot(tmp_path: Path) -> None:
    with process(tmp_path) as reservations:
        reservations.use(0, 0, 41)
        reservations.forget(0, 0)
        reservations.add(0, 0, "another", least=7)
        assert reservations.first(0, 0) == 7
        reservations.forget(0, 0)
        reservations.add(0, 0, NAMES[0])
        assert reservations.first(0, 0) == 0
    without = named(None)
    without.forget(0, 1)
    without.add(0, 1, "another", least=9)
    assert without.first(0, 1) == 9


def test_a_reservation_takes_precedence_over_the_lowest_first_seq(tmp_path: Path) -> None:
    ended(tmp_path, 3, 5)
    with process(tmp_path, []) as reservations:
        reservations.add(0, 0, NAMES[0], least=100)
        reservations.add(0, 1, "new", least=100)
        assert firsts(reservations) == [3, 100]


def test_a_dropped_output_keeps_its_next_seqs(tmp_path: Path) -> None:
    with process(tmp_path) as reservations:
        reservations.use(0, 0, 41)
        reservations.drop(0, {(0, 0): 42})
        assert reservations.first(0, 0) == 0
    with process(tmp_path) as again:
        assert firsts(again) == [42, 0]


def test_a_failed_write_of_a_reservation_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_store: SqliteStore, _reserved: Reserved) -> None:
        raise StoreError("/state: No space left on device")

    with process(tmp_path) as reservations:
        monkeypatch.setattr(SqliteStore, "reserve", full)
        reservations.use(0, 0, 3)
        reservations.use(0, 0, 3 + 2 * AHEAD)
    assert caplog.text.count("seqs cannot be reserved: /state: No space left on device") == 1


def test_small_texts_in_the_store_are_kept(tmp_path: Path) -> None:
    with process(tmp_path) as reservations:
        assert reservations.kept("slots") is None
        reservations.keep("slots", b"one")
        before = rows(tmp_path)
        reservations.keep("slots", b"one")
        assert rows(tmp_path) == before, "nothing has changed, so nothing is written"
        reservations.keep("slots", b"two")
    with process(tmp_path) as again:
        assert again.kept("slots") == b"two"
