"""Tests for the lock of a state directory.

A second process learns which process holds it, and a killed process releases it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvbus.common.errors import InUseError
from kvbus.state.lock import HEAD_BYTES, DirectoryLock

HOLD = """
import subprocess, sys, time
from pathlib import Path
from kvbus.state.lock import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]), "the place")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_only_one_process_can_lock_a_directory(tmp_path: Path) -> None:
    first = DirectoryLock(tmp_path, "the place")
    with pytest.raises(InUseError) as caught:
        DirectoryLock(tmp_path, "the place")
    assert caught.value.exit_code == 69
    first.close()
    DirectoryLock(tmp_path, "the place").close()


def test_a_lock_names_its_holder_and_ends_with_it_despite_child_processes(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), "--set", "http=null"], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(InUseError) as caught:
                DirectoryLock(tmp_path, "the place")
            command = f"kvbus {tmp_path} --set http=null"
            assert str(caught.value) == (
                f"the place is in use by process {holder.pid} on {socket.gethostname()} ({command}); "
                "another bus needs a state_dir of its own"
            )
            holder.kill()
            holder.wait(10)
            os.kill(child, 0)  # the child is running, and did not inherit the lock
            DirectoryLock(tmp_path, "the place").close()
        finally:
            os.kill(child, 9)


@pytest.mark.parametrize("content", [b"", b"\0\0\0", b"two\nlines", b"\xff\xfe"])
def test_a_lock_file_without_a_valid_holder_names_another_process(tmp_path: Path, content: bytes) -> None:
    first = DirectoryLock(tmp_path, "the place")
    (tmp_path / "lock").write_bytes(content)
    with pytest.raises(InUseError, match="the place is in use by"):
        DirectoryLock(tmp_path, "the place")
    first.close()


def test_a_new_holder_overwrites_a_longer_old_entry_of_the_lock_file(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"x" * 4000)
    lock = DirectoryLock(tmp_path, "the place")
    assert (tmp_path / "lock").read_bytes()[HEAD_BYTES:].startswith(f"process {os.getpid()} on ".encode())
    assert b"xxx" not in (tmp_path / "lock").read_bytes()[HEAD_BYTES:]
    lock.close()


def test_a_symbolic_link_in_place_of_the_lock_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(OSError, match="lock is not a regular file"):
        DirectoryLock(tmp_path, "the place")
    assert victim.read_bytes() == b"precious"


def test_a_pipe_in_place_of_the_lock_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(PermissionError, match="not a regular file"):
        DirectoryLock(tmp_path, "the place")


def test_kvbus_continues_with_a_warning_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    DirectoryLock(tmp_path, "the place").close()
    assert "the place cannot be locked (No locks available)" in caplog.text
