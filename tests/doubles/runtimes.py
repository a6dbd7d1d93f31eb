"""Other runtimes for daemons of tests."""

from __future__ import annotations

from kvbus.daemon.runtime import Runtime

WITHOUT_STORE = Runtime(open_store=lambda _: None)
"""This machine, with nowhere to keep the numbering."""


def runtime_of(settings: dict[str, object]) -> Runtime:
    """Return this machine; without a store if the settings of a test name no ``state_dir``."""
    return Runtime() if "state_dir" in settings else WITHOUT_STORE
