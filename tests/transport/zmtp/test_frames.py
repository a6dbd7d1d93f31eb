"""Frames: what goes out comes in again, however it is cut, and what is too large fails before it is kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.transport.zmtp.frames import FrameReader, encode_command, encode_message
from kvbus.transport.zmtp.reasons import ProtocolError, Reason

frames_of_any_size = st.lists(
    st.one_of(st.binary(max_size=40), st.sampled_from([b"x" * size for size in (254, 255, 256, 257, 70_000)])),
    min_size=1,
    max_size=6,
)


def read_all(data, *, limit=2**20, commands=True):
    buffer = bytearray(data)
    reader = FrameReader(buffer, commands=commands)
    frames = []
    while (frame := reader.next_frame(limit)) is not None:
        frames.append(frame)
    assert not buffer
    return frames


@given(frames_of_any_size)
def test_a_message_comes_back_as_it_was(frames):
    read = read_all(encode_message(frames))
    assert [frame.body for frame in read] == frames
    assert [frame.more for frame in read] == [True] * (len(frames) - 1) + [False]
    assert not any(frame.command for frame in read)


def test_the_bytes_are_those_of_the_standard():
    assert encode_message([b""]) == b"\0\0"
    assert encode_message([b"a", b"bc"]) == b"\1\1a\0\2bc"
    assert encode_message([b"x" * 255]) == b"\0\xff" + b"x" * 255
    assert encode_message([b"x" * 256]) == b"\2" + (256).to_bytes(8, "big") + b"x" * 256
    assert encode_message([b"x" * 256, b""]) == b"\3" + (256).to_bytes(8, "big") + b"x" * 256 + b"\0\0"
    assert encode_command(b"\4PONG") == b"\4\5\4PONG"
    assert encode_command(b"x" * 300) == b"\6" + (300).to_bytes(8, "big") + b"x" * 300


@given(st.binary(max_size=600))
def test_a_command_comes_back_as_it_was(body):
    assert read_all(encode_command(body)) == [(True, False, body)]


@pytest.mark.parametrize("data", [b"\x08\0", b"\x80\0", b"\x05\0", b"\x07" + bytes(8), b"\xff\0"])
def test_unknown_flags_fail(data):
    with pytest.raises(ProtocolError) as failed:
        read_all(data)
    assert failed.value.reason is Reason.FRAME


def test_zmtp_2_has_no_commands():
    with pytest.raises(ProtocolError) as failed:
        read_all(encode_command(b"\4PING"), commands=False)
    assert failed.value.reason is Reason.FRAME


@pytest.mark.parametrize("data", [b"\0\x0b", b"\2" + (11).to_bytes(8, "big"), b"\2" + b"\xff" * 8])
def test_a_frame_over_the_limit_fails_by_its_size_alone(data):
    with pytest.raises(ProtocolError) as failed:
        read_all(data, limit=10)
    assert failed.value.reason is Reason.FRAME_BYTES
