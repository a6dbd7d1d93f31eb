"""The marks of the outputs' numbering: never behind what was used, whatever becomes of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbus.daemon.seq_reservation import AHEAD, SeqMarks, reached
from kvbus.errors import InUseError

NAMES = ["routers tcp://*:5657", "routers tcp://*:5658"]


def the_file(directory: Path) -> Path:
    """The file of one of the two streams."""
    return min(directory.iterdir())


def test_a_first_process_begins_at_0(tmp_path: Path) -> None:
    with SeqMarks(tmp_path, NAMES) as marks:
        assert [marks.first(0), marks.first(1)] == [0, 0]
        assert marks.kept


def test_after_an_orderly_end_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    marks = SeqMarks(tmp_path, NAMES)
    marks.use(0, 0)
    marks.close([7, 0])
    with SeqMarks(tmp_path, NAMES) as again:
        assert [again.first(0), again.first(1)] == [7, 0]


@pytest.mark.parametrize("used", [0, 1, AHEAD - 1, AHEAD, AHEAD + 1, 10 * AHEAD + 3])
def test_after_a_kill_it_goes_on_past_everything_used(tmp_path: Path, used: int) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from kvbus.daemon.seq_reservation import SeqMarks\n"
        "marks = SeqMarks(Path(sys.argv[1]), sys.argv[3:])\n"
        "for seq in range(int(sys.argv[2]) + 1): marks.use(1, seq)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path), str(used), *NAMES], timeout=60, check=False)
    assert killed.returncode == -9
    with SeqMarks(tmp_path, NAMES) as marks:
        assert used < marks.first(1) <= used + AHEAD
        assert marks.first(0) == 0


def test_a_mark_belongs_to_its_stream_whatever_others_there_are(tmp_path: Path) -> None:
    SeqMarks(tmp_path, NAMES).close([5, 6])
    with SeqMarks(tmp_path, ["routers tcp://*:7000", NAMES[1]]) as marks:
        assert [marks.first(0), marks.first(1)] == [0, 6]


def test_a_directory_is_made(tmp_path: Path) -> None:
    SeqMarks(tmp_path / "a" / "b", NAMES).close([5, 6])
    with SeqMarks(tmp_path / "a" / "b", NAMES) as marks:
        assert marks.first(0) == 5


@pytest.mark.parametrize("content", [b"x", b"x" * 32, b"kvbus-seq-mark-1" + b"\0" * 3, b"\0" * 4096])
def test_a_file_that_is_no_file_of_marks_is_made_anew(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    SeqMarks(tmp_path, NAMES).close([5, 6])
    the_file(tmp_path).write_bytes(content)
    with SeqMarks(tmp_path, NAMES) as marks:
        assert min(marks.first(0), marks.first(1)) == 0
        assert max(marks.first(0), marks.first(1)) in (5, 6)
    assert "made anew" in caplog.text


def test_a_link_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept, victim = tmp_path / "kept", tmp_path / "victim"
    kept.mkdir()
    SeqMarks(kept, NAMES).close([5, 6])
    victim.write_bytes(b"precious")
    path = the_file(kept)
    path.unlink()
    path.symlink_to(victim)
    with SeqMarks(kept, NAMES) as marks:
        assert not marks.kept
        assert marks.first(0) == 0
    assert victim.read_bytes() == b"precious"
    assert "a restart begins at 0" in caplog.text


def test_without_a_directory_nothing_is_kept() -> None:
    marks = SeqMarks(None, NAMES)
    marks.use(0, 12)
    marks.close([13, 0])
    assert not marks.kept


def test_the_file_is_the_users_own(tmp_path: Path) -> None:
    SeqMarks(tmp_path, NAMES).close([5, 6])
    info = the_file(tmp_path).stat()
    assert info.st_mode & 0o777 == 0o600
    assert info.st_uid == os.getuid()


def test_one_process_at_a_time_numbers_a_stream(tmp_path: Path) -> None:
    first = SeqMarks(tmp_path, NAMES)
    first.use(1, 0)
    with pytest.raises(InUseError, match=rf"the numbering of routers tcp://\*:5658 .*process {os.getpid()} on "):
        SeqMarks(tmp_path, ["routers tcp://*:7000", NAMES[1]])
    first.use(1, 2 * AHEAD)
    first.close([5, 3 * AHEAD])
    with SeqMarks(tmp_path, NAMES) as again:
        assert [again.first(0), again.first(1)] == [5, 3 * AHEAD]


def test_a_stream_that_another_process_numbers_is_not_added(tmp_path: Path) -> None:
    other = SeqMarks(tmp_path, NAMES[1:])
    with SeqMarks(tmp_path, NAMES[:1]) as marks:
        with pytest.raises(InUseError):
            marks.add(NAMES[1])
        assert marks.add("routers tcp://*:7000") == 1
        marks.use(1, 0)
        assert [marks.first(0), marks.first(1)] == [0, AHEAD]
    other.close([0])


def test_marks_that_nobody_has_signed_are_marks(tmp_path: Path) -> None:
    SeqMarks(tmp_path, NAMES).close([5, 6])
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:24])
    with SeqMarks(tmp_path, NAMES) as again:
        assert [again.first(0), again.first(1)] == [5, 6]


def test_how_far_a_directory_has_got_is_its_highest_number(tmp_path: Path) -> None:
    assert reached(tmp_path) == 0
    SeqMarks(tmp_path, NAMES).close([7, 9000])
    assert reached(tmp_path) == 9000
    (tmp_path / "kvbus-torn.seq").write_bytes(b"kv")
    (tmp_path / "kvbus-folder.seq").mkdir()
    assert reached(tmp_path) == 9000
