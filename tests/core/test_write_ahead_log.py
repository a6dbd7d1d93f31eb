"""Tests for the encoding of the write-ahead log: all records are read as they were written and in order.

Bytes that are not such records are refused.
"""

import msgspec
import pytest

from kvbus.core.sequencing.fingerprints import fingerprint
from kvbus.core.write_ahead_log import BatchesLost, Delivered, EpochBegun, Records, StateError, decode_records


def written():
    records = Records()
    records.heads.append(EpochBegun(0, partial=True, publisher_id=None))
    for seq, payload in enumerate([b"one", b"", b"three"]):
        records.heads.append(Delivered(1, seq, b"kv", fingerprint(payload), payload))
    records.heads.append(BatchesLost(0, 3))
    return records


def test_records_are_read_in_the_order_of_writing():
    body, payloads = written().take()
    assert decode_records(body, b"".join(payloads)) == [
        EpochBegun(0, partial=True, publisher_id=None),
        Delivered(1, 0, b"kv", fingerprint(b"one"), b"one"),
        Delivered(1, 1, b"kv", fingerprint(b""), b""),
        Delivered(1, 2, b"kv", fingerprint(b"three"), b"three"),
        BatchesLost(0, 3),
    ]


def test_take_returns_each_record_once():
    records = written()
    records.take()
    body, payloads = records.take()
    assert (decode_records(body, b"".join(payloads)), payloads) == ([], [])


@pytest.mark.parametrize("payloads", [b"onethre", b"", b"onEthree", b"threeone"])
def test_records_with_changed_payloads_are_refused(payloads):
    assert decode_records(written().take().body, payloads) is None


@pytest.mark.parametrize("said", [[3], [[]], [None], ["text"], [[99, 0]], [[1, "one", True, None]], [[0, 1]]])
def test_an_array_without_records_is_refused(said):
    with pytest.raises(StateError, match="no record"):
        decode_records(msgspec.msgpack.encode(said), b"")


@pytest.mark.parametrize("body", [b"", b"\x80", b"\x91", msgspec.msgpack.encode({"a": 1})])
def test_a_body_that_is_not_an_array_is_refused(body):
    with pytest.raises(StateError):
        decode_records(body, b"")
