"""Starting on a state takes no more memory than running did, however long the log is and whatever lies behind its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.long import LONG, sample

LOG = (400 if LONG else 110) * 10**6
MORE = 1.2


def most_memory(what: str, directory: Path) -> tuple[str, int]:
    """Whether a state was loaded, and the kilobytes that it took."""
    command = [sys.executable, "-m", "tests.daemon.filled", what, str(directory), str(LOG)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    loaded, memory = done.stdout.split()
    return loaded, int(memory)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A directory with a log that was not rotated, and the memory of the process that wrote it."""
    directory = tmp_path_factory.mktemp("killed")
    _, memory = most_memory("fill", directory)
    assert (directory / "state-1.log").stat().st_size >= LOG
    return directory, memory


@pytest.mark.timeout(900)
def test_a_log_is_read_frame_by_frame(killed: tuple[Path, int]) -> None:
    directory, running = killed
    loaded, starting = most_memory("load", directory)
    assert loaded == "yes"
    assert starting <= MORE * running


@pytest.mark.timeout(900)
def test_so_is_what_an_older_log_left_behind_the_end(killed: tuple[Path, int]) -> None:
    """Frames of another file: nothing says where they begin."""
    directory, running = killed
    log = directory / "state-1.log"
    with log.open("r+b") as file:
        end = file.seek(0, 2)
        file.truncate(end + LOG)
        file.seek(end)
        file.write(b"\xa5" * 1000)
    loaded, starting = most_memory("load", directory)
    with log.open("r+b") as file:
        file.truncate(end)
    assert loaded == "yes"
    assert starting <= MORE * running


@pytest.mark.timeout(900)
@pytest.mark.parametrize("byte", sample(range(10, 24), 3))
def test_a_damaged_length_makes_nobody_read_the_file_at_once(killed: tuple[Path, int], byte: int) -> None:
    directory, running = killed
    log = directory / "state-1.log"
    with log.open("r+b") as file:
        file.seek(60 + byte)
        before = file.read(1)
        file.seek(60 + byte)
        file.write(bytes([before[0] ^ 4]))
    loaded, starting = most_memory("load", directory)
    with log.open("r+b") as file:
        file.seek(60 + byte)
        file.write(before)
    assert loaded == "refused"
    assert starting <= MORE * running
