"""What only a core that runs from its sources can show."""

from __future__ import annotations

from typing import Final

import pytest

from kvbus.common.compiled import PURE, core

DEFECTIVE: Final = pytest.mark.skipif(core() == "compiled", reason=f"defects are put into the sources: {PURE}=1")
"""A test that replaces methods to see whether others find it out; compiled calls do not look at what was replaced."""
