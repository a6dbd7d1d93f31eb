"""Run a command as the terminal's foreground job, in a process group of its own: a Ctrl-C reaches it and nobody else.

It is in the foreground before it begins, which a shell's ``set -m`` does not promise.
"""

import os
import signal
import sys


def take_terminal(group: int) -> None:
    """Make a process group the one that a Ctrl-C is for."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(0, group)


def main() -> int:
    """Return the command's exit code, as a shell would."""
    try:
        ours = os.tcgetpgrp(0)
    except OSError:  # a terminal, and not the one that this session has
        os.execvp(sys.argv[1], sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        take_terminal(os.getpid())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execvp(sys.argv[1], sys.argv[1:])
    _, status = os.waitpid(child, 0)
    take_terminal(ours)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
