"""Tests for the example that kvbus keeps of the first rejected event of each reason.

It shows the event's shape and source, without content of a prompt.
"""

from __future__ import annotations

import pytest

from kvbus.core.events import BatchReceived, SourceUp
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from tests.doubles.payloads import batch, payload, removed, store


@pytest.fixture
def relay() -> Relay:
    relay = Relay([SourceSpec("engine", 0, replay=False)], [])
    relay.handle(SourceUp(0), 1.0)
    return relay


def take(relay: Relay, seq: int, *events: dict) -> None:
    relay.handle(BatchReceived(0, batch(seq, *events)), 1.0)


def test_the_first_batch_with_a_reason_is_the_example_of_this_reason(relay: Relay) -> None:
    examples = relay.sources[0].examples
    take(relay, 0, store([1]))
    assert examples == {}
    wrong = store([2], 1, tokens=[71_234_567] * 7)
    take(relay, 1, store([3], 1), wrong, removed([99]))
    size = len(payload(store([3], 1), wrong, removed([99])))
    said = f"batch 1 of epoch 0, {size} bytes: 2 x BlockStored of 1 x 16 tokens on GPU, 1 x BlockRemoved"
    assert examples == {"token_count": said, "unknown_block": said}
    take(relay, 2, removed([98]))  # there is already an example for this reason
    relay.sources[0].stats.rejected["conflict"] += 1  # kvbus applies no batch in a conflict
    take(relay, 3, removed([98]))
    kinds = [store([10 + n] * 1, 1, medium=medium) for n, medium in enumerate(["CPU", "DISK", "GPU"])]
    take(relay, 4, *kinds, store([20], 1, block_size=8, tokens=[1] * 9))
    assert "conflict" not in examples
    assert examples["unknown_block"] == said
    assert "71234567" not in str(examples)


def test_an_unreadable_message_is_an_example_of_its_reason(relay: Relay) -> None:
    examples = relay.sources[0].examples
    take(relay, 0, store([1]))
    relay.handle(BatchReceived(0, [b"", (1).to_bytes(8, "big"), b"\xc1"]), 1.0)
    relay.handle(BatchReceived(0, [b"", b"\x01" * 5, b"abc"]), 1.0)
    relay.handle(BatchReceived(0, [b"x"] * 6), 1.0)
    relay.handle(BatchReceived(0, [b"x"] * 7), 1.0)
    take(relay, 2, {"type": "Unheard"}, {"type": "BlockStored"}, store([5], medium="x" * 99), store([6], group=1))
    assert examples["not_msgpack"] == "batch 1 of epoch 0, 1 bytes"
    assert examples["seq_width"] == "3 frames, of 0, 5, 3 bytes"
    assert examples["frame_count"] == "6 frames, of 1, 1, 1, 1… bytes"
    assert examples["unknown_event"].endswith("tokens on GPU, group 1, 2 x unreadable"), examples
    assert "x" * 25 not in str(examples)
    assert relay.sources[0].stats.rejected["frame_count"] == 2
