"""A helper process that forks `kvbus run` on command: ``python -m tests.doubles.nursery CONFIG LOG_BYTES``.

CONFIG is kvbus's configuration file. LOG_BYTES is the size of the write-ahead log in bytes after which a new checkpoint
may begin.

The process reads commands from stdin and writes a line to stdout for each. ``start`` forks a kvbus and answers
``started``. ``kill`` sends SIGKILL to the kvbus. It answers with the signal that ended the process. If the process had
ended by itself before, it answers with minus the exit code. ``exhaust`` raises MemoryError in the main thread of kvbus,
and answers in the same way. At the end of stdin the helper process ends, and its kvbus with it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

import uvloop  # noqa: F401 - imported once here, so that each forked child has it

from kvbus.cli import main, run  # noqa: F401
from kvbus.common import logs  # noqa: F401
from kvbus.daemon import serve as daemon  # noqa: F401
from kvbus.state import sqlite


def child(config: str) -> None:
    """Run ``kvbus run`` in a forked child, and exit the process. This function never returns."""
    code = 70
    try:
        sys.stdin.close()
        main(["run", "-c", config], prog_name="kvbus")
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - after any error, the child must not continue with the parent's code
        traceback.print_exc()
    os._exit(code)


def exhausted(_number: int, _frame: object) -> None:
    raise MemoryError


def killed(pid: int) -> int:
    """Kill the forked kvbus. Return the signal that ended it, or minus its exit code if it had ended before."""
    os.kill(pid, signal.SIGKILL)
    return died_of(os.waitpid(pid, 0)[1])


def exhaust(pid: int) -> int:
    """Raise MemoryError in the forked kvbus until it ends. Return the signal that ended it, or minus its exit code.

    One signal may not suffice, because Python ignores errors in finalizers.
    """
    while True:
        os.kill(pid, signal.SIGUSR1)
        for _ in range(50):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return died_of(status)
            time.sleep(0.01)


def died_of(status: int) -> int:
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)


def serve(config: str) -> None:
    """Execute the commands that arrive on stdin, until stdin ends."""
    signal.signal(signal.SIGUSR1, exhausted)  # set before the fork, so that a child has the handler from its start
    pid = 0
    for line in sys.stdin:
        if line == "start\n":
            pid = os.fork()
            if not pid:
                child(config)
            sys.stdout.write("started\n")
        elif line in {"kill\n", "exhaust\n"}:
            assert pid, "nothing was started"  # a pid of 0 would kill the complete process group
            end = killed if line == "kill\n" else exhaust
            pid, ended = 0, pid
            sys.stdout.write(f"{end(ended)}\n")
        sys.stdout.flush()
    if pid:
        killed(pid)


if __name__ == "__main__":
    sqlite.CHECKPOINT_AFTER = int(sys.argv[2])  # type: ignore[misc]
    serve(sys.argv[1])
