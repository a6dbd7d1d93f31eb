"""Fixtures for tests of sockets: a ZMQ context for each test, sockets that it closes, and errors of event loop
callbacks.
"""

import contextlib

import pytest
import zmq

from tests.transport.loops import collect


@pytest.fixture
def raised():
    """A list of the exceptions that callbacks of the event loop have raised.

    A test that expects exceptions removes them from the list.
    """
    return []


@pytest.fixture
def context():
    """A ZMQ context that closes all sockets at the end of the test. Otherwise a failed test would hang."""
    made = zmq.Context()
    yield made
    collect()
    with contextlib.suppress(zmq.ZMQError):
        made.destroy(linger=0)


@pytest.fixture
def dial(context):
    """A function that connects a socket of the test.

    Its arguments are the socket type, the endpoint and options by name.
    """
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
