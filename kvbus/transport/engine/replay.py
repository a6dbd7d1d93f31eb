"""An engine's replay: a buffer of the newest batches, and a ROUTER that answers requests from it.

The server runs in its own thread, as an engine's publisher does. It answers even if the caller's event loop is busy,
and it works with asyncio, with uvloop and without an event loop. Unlike older engines, it loses no frame at a
requester's high-water mark, and no requester has to wait for another requester.
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
_BURST: Final = 64  # messages to one requester before the next requester is served
_RETRY_MS: Final = 2  # pause before another attempt when every requester is at its high-water mark


class ReplayBuffer:
    """The newest `steps` batches. The publisher's thread writes them, and the replay thread reads them."""

    def __init__(self, steps: int) -> None:
        self._lock = threading.Lock()
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=steps)

    def append(self, seq: int, payload: bytes) -> None:
        """Add a batch; a full buffer drops its oldest batch."""
        with self._lock:
            self._batches.append((seq, payload))

    def since(self, start: int) -> list[tuple[int, bytes]]:
        """Return seq and payload of every buffered batch from seq `start` on."""
        with self._lock:
            return [batch for batch in self._batches if batch[0] >= start]

    def find(self, seq: int) -> bytes:
        """Return a batch's payload.

        Raises:
            KeyError: the batch was never in the buffer, or was dropped.
        """
        with self._lock:
            for known, payload in reversed(self._batches):
                if known == seq:
                    return payload
        raise KeyError(f"seq {seq} is not in the replay buffer")

    def clear(self) -> None:
        """Drop all batches."""
        with self._lock:
            self._batches.clear()

    def __len__(self) -> int:
        return len(self._batches)


def answer(batches: list[tuple[int, bytes]], framing: Framing, topic: bytes) -> list[list[bytes]]:
    """Return the messages of a replay answer as a DEALER receives them; the last one is END."""

    def frames(seq: bytes, payload: bytes, topic: bytes) -> list[bytes]:
        return [b"", seq, payload] if framing == "3" else [b"", topic, seq, payload]

    # the END marker has an empty topic, even if the stream has a topic
    return [*(frames(seq.to_bytes(8, "big"), payload, topic) for seq, payload in batches), frames(END_SEQ, b"", b"")]


class EngineReplayServer:
    """A bound ROUTER and the thread that serves it.

    Args:
        router: the socket; the server's thread owns it and closes it.
        context: the socket's context.
        answer: returns the messages of the answer to a request from a given seq on; called in the server's thread.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        context: zmq.Context[zmq.Socket[bytes]],
        answer: Callable[[int], Iterable[list[bytes]]],
    ) -> None:
        self._answer = answer
        self._router = router
        # a new name for each server, because libzmq releases an inproc name only some time after its socket closed
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
            # [identity, "", start]; engines drop anything else silently
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                continue
            client, _, start = frames
            answer = self._answer(int.from_bytes(start, "big"))
            self._jobs.setdefault(client, deque()).append(iter(answer))

    def _send_some(self) -> bool:
        """Send a burst to each requester; return False if no requester could accept a message."""
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
