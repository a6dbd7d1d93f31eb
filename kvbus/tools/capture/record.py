"""The recorder, which writes the messages of a live stream to a capture."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbus.tools.capture.format import Message

if TYPE_CHECKING:
    from kvbus.tools.capture.anonymize import Anonymizer
    from kvbus.tools.capture.format import CaptureWriter
    from kvbus.transport.client.raw import RawSubscriber


@dataclass(slots=True)
class Stats:
    """The counters of a recorder: recorded, unusable and missing messages, and restarts of the engine."""

    recorded: int = 0
    unusable: int = 0
    missing: int = 0
    restarts: int = 0


async def record(
    subscriber: RawSubscriber,
    writer: CaptureWriter,
    *,
    count: int | None = None,
    seconds: float | None = None,
    anonymizer: Anonymizer | None = None,
    stats: Stats | None = None,
) -> Stats:
    """Write every message of a stream to a capture, until a limit is reached.

    Missing batches and restarts are counted, but missing batches are not requested. A message that is not ``[topic,
    seq, payload]`` is counted but not written.

    Args:
        subscriber: a started subscriber of the stream.
        writer: the writer of the capture.
        count: maximum number of messages; None for no limit.
        seconds: maximum time in seconds; None for no limit.
        anonymizer: object that replaces tokens, hashes, salts and names by pseudonyms; None to record them unchanged.
        stats: counters to update while recording.

    Returns:
        The counters.

    Raises:
        CaptureError: the capture cannot be written.
    """
    stats = stats or Stats()
    loop = asyncio.get_running_loop()
    begin: float | None = None
    expected: int | None = None
    try:
        async with asyncio.timeout(seconds):
            while count is None or stats.recorded < count:
                frames = await subscriber.recv()
                # A seq frame has 8 bytes, or 24 bytes if the 16-byte id of the publisher follows the seq.
                if len(frames) != 3 or len(frames[1]) not in (8, 24):
                    stats.unusable += 1
                    continue
                now = loop.time()
                if begin is None:
                    begin = now
                seq = int.from_bytes(frames[1][:8], "big")
                if expected is not None:
                    stats.missing += max(0, seq - expected)
                    stats.restarts += seq < expected - 1
                expected = seq + 1
                message = Message(round(now - begin, 6), frames[0], seq, frames[2])
                writer.write(anonymizer.message(message) if anonymizer is not None else message)
                stats.recorded += 1
    except TimeoutError:
        pass
    return stats
