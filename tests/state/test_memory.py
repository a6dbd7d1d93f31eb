"""Test that loading a saved state needs no more memory than the process had that wrote it.

This is so however long the write-ahead log is.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.long import LONG

LOG = (400 if LONG else 110) * 10**6
MORE = 1.2


def most_memory(what: str, directory: Path) -> tuple[str, int]:
    """Run `tests.state.filled` with the action ``what`` (fill or load) in a process of its own.

    Return whether it loaded a state (``yes``), and the peak memory of the process in kilobytes.
    """
    command = [sys.executable, "-m", "tests.state.filled", what, str(directory), str(LOG)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    loaded, memory = done.stdout.split()
    return loaded, int(memory)


@pytest.mark.timeout(900)
def test_reading_a_large_write_ahead_log_needs_little_memory(tmp_path: Path) -> None:
    _, running = most_memory("fill", tmp_path)
    assert (tmp_path / "state.db").stat().st_size >= LOG
    loaded, starting = most_memory("load", tmp_path)
    assert loaded == "yes"
    assert starting <= MORE * running
