"""Children that end with this process, however that ends, whichever of its threads has begun them.

``setpriv --pdeathsig`` would end them with the thread, and a thread of asyncio's pool ends with the test's loop.
"""

from __future__ import annotations

import subprocess


class Watch:
    """Ends a process group with this process: the watching shell reads from a pipe that nobody writes to."""

    def __init__(self, group: int) -> None:
        watches = ["sh", "-c", 'read -r _; kill -s KILL -- "-$0"', str(group)]
        self._shell = subprocess.Popen(watches, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0)

    def close(self) -> None:
        """The group is to be left alone, or is gone."""
        self._shell.kill()
        self._shell.communicate()
