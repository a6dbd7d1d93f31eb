"""Sockets of libzmq that the end of a test closes."""

import pytest
import zmq


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
