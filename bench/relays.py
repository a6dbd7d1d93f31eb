"""The relays that kvbus is compared with, each as a process: ``python -m bench.relays KIND IN OUT [IN OUT …]``.

``proxy`` is libzmq's own ``zmq_proxy``, in C, between XSUB and XPUB. It does not decode messages. ``naive`` is the
relay that people write in Python: it polls, receives, decodes the batch with msgspec and forwards it. It has no index
and no journal, repairs no gap and validates nothing. Both run without high-water marks, so that they lose nothing here.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import msgspec
import zmq


def _open(context: zmq.Context[Any], kind: int, endpoint: str, *, bind: bool) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    (socket.bind if bind else socket.connect)(endpoint)
    return socket


def run_proxy(pairs: list[tuple[Any, Any]]) -> None:
    """Forward each stream in a thread of its own until the process ends."""
    for pair in pairs[1:]:
        threading.Thread(target=zmq.proxy, args=pair, daemon=True).start()
    zmq.proxy(*pairs[0])


def run_naive(pairs: list[tuple[Any, Any]]) -> None:
    """Poll and forward all streams with Python code until the process ends."""
    decode = msgspec.msgpack.Decoder().decode
    outs = dict(pairs)
    poller = zmq.Poller()
    for socket in outs:
        poller.register(socket, zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            frames = socket.recv_multipart()
            decode(frames[2])
            outs[socket].send_multipart(frames)


def main(kind: str, *endpoints: str) -> None:
    """Run a relay of this kind, which forwards the first endpoint of each pair to the second."""
    context: zmq.Context[Any] = zmq.Context()
    kinds = (zmq.XSUB, zmq.XPUB) if kind == "proxy" else (zmq.SUB, zmq.PUB)
    pairs = [
        (_open(context, kinds[0], source, bind=False), _open(context, kinds[1], target, bind=True))
        for source, target in zip(endpoints[0::2], endpoints[1::2], strict=True)
    ]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    (run_proxy if kind == "proxy" else run_naive)(pairs)


if __name__ == "__main__":
    main(*sys.argv[1:])
