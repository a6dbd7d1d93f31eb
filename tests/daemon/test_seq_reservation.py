"""Seq reservations: never behind a number that was used, even if the process is killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvbus.common.errors import InUseError
from kvbus.daemon.disk import Disk
from kvbus.daemon.seq_reservation import AHEAD, UNKNOWN, SeqReservations, reached

RESERVATION = 72
"""Bytes: what it is, and two copies of a number, the lowest number of a state and a checksum."""

NAMES = ["routers tcp://*:5657", "routers tcp://*:5658"]


def reserved(directory: Path | None, names: Sequence[str] = NAMES) -> SeqReservations:
    """One output's streams, by their names."""
    made = SeqReservations(directory)
    try:
        for slot, name in enumerate(names):
            made.add(0, slot, name)
    except BaseException:
        made.release()
        raise
    return made


@contextlib.contextmanager
def process(directory: Path, names: Sequence[str] = NAMES) -> Iterator[SeqReservations]:
    """One that ends without closing them."""
    made = reserved(directory, names)
    try:
        yield made
    finally:
        made.release()


def ended(directory: Path, *next_seqs: int) -> None:
    """A process that used them and shut down gracefully."""
    reserved(directory).close({(0, slot): seq for slot, seq in enumerate(next_seqs)})


def the_file(directory: Path) -> Path:
    """The file of one of the two streams."""
    return min(directory.iterdir())


def test_a_first_process_begins_at_0(tmp_path: Path) -> None:
    with process(tmp_path) as reservations:
        assert [reservations.first(0, 0), reservations.first(0, 1)] == [0, 0]
        assert len(list(tmp_path.iterdir())) == len(NAMES)


def test_after_a_graceful_shutdown_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    reservations = reserved(tmp_path)
    reservations.use(0, 0, 0)
    reservations.close({(0, 0): 7, (0, 1): 0})
    with process(tmp_path) as again:
        assert [again.first(0, 0), again.first(0, 1)] == [7, 0]


@pytest.mark.parametrize("used", [0, 1, AHEAD - 1, AHEAD, AHEAD + 1, 10 * AHEAD + 3])
def test_after_a_kill_it_goes_on_past_everything_used(tmp_path: Path, used: int) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from kvbus.daemon.seq_reservation import SeqReservations\n"
        "reservations = SeqReservations(Path(sys.argv[1]))\n"
        "for slot, name in enumerate(sys.argv[3:]): reservations.add(0, slot, name)\n"
        "for seq in range(int(sys.argv[2]) + 1): reservations.use(0, 1, seq)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path), str(used), *NAMES], timeout=60, check=False)
    assert killed.returncode == -9
    with process(tmp_path) as reservations:
        assert used < reservations.first(0, 1) <= used + AHEAD
        assert reservations.first(0, 0) == 0


def test_a_reservation_belongs_to_its_stream_whatever_others_there_are(tmp_path: Path) -> None:
    ended(tmp_path, 5, 6)
    with process(tmp_path, ["routers tcp://*:7000", NAMES[1]]) as reservations:
        assert [reservations.first(0, 0), reservations.first(0, 1)] == [0, 6]


def test_how_many_slots_a_merged_stream_ever_had_is_kept(tmp_path: Path) -> None:
    with process(tmp_path) as reservations:
        assert reservations.slots(0) == 0
        reservations.widen(0, 3)
        reservations.widen(0, 2)
        reservations.use(0, 0, 7)
    with process(tmp_path) as again:
        assert again.slots(0) == 3
        assert again.first(0, 0) == 7 + AHEAD


def test_a_directory_is_made(tmp_path: Path) -> None:
    ended(tmp_path / "a" / "b", 5, 6)
    with process(tmp_path / "a" / "b") as reservations:
        assert reservations.first(0, 0) == 5


