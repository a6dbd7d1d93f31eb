"""The replay side of a simulated engine: a buffer of the newest batches, and a ROUTER that answers requests from it.

The server runs in its own thread, as an engine's publisher does. So it answers even if the caller's event loop is busy,
and it works with asyncio, with uvloop and without an event loop. Unlike the ROUTER of older engines, it loses no
message when the queue of a requester is full, and no requester has to wait for another requester.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import TYPE_CHECKING, Final, Literal

import zmq

from kvbus.core.wire.frames import END_SEQ

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Framing = Literal["3", "4", "sim"]

_SERVERS: Final = itertools.count()
_BURST: Final = 64  # maximum number of messages sent to one requester before the next requester is served
_RETRY_MS: Final = 2  # milliseconds before the server tries again if the queues of all requesters are full


class ReplayBuffer:
    """The newest batches of a simulated engine, kept for replays. ``steps`` is the maximum number of batches.

    The publisher's thread appends batches, and the thread of the replay server reads them.
    """

    def __init__(self, steps: int) -> None:
        self._lock = threading.Lock()
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=steps)

    def append(self, seq: int, payload: bytes) -> None:
        """Add a batch. If the buffer is full, drop the oldest batch."""
        with self._lock:
            self._batches.append((seq, payload))

    def since(self, start: int) -> list[tuple[int, bytes]]:
        """Return the buffered batches from seq ``start`` on, each as its seq and payload."""
        with self._lock:
            return [batch for batch in self._batches if batch[0] >= start]

    def find(self, seq: int) -> bytes:
        """Return the payload of a buffered batch.

        Raises:
            KeyError: the buffer has no batch with this seq, because it was never published or is too old.
        """
        with self._lock:
            for known, payload in reversed(self._batches):
                if known == seq:
                    return payload
        raise KeyError(f"seq {seq} is not in the replay buffer")

    def clear(self) -> None:
        """Drop all batches, because the buffer of a restarted engine is empty."""
        with self._lock:
            self._batches.clear()

    def __len__(self) -> int:
        return len(self._batches)


def answer(batches: list[tuple[int, bytes]], framing: Framing, topic: bytes) -> list[list[bytes]]:
    """Return the messages of a replay answer as a DEALER receives them, each a list of frames. The last message is END.

    Args:
        batches: seq and payload of each batch in the answer.
        framing: layout of the messages. ``3`` has no topic frame.
        topic: topic of the stream.
    """

    def frames(seq: bytes, payload: bytes, topic: bytes) -> list[bytes]:
        return [b"", seq, payload] if framing == "3" else [b"", topic, seq, payload]

    # engines send END with an empty topic, even if the stream has a topic
    return [*(frames(seq.to_bytes(8, "big"), payload, topic) for seq, payload in batches), frames(END_SEQ, b"", b"")]


class EngineReplayServer:
    """A server that answers replay requests at a bound ROUTER, in a separate thread.

    Args:
        router: the bound ROUTER. The server's thread owns it and closes it.
        context: the ZeroMQ context of the ROUTER.
        answer: returns the messages of the answer to a replay request. Its argument is the first seq that is requested.
            The server's thread calls it.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        context: zmq.Context[zmq.Socket[bytes]],
        answer: Callable[[int], Iterable[list[bytes]]],
    ) -> None:
        self._answer = answer
        self._router = router
        # every server needs another name, because libzmq frees an inproc name only some time after its socket was
        # closed
        name = f"inproc://kvbus-replay-stop-{next(_SERVERS)}"
        self._stop_in: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._stop_in.bind(name)
        self._stop_out: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._stop_out.connect(name)
        self._jobs: dict[bytes, deque[Iterator[list[bytes]]]] = {}
        self._unsent: dict[bytes, list[bytes]] = {}
        self._thread = threading.Thread(target=self._serve, name="kvbus-engine-replay", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, drop unfinished answers and close the ROUTER."""
        self._stop_out.send(b"")
        self._thread.join()
        self._stop_out.close(0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._stop_in, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        moved = True
        try:
            while True:
                wait_ms = None if not self._jobs else 0 if moved else _RETRY_MS
                ready = dict(poller.poll(wait_ms))
                if self._stop_in in ready:
                    return
                if self._router in ready:
                    self._take_requests()
                moved = self._send_some()
        finally:
            self._router.close(0)
            self._stop_in.close(0)

    def _take_requests(self) -> None:
        while True:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # a valid request is [identity, "", start]; engines silently drop every other message
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                continue
            client, _, start = frames
            answer = self._answer(int.from_bytes(start, "big"))
            self._jobs.setdefault(client, deque()).append(iter(answer))

    def _send_some(self) -> bool:
        """Send up to ``_BURST`` messages to each requester.

        Returns:
            Whether at least one message was sent. False means that the queues of all requesters are full.
        """
        moved = False
        for client in list(self._jobs):
            for _ in range(_BURST):
                frames = self._unsent.pop(client, None) or self._next(client)
                if frames is None:
                    break
                try:
                    self._router.send_multipart([client, *frames], zmq.NOBLOCK)
                except zmq.Again:
                    self._unsent[client] = frames
                    break
                except zmq.ZMQError as error:
                    if error.errno != zmq.EHOSTUNREACH:
                        raise
                    del self._jobs[client]
                    break
                moved = True
        return moved

    def _next(self, client: bytes) -> list[bytes] | None:
        queue = self._jobs[client]
        while queue:
            frames = next(queue[0], None)
            if frames is not None:
                return frames
            queue.popleft()
        del self._jobs[client]
        return None
