"""What one delivery costs: kvbus's own ZMTP listener, libzmq's XPUB through pyzmq, and libzmq's proxy.

    python -m tests.bench.zmtp [--messages N] [--size BYTES] [--joined N]

The sender is a process of its own, and its CPU time counts, all threads of it. The subscribers are sockets of libzmq in
another process, the same for each. Messages go out in bursts of ``joined``, as a burst of batches does: the listener
joins the writes of a burst, libzmq's I/O thread does so by itself. The ways take turns in one run, so ratios hold on a
machine that others load.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import statistics
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final

import uvloop
import zmq

from kvbus.transport.zmtp.frames import encode_message
from kvbus.transport.zmtp.listener import Listener
from kvbus.transport.zmtp.peer import Peer
from kvbus.transport.zmtp.roles import Role
from tests.transport.loops import eventually
from tests.transport.zmtp.peers import Recorder

SUBSCRIBERS: Final = (1, 16, 64)
RUNS: Final = 5
PAUSE: Final = 0.001
"""Seconds between two bursts, so that nobody's queue overflows."""


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _subscribe(endpoint: str, count: int, messages: int, pipe: Connection) -> None:
    """Subscribe ``count`` times, and say when all of them have everything."""
    context = zmq.Context()
    poller, left = zmq.Poller(), {}
    for _ in range(count):
        sub = context.socket(zmq.SUB)
        sub.set_hwm(0)
        sub.subscribe(b"")
        sub.connect(endpoint)
        poller.register(sub, zmq.POLLIN)
        left[sub] = messages
    while left:
        for sub, _ in poller.poll(20_000) or [(None, 0)]:
            if sub is None:
                pipe.send(f"{len(left)} subscribers still wait")
                return
            for _ in range(100):
                try:
                    sub.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                left[sub] -= 1
            if not left[sub]:
                poller.unregister(sub)
                del left[sub]
    pipe.send("")


async def _own(endpoint: str, count: int, bursts: list[list[list[bytes]]]) -> float:
    seen = Recorder()
    listener = Listener(endpoint, Role.PUB, seen)
    await eventually(lambda: len(seen.topics) == count, "the subscribers")
    peers: list[Peer] = seen.peers
    begin = _cpu()
    for burst in bursts:
        data = b"".join(map(encode_message, burst))
        for peer in peers:
            if peer.topics.match(burst[0][0]):
                peer.write(data)
        await asyncio.sleep(PAUSE)
    await eventually(lambda: not any(peer.waiting_bytes for peer in peers), "everything taken")
    used = _cpu() - begin
    await eventually(lambda: not seen.peers, "the subscribers' end")
    listener.close()
    return used


async def _libzmq(endpoint: str, count: int, bursts: list[list[list[bytes]]], *, proxied: bool) -> float:
    context = zmq.Context()
    xpub = context.socket(zmq.XPUB)
    xpub.set_hwm(0)
    xpub.linger = 0
    xpub.setsockopt(zmq.XPUB_VERBOSER, 1)
    xpub.bind(endpoint)
    for _ in range(count):
        await eventually(lambda: xpub.poll(0), "the subscribers")
        xpub.recv()
    sender = xpub
    if proxied:
        sender, behind = context.socket(zmq.PUB), context.socket(zmq.XSUB)
        for each in (sender, behind):
            each.set_hwm(0)
            each.linger = 0
        behind.bind("inproc://behind")
        sender.connect("inproc://behind")
        behind.send(b"\x01")
        threading.Thread(target=_proxy, args=(behind, xpub), daemon=True).start()
        await asyncio.sleep(0.1)
    begin = _cpu()
    for burst in bursts:
        for frames in burst:
            sender.send_multipart(frames)
        await asyncio.sleep(PAUSE)
    await asyncio.sleep(0.3)  # the I/O thread's rest
    return _cpu() - begin


def _proxy(behind: zmq.Socket[bytes], xpub: zmq.Socket[bytes]) -> None:
    zmq.proxy(behind, xpub)


def _send(way: str, endpoint: str, count: int, messages: int, size: int, joined: int, pipe: Connection) -> None:
    message = [b"kv@worker@model", bytes(8), bytes(size)]
    bursts = [[message] * joined for _ in range(messages // joined)]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if way == "own":
            used = runner.run(_own(endpoint, count, bursts))
        else:
            used = runner.run(_libzmq(endpoint, count, bursts, proxied=way == "proxy"))
        pipe.send(used)
        pipe.recv()


def _measure(way: str, count: int, port: int, arguments: argparse.Namespace) -> float:
    """Return CPU microseconds a delivery."""
    endpoint = f"tcp://127.0.0.1:{port}"
    messages = max(arguments.messages // count // arguments.joined, 20) * arguments.joined
    start: Callable[..., multiprocessing.Process] = multiprocessing.get_context("spawn").Process  # type: ignore[assignment]
    ours, theirs = multiprocessing.Pipe()
    heard, hears = multiprocessing.Pipe()
    sender = start(target=_send, args=(way, endpoint, count, messages, arguments.size, arguments.joined, theirs))
    reader = start(target=_subscribe, args=(endpoint, count, messages, hears))
    sender.start()
    reader.start()
    try:
        problem = heard.recv()
        if problem:
            raise RuntimeError(f"{way}, {count} subscribers: {problem}")
        reader.join(60)
        used: float = ours.recv()
        return used / (messages * count) * 1e6
    finally:
        for process in (sender, reader):
            process.kill()
            process.join()


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Print CPU microseconds a delivery, and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200_000, help="deliveries of each measurement")
    parser.add_argument("--size", type=int, default=1_000, help="bytes of a payload")
    parser.add_argument("--joined", type=int, default=10, help="messages of a burst")
    arguments = parser.parse_args()
    port = 18_000
    say(f"{'subscribers':>12} {'way':>6} {'us a delivery':>14} {'own / it':>9}")
    for count in SUBSCRIBERS:
        found: dict[str, list[float]] = {"own": [], "xpub": [], "proxy": []}
        for _ in range(RUNS):
            for way, values in found.items():
                port += 1
                values.append(_measure(way, count, port, arguments))
        for way, values in found.items():
            ratio = statistics.median(own / other for own, other in zip(found["own"], values, strict=True))
            say(f"{count:>12} {way:>6} {statistics.median(values):>14.2f} {ratio:>9.2f}")


if __name__ == "__main__":
    main()
