"""A context per test, sockets that its end closes, and the list of what the loop's callbacks raised."""

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


@pytest.fixture
def dial(context):
    """Connect a socket: its type, the endpoint, options by name."""
    made = []

    def one(kind, endpoint, **options):
        socket = context.socket(kind)
        made.append(socket)
        socket.linger = 0
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.connect(endpoint)
        return socket

    yield one
    for socket in made:
        socket.close()
