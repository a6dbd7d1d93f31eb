"""Runtimes (clock, store for seqs and other services of the machine) for daemons in tests."""

from __future__ import annotations

from kvbus.daemon.runtime import Runtime

WITHOUT_STORE = Runtime(open_store=lambda _: None)
"""The default runtime of the machine, but without a store for seqs."""


def runtime_of(settings: dict[str, object]) -> Runtime:
    """Return the default runtime of the machine.

    It has no store for seqs unless the test's settings name a ``state_dir``.
    """
    return Runtime() if "state_dir" in settings else WITHOUT_STORE
