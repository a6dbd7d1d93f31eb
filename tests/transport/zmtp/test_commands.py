"""Commands of ZMTP 3: names, properties, PING and its answer."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.transport.zmtp import commands
from kvbus.transport.zmtp.reasons import ProtocolError

properties_ = st.dictionaries(
    st.text(st.characters(codec="ascii", categories=["Ll", "Nd"]), min_size=1, max_size=30).map(str.encode),
    st.binary(max_size=300),
    max_size=5,
)


@given(properties_)
def test_properties_come_back_as_they_were(properties):
    assert commands.parse_metadata(commands.encode_metadata(properties)) == properties


@given(properties_.filter(bool), st.data())
def test_properties_that_are_torn_fail(properties, data):
    encoded = commands.encode_metadata(properties)
    ends = [len(commands.encode_metadata(dict(list(properties.items())[:count]))) for count in range(len(properties))]
    at = data.draw(st.integers(0, len(encoded) - 1).filter(lambda at: at not in ends))
    with pytest.raises(ProtocolError):
        commands.parse_metadata(encoded[:at])


@given(st.binary(max_size=80))
def test_any_bytes_are_properties_or_fail(data):
    with contextlib.suppress(ProtocolError):
        commands.parse_metadata(data)


def test_the_case_of_a_name_does_not_matter():
    assert commands.parse_metadata(b"\x0bSOCKET-type\0\0\0\3SUB") == {b"socket-type": b"SUB"}


def test_names_and_data():
    assert commands.parse_command(b"\x04PING\0\0x") == (b"PING", b"\0\0x")
    assert commands.parse_command(b"\x04PING") == (b"PING", b"")
    for body in (b"", b"\0", b"\x05PING"):
        with pytest.raises(ProtocolError):
            commands.parse_command(body)


def test_a_pong_has_the_context_of_its_ping():
    assert commands.pong(b"\0\x0ahello") == b"\x04\x0a\x04PONGhello"
    assert commands.pong(b"\0\0") == b"\x04\x05\x04PONG"
    assert commands.pong(b"\0\0" + b"c" * 40) == b"\x04\x15\x04PONG" + b"c" * 16
    with pytest.raises(ProtocolError):
        commands.pong(b"\0")


def test_an_error_is_bounded():
    assert commands.error("no") == b"\x04\x09\x05ERROR\x02no"
    assert commands.error("é" * 300)[:1] == b"\x06"
    assert len(commands.error("é" * 300)) == 9 + 6 + 1 + 255
