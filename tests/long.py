"""Whether tests of chance run at length: ``TEST_LONG=1``, as `.ci/run` has it; `make test` runs each of them in short."""

from __future__ import annotations

import os
from typing import Final

LONG: Final = os.environ.get("TEST_LONG") == "1"