@pytest.mark.parametrize("content", [b"", b"x", b"x" * 72, b"kvbus-seq-mark-3" + b"\0" * 3, b"\0" * 4096])
def test_after_a_damaged_reservation_it_goes_on_far_ahead(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ended(tmp_path, 5, 6)
    the_file(tmp_path).write_bytes(content)
    with process(tmp_path) as reservations:
        firsts = [reservations.first(0, 0), reservations.first(0, 1)]
        assert min(firsts) in (5, 6)
        assert max(firsts) >= UNKNOWN
    assert "no seq reservation, or a damaged one" in caplog.text
    with process(tmp_path) as again:
        assert [again.first(0, 0), again.first(0, 1)] == firsts


def test_any_bit_may_flip(tmp_path: Path) -> None:
    """The number is there twice, with checksums, so it is right or far ahead and never past what a seq can be."""
    ended(tmp_path, 2**40, 2**40)
    path = the_file(tmp_path)
    whole = path.read_bytes()
    for bit in range(8 * RESERVATION):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with process(tmp_path) as reservations:
            firsts = [reservations.first(0, 0), reservations.first(0, 1)]
            assert min(firsts) == 2**40
            assert UNKNOWN <= max(firsts) < 2**53 if bit < 128 else max(firsts) == 2**40


def test_another_streams_reservation_is_not_taken_for_its_own(tmp_path: Path) -> None:
    ended(tmp_path, 5, 9000)
    one, other = sorted(tmp_path.iterdir())
    other.write_bytes(one.read_bytes())
    with process(tmp_path) as reservations:
        assert max(reservations.first(0, 0), reservations.first(0, 1)) >= UNKNOWN


def test_a_second_damage_leads_further_on(tmp_path: Path) -> None:
    ended(tmp_path, 5, 6)
    path = the_file(tmp_path)
    reached_so_far = 0
    for _ in range(3):
        path.write_bytes(b"")
        with process(tmp_path) as reservations:
            slot = 0 if reservations.first(0, 0) >= UNKNOWN else 1
            first = reservations.first(0, slot)
            assert first > reached_so_far
            reservations.use(0, slot, first)
            reached_so_far = first


def test_a_link_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept, victim = tmp_path / "kept", tmp_path / "victim"
    kept.mkdir()
    ended(kept, 5, 6)
    victim.write_bytes(b"precious")
    path = the_file(kept)
    path.unlink()
    path.symlink_to(victim)
    with process(kept) as reservations:
        firsts = [reservations.first(0, 0), reservations.first(0, 1)]
        assert max(firsts) >= UNKNOWN
        reservations.use(0, 0, max(firsts))
        reservations.use(0, 1, max(firsts))
    assert victim.read_bytes() == b"precious"
    assert not path.is_symlink()
    assert "no seq reservation, or a damaged one" in caplog.text


def test_without_a_directory_nothing_is_kept() -> None:
    reservations = reserved(None)
    reservations.use(0, 0, 12)
    reservations.close({(0, 0): 13, (0, 1): 0})
    assert reserved(None).first(0, 0) == 0


def test_the_file_is_the_users_own(tmp_path: Path) -> None:
    ended(tmp_path, 5, 6)
    info = the_file(tmp_path).stat()
    assert info.st_mode & 0o777 == 0o600
    assert info.st_uid == os.getuid()


def test_one_process_at_a_time_numbers_a_stream(tmp_path: Path) -> None:
    first = reserved(tmp_path)
    first.use(0, 1, 0)
    with pytest.raises(InUseError, match=rf"the numbering of routers tcp://\*:5658 .*process {os.getpid()} on "):
        reserved(tmp_path, ["routers tcp://*:7000", NAMES[1]])
    first.use(0, 1, 2 * AHEAD)
    first.close({(0, 0): 5, (0, 1): 3 * AHEAD})
    with process(tmp_path) as again:
        assert [again.first(0, 0), again.first(0, 1)] == [5, 3 * AHEAD]


def test_a_stream_that_another_process_numbers_is_not_added(tmp_path: Path) -> None:
    other = reserved(tmp_path, NAMES[1:])
    with process(tmp_path, NAMES[:1]) as reservations:
        with pytest.raises(InUseError):
            reservations.add(0, 1, NAMES[1])
        reservations.add(0, 1, "routers tcp://*:7000")
        reservations.use(0, 1, 0)
        assert [reservations.first(0, 0), reservations.first(0, 1)] == [0, AHEAD]
    other.close({(0, 0): 0})


def test_a_reservation_that_nobody_has_signed_counts(tmp_path: Path) -> None:
    ended(tmp_path, 5, 6)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:RESERVATION])
    with process(tmp_path) as again:
        assert [again.first(0, 0), again.first(0, 1)] == [5, 6]


