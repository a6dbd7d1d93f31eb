"""A pytest plugin: each file of tests is a context of its own to coverage."""

from __future__ import annotations

import pytest
from coverage import Coverage


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    measuring = Coverage.current()
    assert measuring is not None, "under `coverage run` alone"
    measuring.switch_context(item.location[0])
