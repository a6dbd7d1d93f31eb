"""The process of the ``kvbus`` command, which is ``python -m kvbus`` too."""

from __future__ import annotations

import atexit
import gc
from typing import Final

from kvbus.cli import main

NEW_OBJECTS: Final = 10_000
"""Objects between two looks of the garbage collector: imports make a hundred thousand, none of them garbage."""


def run() -> None:
    """Run the command line and end the process."""
    gc.set_threshold(NEW_OBJECTS)
    atexit.register(gc.freeze)  # memory goes with the process: to take it apart first costs a quarter of a command
    main(prog_name="kvbus")


if __name__ == "__main__":
    run()
