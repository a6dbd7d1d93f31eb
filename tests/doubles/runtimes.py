"""Runtimes for daemons under test."""

from __future__ import annotations

from kvbus.daemon.runtime import Runtime

WITHOUT_STORE = Runtime(open_store=lambda _: None)
"""The machine's runtime without a store for seqs."""


def runtime_of(settings: dict[str, object]) -> Runtime:
    """Return the machine's runtime; without a store unless the test's settings name a ``state_dir``."""
    return Runtime() if "state_dir" in settings else WITHOUT_STORE
