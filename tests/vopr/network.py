"""A simulated TCP network between routers and kvbus, with buffers that fill and links that break.

At kvbus's end, a connection has a :class:`SimSocket`, and a transport that follows asyncio's rules. At the router's end
it has an :class:`End`, which passes arriving bytes to the router. Each direction is a :class:`Pipe`: bytes wait in the
sender's kernel until the receiver's buffer has room.
"""

from __future__ import annotations

import asyncio
import errno
import random
import socket
from collections.abc import Callable
from typing import Any

from kvbus.common.errors import BindError
from kvbus.transport.zmtp import addresses, tcp
from tests.vopr.process import SimLoop
from tests.vopr.schedule import Schedule


class Pipe:
    """One direction of a simulated connection.

    Args:
        schedule: the schedule of the world.
        chance: random numbers for delays and sizes.
        capacity: size of the send buffer in the sender's kernel, in bytes.
        room: returns the number of free bytes in the receiver's buffer.
        deliver: called with arriving bytes.
        freed: called when the sender's kernel has free space again.
    """

    def __init__(
        self,
        schedule: Schedule,
        chance: random.Random,
        capacity: int,
        room: Callable[[], int],
        deliver: Callable[[bytes], None],
        freed: Callable[[], None],
    ) -> None:
        self._schedule, self._chance = schedule, chance
        self.capacity = capacity
        self.queued = bytearray()
        self.up = True
        self.acked_at = schedule.now
        self._room, self._deliver, self._freed = room, deliver, freed
        self._moving = False
        self._ended: Callable[[], None] | None = None
        self._delay = chance.choice([0.0001, 0.001, 0.02])

    def put(self, data: bytes | bytearray | memoryview) -> int:
        """Queue as many bytes as the send buffer has room for, and return their number."""
        taken = max(0, min(len(data), self.capacity - len(self.queued)))
        if taken:
            if not self.queued:
                self.acked_at = self._schedule.now
            self.queued += data[:taken]
            self.move()
        return taken

    def move(self) -> None:
        """Send queued bytes after a delay, if the receiver has room for them."""
        if not self._moving and self.up and (self._ended is not None or (self.queued and self._room() > 0)):
            self._moving = True
            self._schedule.after(self._delay, self._arrive)

    def _arrive(self) -> None:
        self._moving = False
        if not self.up:
            return
        size = min(len(self.queued), self._room())
        if size > 64 and self._chance.random() < 0.05:
            size = self._chance.randrange(1, size)
        if size:
            data = bytes(self.queued[:size])
            del self.queued[:size]
            self.acked_at = self._schedule.now
            self._deliver(data)
            self._freed()
        if not self.queued and self._ended is not None:
            ended, self._ended = self._ended, None
            self.up = False
            ended()
        self.move()

    def end(self, ended: Callable[[], None]) -> None:
        """Call ``ended`` when all queued bytes have arrived."""
        self._ended = ended
        self.move()

    def cut(self) -> None:
        """Discard all bytes that have not arrived, and deliver nothing after that."""
        self.up = False
        self.queued.clear()


class SimSocket:
    """kvbus's end of a simulated connection to a router."""

    family = socket.AF_INET

    def __init__(self, network: Network, loop: SimLoop, end: End, capacity: int) -> None:
        self.loop = loop
        self.fd = network.descriptor()
        self.end = end
        self.inbox = bytearray()
        self.eof = False
        self.error: OSError | None = None
        self.closed = False
        self.transport: SimTransport | None = None
        schedule, chance = network.schedule, network.chance
        self.down = Pipe(schedule, chance, capacity, end.room, end.arrived, self._freed)
        self.uplink = Pipe(schedule, chance, 1 << 30, lambda: 1 << 20, self._arrived, lambda: None)
        loop.sockets[self.fd] = self

    def fileno(self) -> int:
        return -1 if self.closed else self.fd

    def setblocking(self, _flag: bool) -> None:
        """Do nothing, because the simulated socket never blocks."""

    def setsockopt(self, _level: int, option: int, value: int) -> None:
        if option == tcp.NOTSENT_LOWAT:
            self.down.capacity = min(self.down.capacity, value)

    def getsockopt(self, _level: int, _option: int, _size: int) -> bytes:
        """Return the ``TCP_INFO`` of the connection. If the link is down, it shows a peer that acknowledges nothing."""
        silent = not self.down.up and bool(self.down.queued)
        milliseconds = int(1000 * (self.loop.schedule.now - self.down.acked_at)) if silent else 0
        return tcp.INFO.pack(9 if silent else 0, 0, 1 if silent else 0, milliseconds)

    def getpeername(self) -> tuple[str, int]:
        return self.end.host, self.end.port

    def transport_for(self, protocol: asyncio.BufferedProtocol, waiter: asyncio.Future[None]) -> SimTransport:
        if self.closed:
            raise OSError(errno.EBADF, "closed")
        self.transport = SimTransport(self, protocol, waiter)
        return self.transport

    def send(self, data: bytes | bytearray) -> int:
        if self.error is not None:
            raise self.error
        return self.down.put(data)

    def notify(self) -> None:
        """Tell the transport that data, or the end of the connection, can be read."""
        if self.transport is not None:
            self.transport.readable()

    def _arrived(self, data: bytes) -> None:
        if not self.closed:
            self.inbox += data
            self.notify()

    def _freed(self) -> None:
        if self.transport is not None and not self.closed:
            self.transport.writable()

    def peer_closed(self, error: OSError | None) -> None:
        """Record that the router closed its end of the connection: with an error, or with FIN."""
        if self.closed:
            return
        self.eof, self.error = True, error
        self.down.cut()
        self.notify()

    def close(self) -> None:
        """Close the socket. The kernel sends the queued bytes, but if bytes were left unread it resets the
        connection.
        """
        if self.closed:
            return
        self.closed = True
        self.loop.sockets.pop(self.fd, None)
        self.uplink.cut()
        if self.inbox:
            self.down.cut()
            self.end.schedule.after(0.001, self.end.lost)
        else:
            self.down.end(self.end.lost)


