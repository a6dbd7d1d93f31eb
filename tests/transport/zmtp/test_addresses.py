"""Tests for endpoint addresses of kvbus's own ZMTP.

kvbus must bind them, refuse those in use, and remove socket files, as libzmq does.
"""

import os
import socket

import pytest

from kvbus.common.errors import BindError
from kvbus.transport.zmtp.addresses import bind, ipc_address, peer_address, split_tcp
from tests.ports import free_port


@pytest.fixture
def bound():
    """A function that binds an endpoint. The test's end closes it."""
    made = []

    def one(endpoint):
        made.append(bind(endpoint))
        return made[-1]

    yield one
    for each in made:
        each.close()


def reaches(host, port, family=socket.AF_INET):
    with socket.socket(family) as client:
        return client.connect_ex((host, port)) == 0


def test_a_star_endpoint_listens_on_ipv4_and_ipv6(bound):
    port = free_port()
    assert bound(f"tcp://*:{port}").endpoint == f"tcp://*:{port}"
    assert reaches("127.0.0.1", port)
    assert reaches("::1", port, socket.AF_INET6)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "lo", "localhost"])
def test_an_endpoint_binds_to_an_address_or_an_interface(bound, host):
    port = free_port()
    bound(f"tcp://{host}:{port}")
    assert reaches("127.0.0.1", port)


@pytest.mark.parametrize("host", ["[::1]", "[::]"])
def test_an_endpoint_binds_to_an_ipv6_address(bound, host):
    port = free_port()
    bound(f"tcp://{host}:{port}")
    assert reaches("::1", port, socket.AF_INET6)


def test_an_endpoint_with_port_0_shows_the_port_of_the_system(bound):
    endpoint = bound("tcp://127.0.0.1:0").endpoint
    assert reaches("127.0.0.1", int(endpoint.removeprefix("tcp://127.0.0.1:")))


def test_binding_a_used_address_fails_immediately(bound):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    bound(endpoint)
    with pytest.raises(BindError, match=f"cannot listen on {endpoint}: Address already in use"):
        bind(endpoint)


def test_a_closed_endpoint_can_be_bound_again_immediately():
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    for _ in range(2):
        made = bind(endpoint)
        with socket.create_connection(("127.0.0.1", split_tcp(endpoint)[1])):
            accepted, _ = made.socket.accept()
            accepted.close()  # close this side first, so that the connection is in TIME_WAIT
        made.close()


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("tcp://192.0.2.1:5000", "Cannot assign requested address"),
        ("tcp://nosuchif0:5000", "No such device"),
        ("tcp://router.example:5000", "No such device"),
        ("tcp://an-interface-with-a-long-name:5000", "No such device"),
        ("tcp://127.0.0.1", "must be tcp"),
        ("tcp://127.0.0.1:70000", "must be tcp"),
        ("udp://127.0.0.1:5000", "must be tcp"),
        ("ipc:///nowhere/at/all", "No such file or directory"),
        ("ipc://" + "x" * 200, "path too long"),
    ],
)
def test_an_endpoint_that_cannot_be_bound_raises_bind_error(endpoint, why):
    with pytest.raises(BindError, match=why):
        bind(endpoint)


def test_a_socket_file_is_made_at_bind_and_removed_at_close(tmp_path, bound):
    path = tmp_path / "kv"
    for _ in range(2):
        made = bound(f"ipc://{path}")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            assert peer_address(client) == "unix"
        made.close()
        assert not path.exists()


def test_the_socket_file_of_a_killed_process_does_not_prevent_a_bind(tmp_path, bound):
    path = tmp_path / "kv"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert path.exists()
    bound(f"ipc://{path}")


def test_a_file_that_is_not_a_socket_is_not_replaced(tmp_path):
    path = tmp_path / "kv"
    path.write_text("mine")
    with pytest.raises(BindError, match="Address already in use"):
        bind(f"ipc://{path}")
    assert path.read_text() == "mine"


def test_a_closing_endpoint_keeps_the_socket_file_of_a_newer_endpoint(tmp_path, bound):
    """If a new process has bound the path of a socket file, the old process does not remove this file.

    At a restart, the new process may bind the path before the old process closes its endpoint.
    """
    path = tmp_path / "kv"
    first = bound(f"ipc://{path}")
    bound(f"ipc://{path}")
    first.close()
    assert path.exists()


def test_an_abstract_ipc_endpoint_accepts_connections(bound):
    name = f"@kvbus-test-{os.getpid()}"
    bound(f"ipc://{name}")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(ipc_address(f"ipc://{name}")))


def test_the_address_of_a_peer_is_shown_as_host_and_port(bound):
    port = free_port()
    made = bound(f"tcp://*:{port}")
    for family, host, shown in ((socket.AF_INET, "127.0.0.1", "127.0.0.1"), (socket.AF_INET6, "::1", "[::1]")):
        with socket.socket(family) as client:
            client.connect((host, port))
            with made.socket.accept()[0] as accepted:
                assert peer_address(accepted) == f"{shown}:{client.getsockname()[1]}"
        with socket.socket(family) as alone:
            assert peer_address(alone) == "gone"
