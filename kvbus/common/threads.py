"""The event loop's thread beside those of sockets, where they have one core."""

from __future__ import annotations

import os


def let_threads_run() -> None:
    """Let threads that are ready have the core, behind a piece of work that has more behind it.

    libzmq's threads take in what engines send. Linux lets a thread that has just woken up wait until the one before it
    sleeps, or for about 3 ms (EEVDF, 6.6 and later), and an event loop that has work does not sleep.

    What it costs, on Linux 6.18, is the share of a core beside a program that always wants it: 0.74 of 4 seconds where
    2 were due. That is so in one group of processes (cgroup); in a group of its own, as each container and each service
    of systemd is, kvbus has its share (1.89).
    """
    os.sched_yield()
