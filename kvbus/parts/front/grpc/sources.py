"""What ``vllm.Control/GetKvEventSources`` answers, with kvbus's endpoints in it.

The messages are those of vLLM's ``rust/proto/control.proto``. Fields that are not kvbus's business, and those of later
releases, stay as they came: a message is a row of fields, each with its number, and a reader skips those it does not
know.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from kvbus.parts.front.answers import Offer, Offers, UnanswerableError, offer_of

_SOURCES: Final = 1
"""Of the answer: one for each rank."""
_TRANSPORT, _ENDPOINT, _TOPIC, _REPLAY, _RANK, _ENCODING, _SCHEMA = range(1, 8)
"""Of a source."""
_ZMQ: Final = b"zmq"

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types of protobuf; there are no groups in proto3."""


class _Field(NamedTuple):
    number: int
    value: int | bytes
    raw: bytes


def of_kvbus(offers: Offers) -> bytes:
    """Return an answer for an engine that has no such method."""
    sources = b""
    for rank, offer in sorted(offers.items()):
        head = _text(_TRANSPORT, _ZMQ) + _announced(offer) + _whole(_RANK, rank)
        sources += _text(_SOURCES, head + _text(_ENCODING, b"msgpack") + _whole(_SCHEMA, 1))
    return sources


def of_vllm(answer: bytes, offers: Offers) -> bytes:
    """Return an answer with kvbus's endpoints. A source that is not ZeroMQ's stays as it is.

    Raises:
        DiscoveryError: it is no such message, or names a rank that kvbus has not.
    """
    return b"".join(
        _text(_SOURCES, _source(field.value, offers)) if field.number == _SOURCES else field.raw
        for field in _fields(answer)
    )


def _source(message: int | bytes, offers: Offers) -> bytes:
    fields = list(_fields(message))
    last = {field.number: field.value for field in fields}
    if last.get(_TRANSPORT, _ZMQ) != _ZMQ:
        return b"".join(field.raw for field in fields)
    rank = last.get(_RANK, 0)
    if not isinstance(rank, int):
        raise UnanswerableError("the engine's answer is not of vllm.Control: a rank is no number")
    offer = offer_of(rank, offers)
    ours = {_ENDPOINT, _REPLAY} if offer.topic is None else {_ENDPOINT, _REPLAY, _TOPIC}
    return b"".join(field.raw for field in fields if field.number not in ours) + _announced(offer)


def _announced(offer: Offer) -> bytes:
    replay = "" if offer.replay_reached is None else offer.replay_reached
    return b"".join(
        _text(number, value.encode())
        for number, value in ((_ENDPOINT, offer.reached), (_TOPIC, offer.topic or ""), (_REPLAY, replay))
        if value  # an empty text is one that is absent
    )


def _fields(message: int | bytes) -> Iterator[_Field]:
    """Yield the fields of a message in their order.

    Raises:
        UnanswerableError: it is none.
    """
    if isinstance(message, int):
        raise UnanswerableError("the engine's answer is not of vllm.Control: a source is a number")
    at = 0
    while at < len(message):
        begin = at
        key, at = _read(message, at)
        value: int | bytes
        if key & 7 == _VARINT:
            value, at = _read(message, at)
        elif key & 7 in (_BYTES, _FIXED64, _FIXED32):
            size = {_FIXED64: 8, _FIXED32: 4}.get(key & 7)
            if size is None:
                size, at = _read(message, at)
            value, at = message[at : at + size], at + size
        else:
            raise UnanswerableError(f"the engine's answer is no protobuf: wire type {key & 7}")
        if at > len(message):
            raise UnanswerableError("the engine's answer is no protobuf: it ends in the middle of a field")
        yield _Field(key >> 3, value, message[begin:at])


def _read(message: bytes, at: int) -> tuple[int, int]:
    """A number in seven bits a byte, and what comes behind it."""
    value = shift = 0
    while at < len(message) and shift < 70:
        value |= (message[at] & 0x7F) << shift
        at += 1
        if not message[at - 1] & 0x80:
            return value, at
        shift += 7
    raise UnanswerableError("the engine's answer is no protobuf: a number has no end")


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _whole(number: int, value: int) -> bytes:
    return _number(number << 3 | _VARINT) + _number(value)


def _text(number: int, value: bytes) -> bytes:
    return _number(number << 3 | _BYTES) + _number(len(value)) + value
