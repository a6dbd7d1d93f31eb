"""Tests for encoding and decoding ZMTP frames and commands. An oversize frame must fail before kvbus has stored it."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.transport.zmtp import wire
from kvbus.transport.zmtp.reasons import ProtocolError, Reason
from kvbus.transport.zmtp.wire import encode_command, encode_message, take_frame

frames_of_any_size = st.lists(
    st.one_of(st.binary(max_size=40), st.sampled_from([b"x" * size for size in (254, 255, 256, 257, 70_000)])),
    min_size=1,
    max_size=6,
)


def read_all(data, *, limit=2**20):
    buffer = bytearray(data)
    frames = []
    while (frame := take_frame(buffer, limit)) is not None:
        frames.append(frame)
    assert not buffer
    return frames


@given(frames_of_any_size)
def test_a_message_is_unchanged_after_encoding_and_decoding(frames):
    read = read_all(encode_message(frames))
    assert [frame.body for frame in read] == frames
    assert [frame.more for frame in read] == [True] * (len(frames) - 1) + [False]
    assert not any(frame.command for frame in read)


def test_encoded_bytes_are_as_the_zmtp_standard_says():
    assert encode_message([b""]) == b"\0\0"
    assert encode_message([b"a", b"bc"]) == b"\1\1a\0\2bc"
    assert encode_message([b"x" * 255]) == b"\0\xff" + b"x" * 255
    assert encode_message([b"x" * 256]) == b"\2" + (256).to_bytes(8, "big") + b"x" * 256
    assert encode_message([b"x" * 256, b""]) == b"\3" + (256).to_bytes(8, "big") + b"x" * 256 + b"\0\0"
    assert encode_command(b"\4PONG") == b"\4\5\4PONG"
    assert encode_command(b"x" * 300) == b"\6" + (300).to_bytes(8, "big") + b"x" * 300


@given(st.binary(max_size=600))
def test_a_command_is_unchanged_after_encoding_and_decoding(body):
    assert read_all(encode_command(body)) == [(True, False, body)]


@pytest.mark.parametrize("data", [b"\x08\0", b"\x80\0", b"\x05\0", b"\x07" + bytes(8), b"\xff\0"])
def test_a_frame_with_unknown_flags_fails(data):
    with pytest.raises(ProtocolError) as failed:
        read_all(data)
    assert failed.value.reason is Reason.FRAME


@pytest.mark.parametrize("data", [b"\0\x0b", b"\2" + (11).to_bytes(8, "big"), b"\2" + b"\xff" * 8])
def test_an_oversize_frame_fails_at_its_announced_size(data):
    with pytest.raises(ProtocolError) as failed:
        read_all(data, limit=10)
    assert failed.value.reason is Reason.FRAME_BYTES


properties_ = st.dictionaries(
    st.text(st.characters(codec="ascii", categories=["Ll", "Nd"]), min_size=1, max_size=30).map(str.encode),
    st.binary(max_size=300),
    max_size=5,
)


@given(properties_)
def test_metadata_is_unchanged_after_encoding_and_decoding(properties):
    assert wire.parse_metadata(wire.encode_metadata(properties)) == properties


@given(properties_.filter(bool), st.data())
def test_truncated_metadata_fails(properties, data):
    encoded = wire.encode_metadata(properties)
    ends = [len(wire.encode_metadata(dict(list(properties.items())[:count]))) for count in range(len(properties))]
    at = data.draw(st.integers(0, len(encoded) - 1).filter(lambda at: at not in ends))
    with pytest.raises(ProtocolError):
        wire.parse_metadata(encoded[:at])


@given(st.binary(max_size=80))
def test_arbitrary_metadata_bytes_decode_or_raise_protocol_error(data):
    with contextlib.suppress(ProtocolError):
        wire.parse_metadata(data)


def test_names_in_metadata_are_case_insensitive():
    assert wire.parse_metadata(b"\x0bSOCKET-type\0\0\0\3SUB") == {b"socket-type": b"SUB"}


def test_a_command_is_split_into_name_and_data():
    assert wire.parse_command(b"\x04PING\0\0x") == (b"PING", b"\0\0x")
    assert wire.parse_command(b"\x04PING") == (b"PING", b"")
    for body in (b"", b"\0", b"\x05PING"):
        with pytest.raises(ProtocolError):
            wire.parse_command(body)


def test_a_pong_has_the_context_of_its_ping():
    assert wire.pong(b"\0\x0ahello") == b"\x04\x0a\x04PONGhello"
    assert wire.pong(b"\0\0") == b"\x04\x05\x04PONG"
    assert wire.pong(b"\0\0" + b"c" * 40) == b"\x04\x15\x04PONG" + b"c" * 16
    with pytest.raises(ProtocolError):
        wire.pong(b"\0")


def test_the_reason_in_an_error_command_is_cut_to_255_bytes():
    assert wire.error("no") == b"\x04\x09\x05ERROR\x02no"
    assert wire.error("é" * 300)[:1] == b"\x06"
    assert len(wire.error("é" * 300)) == 9 + 6 + 1 + 255
