"""Start child processes that end with this process, however it ends and whichever of its threads has started them.

``setpriv --pdeathsig`` would end them with the thread, and a thread of asyncio's pool ends with the test's event loop.
"""

from __future__ import annotations

import subprocess


class Watch:
    """A shell that ends a process group when this process ends.

    It waits for the end of a pipe that this process holds open.
    """

    def __init__(self, group: int) -> None:
        watches = ["sh", "-c", 'read -r _; kill -s KILL -- "-$0"', str(group)]
        self._shell = subprocess.Popen(watches, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0)

    def close(self) -> None:
        """End the shell, so that the process group continues when this process ends.

        Call it also if the process group has ended: another group may get its number.
        """
        self._shell.kill()
        self._shell.communicate()
