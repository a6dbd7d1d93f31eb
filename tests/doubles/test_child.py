"""Tests that child processes start even if a library disturbs forks of this process, and that they end with their
parent.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.doubles.bus import eventually
from tests.doubles.child import ROOT, Child

_aborts: list[bool] = []
os.register_at_fork(after_in_child=lambda: os._exit(134) if _aborts else None)

STARTS_ONE = """
import asyncio, sys
from pathlib import Path
from tests.doubles.child import Child

async def main():
    child = Child("child", ["sleep", "600"], Path(sys.argv[1]))
    await child.start()
    # the program setpriv runs before sleep, and makes the child end with its parent
    while Path(f"/proc/{child.pid}/comm").read_text() != "sleep\\n":
        await asyncio.sleep(0.01)
    print(child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def a_library_that_bears_no_fork() -> Iterator[None]:
    """Make each fork abort the child during the test, as a fork handler of gRPC sometimes does."""
    _aborts.append(True)
    yield
    _aborts.clear()


@pytest.mark.usefixtures("a_library_that_bears_no_fork")
async def test_a_child_starts_even_if_a_library_aborts_forked_processes(tmp_path: Path) -> None:
    child = Child("child", ["cat"], tmp_path, piped=True)
    await child.start()
    assert child.process is not None
    assert await child.process.communicate(b"said") == (b"said", None)
    assert child.process.returncode == 0
    await child.close()


async def test_a_child_ends_with_its_parent_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTS_ONE, str(tmp_path)]
    parent = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()

    def gone() -> bool:
        with suppress(ProcessLookupError, FileNotFoundError):
            os.kill(pid, 0)
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return True

    try:
        await eventually(gone, "the end of the child")
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