def test_how_far_a_directory_has_got_is_its_highest_number(tmp_path: Path) -> None:
    assert reached(tmp_path) == 0
    ended(tmp_path, 7, 9000)
    assert reached(tmp_path) == 9000
    (tmp_path / "kvbus-torn.seq").write_bytes(b"kv")
    (tmp_path / "kvbus-folder.seq").mkdir()
    assert reached(tmp_path) == 9000


def test_a_stream_that_is_not_named_at_the_end_keeps_its_reservation(tmp_path: Path) -> None:
    made = reserved(tmp_path)
    made.use(0, 0, 10)
    made.use(0, 1, 10)
    made.close({(0, 0): 11, (7, 7): 5})
    with process(tmp_path) as again:
        assert [again.first(0, 0), again.first(0, 1)] == [11, 10 + AHEAD]


def test_a_stream_that_comes_again_has_the_reservation_it_had(tmp_path: Path) -> None:
    with process(tmp_path) as reservations:
        reservations.use(0, 1, 10)
        reservations.add(0, 1, NAMES[1])
        assert reservations.first(0, 1) == 10 + AHEAD


def test_a_state_has_to_be_as_new_as_what_was_sent(tmp_path: Path) -> None:
    ended(tmp_path, 3, 3 * AHEAD)
    with process(tmp_path) as reservations:
        assert [reservations.lowest(0, 0), reservations.lowest(0, 1)] == [3, 3 * AHEAD]
        reservations.use(0, 0, 3)
        reservations.use(0, 1, 3 * AHEAD)
    with process(tmp_path) as reservations:
        assert [reservations.lowest(0, 0), reservations.lowest(0, 1)] == [0, 2 * AHEAD], "a burst may be unwritten"


def test_to_skip_changes_nothing_on_disk_until_a_number_is_used(tmp_path: Path) -> None:
    ended(tmp_path, 3, 9000)
    with process(tmp_path) as reservations:
        reservations.skip(7000)
        assert [reservations.first(0, 0), reservations.first(0, 1)] == [7000, 9000]
    with process(tmp_path) as reservations:
        assert [reservations.first(0, 0), reservations.first(0, 1)] == [3, 9000]
        reservations.skip(7000)
        reservations.use(0, 0, 7000)
    with process(tmp_path) as again:
        assert again.first(0, 0) == 7000 + AHEAD


def test_a_disk_that_takes_no_reservation_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full(Disk):
        def pwrite(self, fd: int, data: bytes, at: int) -> None:
            del fd, data, at
            raise OSError(28, "No space left on device")

    ended(tmp_path, 3, 9000)
    made = SeqReservations(tmp_path, Full())
    made.add(0, 0, NAMES[0])
    made.use(0, 0, 3)
    made.release()
    assert f"seq {3 + AHEAD} is not reserved" in caplog.text
    assert "after a kill the numbering may go back" in caplog.text


def test_a_stream_that_is_forgotten_leaves_no_file_and_its_place_is_free(tmp_path: Path) -> None:
    with process(tmp_path) as reservations:
        reservations.use(0, 0, 41)
        reservations.forget(0, 0)
        assert len(list(tmp_path.iterdir())) == 1
        reservations.add(0, 0, "another", least=7)
        assert reservations.first(0, 0) == 7
        reservations.forget(0, 0)
        reservations.add(0, 0, NAMES[0])
        assert reservations.first(0, 0) == 0
    without = reserved(None)
    without.forget(0, 1)
    without.add(0, 1, "another", least=9)
    assert without.first(0, 1) == 9


def test_who_begins_at_least_somewhere_goes_on_where_its_file_says(tmp_path: Path) -> None:
    ended(tmp_path, 3, 5)
    with process(tmp_path, []) as reservations:
        reservations.add(0, 0, NAMES[0], least=100)
        reservations.add(0, 1, "new", least=100)
        assert (reservations.first(0, 0), reservations.first(0, 1)) == (3, 100)


class _KeepsAll(Disk):
    def unlink(self, directory: int, name: str) -> None:
        raise PermissionError(1, "not permitted", name, directory)


def test_a_file_that_cannot_be_deleted_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = SeqReservations(tmp_path, _KeepsAll())
    made.add(0, 0, "a")
    made.forget(0, 0)
    assert "is not needed any more, delete it" in caplog.text
    made.add(0, 0, "a", least=5)
    made.release()
