"""The library for routers in Python: it reads streams of KV-cache events, and keeps the blocks that they describe.

`PrefixRouter` finds the workers that hold the longest prefix of a prompt. `Subscriber` reads one stream in an event
loop, completely and in order. `BlockingSubscriber` reads one stream in a program without an event loop. `BlockView`
holds the live blocks of one stream.

>>> from kvbus.client import BlockView, Subscriber
>>> async def follow(view: BlockView) -> None:
...     async for update in Subscriber("tcp://10.0.0.7:5657", "tcp://10.0.0.7:5658"):
...         view.update(update)
"""

from kvbus.client.blocking import BlockingSubscriber
from kvbus.client.feed import Status, Worker
from kvbus.client.prefix_index import Match
from kvbus.client.router import PrefixRouter, RouterError
from kvbus.client.sequence import BufferLimits, Timing
from kvbus.client.subscriber import Subscriber, SubscriberClosedError
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
from kvbus.client.view import Block, BlockView, Change, Cleared, Key, Removed, Stored
from kvbus.core.sequencing.actions import LostReason, RestartReason
from kvbus.transport.curve import Curve, KeyFileError, client_keys

__all__ = [
    "Block",
    "BlockView",
    "BlockingSubscriber",
    "BufferLimits",
    "Change",
    "Cleared",
    "Conflict",
    "Curve",
    "Gap",
    "Key",
    "KeyFileError",
    "Lost",
    "LostReason",
    "Match",
    "PrefixRouter",
    "Reachable",
    "Received",
    "Rejected",
    "Removed",
    "RestartReason",
    "Restarted",
    "RouterError",
    "Snapshot",
    "Status",
    "Stored",
    "Subscriber",
    "SubscriberClosedError",
    "Synced",
    "Timing",
    "Unreachable",
    "Update",
    "Worker",
    "client_keys",
]
