"""The entry point of the ``kvbus`` command and of ``python -m kvbus``."""

from __future__ import annotations

from kvbus.cli import main


def run() -> None:
    """Run the command line, and end the process with its exit code."""
    main(prog_name="kvbus")


if __name__ == "__main__":
    run()
