"""Assertions for tests that also inform the type checker. Each one fails the test if it does not hold."""

from __future__ import annotations

from typing import TypeVar

from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.schema import Batch

Thing = TypeVar("Thing")


def there(thing: Thing | None) -> Thing:
    """Check that a value is not None, and return it with the narrower type."""
    assert thing is not None
    return thing


def well_formed(payload: bytes) -> Batch:
    """Decode a payload, and check that it is a batch."""
    batch = decode_batch(payload)
    assert isinstance(batch, Batch), batch
    return batch