class SimTransport(asyncio.Transport):
    """A transport on a simulated socket that follows asyncio's rules for a connected socket."""

    def __init__(self, sock: SimSocket, protocol: asyncio.BufferedProtocol, waiter: asyncio.Future[None]) -> None:
        super().__init__()
        self._sock, self._loop, self._protocol = sock, sock.loop, protocol
        self._buffer = bytearray()
        self._high, self._low = 64 * 1024, 16 * 1024
        self._paused = self._closing = self._reading = self._full = False
        self._over = False
        self._loop.call_soon(protocol.connection_made, self)
        self._loop.call_soon(self._begin)
        self._loop.call_soon(self._made, waiter)

    def _made(self, waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_result(None)

    def _begin(self) -> None:
        self._reading = not self._paused and not self._closing
        self.readable()

    def readable(self) -> None:
        """Schedule a read in the next iteration of the loop, if there is data and reading is not paused."""
        if self._reading and (self._sock.inbox or self._sock.eof):
            self._loop.mark((self._sock.fd, "r"), self._read)

    def _read(self) -> None:
        sock = self._sock
        if not self._reading or self._closing:
            return
        if sock.inbox:
            view = memoryview(self._protocol.get_buffer(-1))
            size = min(len(view), len(sock.inbox))
            view[:size] = sock.inbox[:size]
            del sock.inbox[:size]
            self._protocol.buffer_updated(size)
        elif sock.error is not None:
            self._force_close(sock.error)
        elif sock.eof:
            self._reading = False
            if not self._protocol.eof_received():
                self.close()
        self.readable()

    def write(self, data: Any) -> None:
        if self._closing or not data:
            return
        if not self._buffer:
            try:
                sent = self._sock.send(data)
            except OSError as error:
                self._force_close(error)
                return
            data = data[sent:]
        if data:
            self._buffer += data
            self.writable()
        if len(self._buffer) > self._high and not self._full:
            self._full = True
            self._protocol.pause_writing()

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def writable(self) -> None:
        """Schedule a write in the next iteration of the loop, if bytes wait and the kernel has room."""
        if self._buffer and len(self._sock.down.queued) < self._sock.down.capacity:
            self._loop.mark((self._sock.fd, "w"), self._write)

    def _write(self) -> None:
        if not self._buffer:
            return
        try:
            del self._buffer[: self._sock.send(self._buffer)]
        except OSError as error:
            self._force_close(error)
            return
        if self._full and len(self._buffer) <= self._low:
            self._full = False
            self._protocol.resume_writing()
        if self._closing and not self._buffer:
            self._loop.call_soon(self._end, None)
        self.writable()

    def get_write_buffer_size(self) -> int:
        return len(self._buffer)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high is not None
        assert low is not None
        self._high, self._low = high, low

    def pause_reading(self) -> None:
        self._paused, self._reading = True, False

    def resume_reading(self) -> None:
        self._paused = False
        if not self._closing:
            self._reading = True
            self.readable()

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if self._closing:
            return
        self._closing, self._reading = True, False
        if not self._buffer:
            self._loop.call_soon(self._end, None)

    def abort(self) -> None:
        self._force_close(None)

    def _force_close(self, error: OSError | None) -> None:
        if self._over:
            return
        self._over = True
        self._buffer.clear()
        self._closing, self._reading = True, False
        self._loop.call_soon(self._end, error)

    def _end(self, error: OSError | None) -> None:
        if self._sock.closed:
            return
        self._over = True
        self._protocol.connection_lost(error)
        self._sock.close()


class End:
    """The router's end of a simulated connection to kvbus.

    Args:
        network: the simulated network.
        host: address of the router.
        received: called with arriving bytes while the router reads.
        closed: called when kvbus has closed the connection.
    """

    def __init__(
        self, network: Network, host: str, received: Callable[[bytes], None], closed: Callable[[], None]
    ) -> None:
        self.schedule = network.schedule
        self.host, self.port = host, network.descriptor()
        self.socket: SimSocket | None = None
        self.reading = True
        self.gone = False
        self._capacity = network.chance.choice([2_000, 20_000, 200_000])
        self._buffer = bytearray()
        self._received, self._closed = received, closed

    def room(self) -> int:
        return self._capacity - len(self._buffer)

    def arrived(self, data: bytes) -> None:
        if self.gone:
            return
        if self.reading:
            self._received(data)
        else:
            self._buffer += data

    def read(self, *, on: bool) -> None:
        """Start or stop reading. While the router does not read, its kernel receives bytes until its buffer is full."""
        self.reading = on
        if on and self._buffer:
            data, self._buffer = bytes(self._buffer), bytearray()
            self._received(data)
        if on and self.socket is not None:
            self.socket.down.move()

    def send(self, data: bytes) -> None:
        if self.socket is not None and not self.gone:
            self.socket.uplink.put(data)

    def hold(self, *, up: bool) -> None:
        """Stop or resume delivering bytes in both directions of the link."""
        if self.socket is not None and not self.gone:
            for pipe in (self.socket.down, self.socket.uplink):
                pipe.up = up
                pipe.move()

    def close(self, *, reset: bool = False) -> None:
        """Close the connection as the router does: with FIN, or, with ``reset``, with RST."""
        if self.gone or self.socket is None:
            return
        self.gone = True
        sock = self.socket
        sock.down.cut()
        error = ConnectionResetError(errno.ECONNRESET, "reset") if reset else None
        if reset:
            sock.uplink.cut()
            self.schedule.after(0.001, sock.peer_closed, error)
        else:
            sock.uplink.up = True
            sock.uplink.end(lambda: sock.peer_closed(error))

    def lost(self) -> None:
        """Inform the router that kvbus has closed the connection."""
        if not self.gone:
            self.gone = True
            self._closed()


class SimListener:
    """A simulated listening socket, in place of :class:`kvbus.transport.zmtp.addresses.Bound`."""

    file = None

    def __init__(self, network: Network, loop: SimLoop, endpoint: str) -> None:
        self._network, self.loop, self.endpoint = network, loop, endpoint
        self.fd = network.descriptor()
        self.socket = self
        self.waiting: list[SimSocket] = []
        loop.sockets[self.fd] = self

    def fileno(self) -> int:
        return self.fd

    def notify(self) -> None:
        if self.waiting:
            self.loop.readable(self.fd)

    def accept(self) -> tuple[SimSocket, None]:
        if not self.waiting:
            raise BlockingIOError
        if len(self.loop.sockets) > self.loop.max_descriptors:
            raise OSError(errno.EMFILE, "too many open files")
        accepted = self.waiting.pop(0)
        self.notify()
        return accepted, None

    def close(self) -> None:
        self.loop.sockets.pop(self.fd, None)
        self._network.listeners.pop(self.endpoint, None)
        for sock in self.waiting:
            sock.close()


class Network:
    """The simulated network: all listening sockets, by endpoint."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.chance = schedule.chance("network")
        self.listeners: dict[str, SimListener] = {}
        self._descriptors = 10
        self.seen: dict[str, int] = {}
        """The highest seq that any router has received live, by endpoint."""
        self.floors: dict[str, int] = {}
        """Copy of `seen` from the start of the present kvbus process, by endpoint.

        The process must use only higher seqs.
        """

    def begin_numbering(self) -> None:
        """Record the highest seqs that routers have seen before a new kvbus process starts: its seqs must be higher."""
        self.floors = dict(self.seen)

    def descriptor(self) -> int:
        """Return a file descriptor number that no simulated socket has yet."""
        self._descriptors += 1
        return self._descriptors

    def bind(self, endpoint: str) -> addresses.Bound:
        """Bind an endpoint for the kvbus process that is running.

        Raises:
            BindError: the endpoint is in use.
        """
        loop: Any = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        if endpoint in self.listeners:
            raise BindError(endpoint, "Address already in use")
        listener = self.listeners[endpoint] = SimListener(self, loop, endpoint)
        return listener  # type: ignore[return-value]

    def connect(
        self, endpoint: str, host: str, received: Callable[[bytes], None], closed: Callable[[], None]
    ) -> End | None:
        """Connect a router to an endpoint. Return None if no process listens there."""
        listener = self.listeners.get(endpoint)
        if listener is None:
            return None
        end = End(self, host, received, closed)
        end.socket = SimSocket(self, listener.loop, end, self.chance.choice([3_000, 30_000, 300_000]))
        listener.waiting.append(end.socket)
        listener.notify()
        return end


def queued_bytes(connection: Any) -> int:
    """Return the number of bytes that the router's kernel has not acknowledged."""
    return 0 if connection.closed else len(connection.down.queued)
