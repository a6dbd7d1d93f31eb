"""The library for routers: a stream of KV-cache events, in order and complete, and the blocks it describes.

>>> from kvbus.client import BlockView, Subscriber
>>> async def follow(view: BlockView) -> None:
...     async for update in Subscriber("tcp://10.0.0.7:5657", "tcp://10.0.0.7:5658"):
...         view.update(update)
"""

from kvbus.client.subscriber import Subscriber, SubscriberClosedError
from kvbus.client.timeouts import BufferLimits, Timing
from kvbus.client.updates import (
    Conflict,
    Gap,
    Lost,
    Reachable,
    Received,
    Rejected,
    Restarted,
    Snapshot,
    Synced,
    Unreachable,
    Update,
)
from kvbus.client.view import Block, BlockView, Key
from kvbus.core.sequencing.actions import LostReason, RestartReason
from kvbus.transport.curve import Curve, KeyFileError, client_keys

__all__ = [
    "Block",
    "BlockView",
    "BufferLimits",
    "Conflict",
    "Curve",
    "Gap",
    "Key",
    "KeyFileError",
    "Lost",
    "LostReason",
    "Reachable",
    "Received",
    "Rejected",
    "RestartReason",
    "Restarted",
    "Snapshot",
    "Subscriber",
    "SubscriberClosedError",
    "Synced",
    "Timing",
    "Unreachable",
    "Update",
    "client_keys",
]
