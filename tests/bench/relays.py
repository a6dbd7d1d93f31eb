"""What kvbus is compared with: the least, and what people write. Each is a process: ``relays KIND IN OUT [IN OUT …]``.

``proxy`` is libzmq's own ``zmq_proxy``, in C, between XSUB and XPUB. ``floor`` is what the bindings cost: a loop in
Python that receives three frames and sends three. Both understand nothing. ``blocking``, ``naive`` and ``asyncio``
decode each batch with msgspec, as a relay that looks at what it forwards does, and send the bytes on; they keep no
index, repair no gap and validate nothing. The first waits in its receive, the second polls before each message. Their
high-water marks are off, so that they lose nothing here.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

_decode: Final = msgspec.msgpack.Decoder().decode


def _open(context: Any, kind: int, endpoint: str, *, bind: bool) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    if bind:
        socket.bind(endpoint)
    else:
        socket.connect(endpoint)
    return socket


def _ready() -> None:
    sys.stdout.write('"ready"\n')
    sys.stdout.flush()


def run_threads(pairs: list[tuple[str, str]], forward: Callable[[Any, Any], object], kinds: tuple[int, int]) -> None:
    """A thread for each stream, which forwards from one socket to the other for ever."""
    context: zmq.Context[Any] = zmq.Context()
    sockets = [(_open(context, kinds[0], a, bind=False), _open(context, kinds[1], b, bind=True)) for a, b in pairs]
    _ready()
    threads = [threading.Thread(target=forward, args=pair, daemon=True) for pair in sockets[1:]]
    for thread in threads:
        thread.start()
    forward(*sockets[0])


def forward_three(receiving: Any, sending: Any) -> None:
    """Three frames in, three frames out: engines send no other messages."""
    receive, send, more = receiving.recv, sending.send, int(zmq.SNDMORE)
    while True:
        topic, seq, payload = receive(), receive(), receive()
        send(topic, more)
        send(seq, more)
        send(payload)


def forward_decoded(receiving: Any, sending: Any) -> None:
    """What a relay does that looks at what it forwards."""
    while True:
        frames = receiving.recv_multipart()
        _decode(frames[2])
        sending.send_multipart(frames)


def run_naive(pairs: list[tuple[str, str]]) -> None:
    """A poll loop."""
    context: zmq.Context[Any] = zmq.Context()
    outs = {_open(context, zmq.SUB, a, bind=False): _open(context, zmq.PUB, b, bind=True) for a, b in pairs}
    poller = zmq.Poller()
    for socket in outs:
        poller.register(socket, zmq.POLLIN)
    _ready()
    while True:
        for socket, _ in poller.poll():
            frames = socket.recv_multipart()
            _decode(frames[2])
            outs[socket].send_multipart(frames)


async def run_asyncio(pairs: list[tuple[str, str]]) -> None:
    """``zmq.asyncio``, a task for each stream."""
    context = zmq.asyncio.Context()

    async def forward(receiving: Any, sending: Any) -> None:
        while True:
            frames = await receiving.recv_multipart()
            _decode(frames[2])
            await sending.send_multipart(frames)

    sockets = [(_open(context, zmq.SUB, a, bind=False), _open(context, zmq.PUB, b, bind=True)) for a, b in pairs]
    _ready()
    await asyncio.gather(*(forward(*pair) for pair in sockets))


def main(kind: str, *endpoints: str) -> None:
    """Relay until the end."""
    pairs = list(zip(endpoints[0::2], endpoints[1::2], strict=True))
    if kind == "proxy":
        run_threads(pairs, zmq.proxy, (zmq.XSUB, zmq.XPUB))
    elif kind == "floor":
        run_threads(pairs, forward_three, (zmq.SUB, zmq.PUB))
    elif kind == "blocking":
        run_threads(pairs, forward_decoded, (zmq.SUB, zmq.PUB))
    elif kind == "naive":
        run_naive(pairs)
    else:
        asyncio.run(run_asyncio(pairs))


if __name__ == "__main__":
    main(*sys.argv[1:])
