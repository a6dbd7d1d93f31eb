"""A context per test, and the list of what the loop's callbacks raised."""

import contextlib

import pytest
import zmq

from tests.transport.loops import collect


@pytest.fixture
def raised():
    """What callbacks of the test's loop raised; a test that expects some takes it out."""
    return []


@pytest.fixture
def context():
    """A context whose end closes what a test left open, so that a failed test fails instead of hanging."""
    made = zmq.Context()
    yield made
    collect()
    with contextlib.suppress(zmq.ZMQError):
        made.destroy(linger=0)
