from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.config import endpoint_offset, parse_address, parse_endpoint
from kvbus.config.endpoints import host_name


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("tcp://127.0.0.1:5557", "127.0.0.1", 5557),
        ("tcp://*:1", "*", 1),
        ("tcp://[::1]:65535", "::1", 65535),
        ("tcp://[fe80::1%eth0]:5557", "fe80::1%eth0", 5557),
        ("tcp://engine-0.engines.svc:5557", "engine-0.engines.svc", 5557),
        ("tcp://localhost:5557", "127.0.0.1", 5557),
        ("ipc:///run/kv.sock", "/run/kv.sock", 0),
        ("ipc://@abstract", "@abstract", 0),
        ("ipc:///run/kv-{rank}", "/run/kv-{rank}", 0),
    ],
)
def test_a_valid_endpoint_is_parsed_into_host_and_port(endpoint, host, port):
    address = parse_endpoint(endpoint)
    assert (address.host, address.port) == (host, port)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "tcp://",
        "tcp://:5557",
        "tcp://host",
        "tcp://host:",
        "tcp://host:x",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://host:99999999",
        "tcp://host:-1",
        "tcp://host:*",
        "tcp://::1:5557",
        "tcp://a b:5557",
        "tcp://host:5557 ",
        "tcp://host:5557\n",
        "tcp://user@host:5557",
        "tcp://host:\uff15\uff15\uff15\uff17",
        "TCP://host:5557",
        "udp://host:5557",
        "inproc://x",
        "ipc://",
        "ipc://*",
        "ipc:///a b",
        "ipc:///a{model}",
        "ipc:///a{",
        "ipc:///" + "x" * 107,
    ],
)
def test_a_malformed_endpoint_is_refused(endpoint):
    with pytest.raises(ValueError, match=r"must be|needs a path|only allowed placeholder|at most"):
        parse_endpoint(endpoint)


def test_wildcard_and_loopback_endpoints_are_recognized():
    assert parse_endpoint("tcp://*:1").is_wildcard
    assert parse_endpoint("tcp://[::]:1").is_wildcard
    assert not parse_endpoint("tcp://127.0.0.1:1").is_wildcard
    assert parse_endpoint("tcp://127.8.9.1:1").is_loopback
    assert parse_endpoint("tcp://[::1]:1").is_loopback
    assert parse_endpoint("ipc:///x").is_loopback
    assert parse_endpoint("tcp://[::ffff:127.0.0.1]:1").is_loopback
    assert not parse_endpoint("tcp://engine:1").is_loopback
    assert not parse_endpoint("tcp://[::ffff:10.0.0.1]:1").is_loopback


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"),
        ("LOCALHOST.:9477", "localhost"),
        ("localhost:", "localhost"),
        ("127.0.0.1:80", "127.0.0.1"),
        ("[0:0::1]:80", "::1"),
        ("my_host-1.internal", "my_host-1.internal"),
        *(
            (bad, None)
            for bad in ("", ".", ":80", "a:x", "a:1:2", "a b", "a@b", "::1", "[::1", "[::g]", "[::1]a", "[a]")
        ),
        ("a/b", None),
        ("\u0131", None),
    ],
)
def test_the_host_name_is_read_from_a_host_header(header, name):
    assert host_name(header) == name


@given(st.integers(1, 65535), st.integers(0, 65535))
def test_the_port_of_a_tcp_endpoint_grows_with_the_rank(port, n):
    endpoint = f"tcp://[::1]:{port}"
    if port + n > 65535:
        with pytest.raises(ValueError, match="is above 65535"):
            endpoint_offset(endpoint, n)
    else:
        assert endpoint_offset(endpoint, n) == f"tcp://[::1]:{port + n}"


def test_the_path_of_an_ipc_endpoint_gets_the_rank():
    assert [endpoint_offset("ipc:///run/kv", n) for n in range(3)] == [
        "ipc:///run/kv",
        "ipc:///run/kv-1",
        "ipc:///run/kv-2",
    ]
    assert [endpoint_offset("ipc:///r{rank}/kv", n) for n in range(2)] == ["ipc:///r0/kv", "ipc:///r1/kv"]
    with pytest.raises(ValueError, match="counted from 0"):
        endpoint_offset("ipc:///run/kv", -1)


def test_http_addresses_are_parsed_or_refused():
    assert parse_address("127.0.0.1:0") == ("127.0.0.1", 0)
    assert parse_address("[::1]:9477") == ("::1", 9477)
    assert parse_address("*:9477") == ("0.0.0.0", 9477)
    for bad in ("9477", ":9477", "host", "host:x", "host:65536", "http://host:80"):
        with pytest.raises(ValueError, match="must be"):
            parse_address(bad)
