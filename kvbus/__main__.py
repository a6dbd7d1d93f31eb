"""The process of the ``kvbus`` command, which is ``python -m kvbus`` too."""

from __future__ import annotations

from kvbus.cli import main


def run() -> None:
    """Run the command line and end the process."""
    main(prog_name="kvbus")


if __name__ == "__main__":
    run()
