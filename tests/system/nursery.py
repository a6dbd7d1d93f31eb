"""Forks `kvbus run` on demand: ``python -m tests.system.nursery CONFIG ROTATE_BYTES``, commands on stdin.

``start`` forks one (answer: ``started``); ``kill`` sends SIGKILL and answers with the signal it died of, or minus its
exit code if it had ended by itself. The end of stdin ends both.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

import uvloop  # noqa: F401 - imported here once, for every child

from kvbus.cli import main, run  # noqa: F401
from kvbus.common import logs  # noqa: F401
from kvbus.daemon import serve as daemon  # noqa: F401
from kvbus.daemon import state_store


def child(config: str) -> None:
    """Be ``kvbus run``; never comes back."""
    code = 70
    try:
        sys.stdin.close()
        main(["run", "-c", config], prog_name="kvbus")
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - whatever it was, the parent's code must not go on in the child
        traceback.print_exc()
    os._exit(code)


def killed(pid: int) -> int:
    """End a child; what it died of."""
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)


def serve(config: str) -> None:
    """Take commands until there are no more."""
    pid = 0
    for line in sys.stdin:
        if line == "start\n":
            pid = os.fork()
            if not pid:
                child(config)
            sys.stdout.write("started\n")
        elif line == "kill\n":
            sys.stdout.write(f"{killed(pid)}\n")
            pid = 0
        sys.stdout.flush()
    if pid:
        killed(pid)


if __name__ == "__main__":
    state_store.MIN_ROTATE = int(sys.argv[2])  # type: ignore[misc]
    serve(sys.argv[1])
