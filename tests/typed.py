"""What a test knows to be there, said to the type checker; where it is not, the test fails here."""

from __future__ import annotations

from typing import TypeVar

from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.schema import Batch

Thing = TypeVar("Thing")


def there(thing: Thing | None) -> Thing:
    """The thing itself, which must not be None."""
    assert thing is not None
    return thing


def well_formed(payload: bytes) -> Batch:
    """The batch that a payload is."""
    batch = decode_batch(payload)
    assert isinstance(batch, Batch), batch
    return batch
