"""Readers for tests of the ZeroMQ driver: a SUB for the live stream, and a DEALER for replays."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import zmq

from kvbus.config import OutputConfig, parse_endpoint
from kvbus.core.stats import OutputStats
from tests.ports import ports_in_a_row
from tests.transport.loops import END, read_all, u64


def batch(frames: list[bytes]) -> tuple[bytes, int, bytes]:
    topic, seq, payload = frames[-3:]
    return topic, int.from_bytes(seq, "big"), payload


class ZmqReader:
    def __init__(self, live: str, replay: str, *, slow: bool) -> None:
        self._context = zmq.Context()
        self._live = self._socket(zmq.SUB, live, slow=slow)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._replay = self._socket(zmq.DEALER, replay, slow=slow)
        self._whole: list[list[tuple[bytes, int, bytes]]] = []
        self._part: list[tuple[bytes, int, bytes]] = []

    def _socket(self, kind: int, endpoint: str, *, slow: bool) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RECONNECT_IVL, 5)
        made.setsockopt(zmq.RCVHWM, 1 if slow else 0)
        if slow:
            made.setsockopt(zmq.RCVBUF, 4096)
        made.connect(endpoint)
        return made

    def take(self) -> list[tuple[bytes, int, bytes]]:
        return [batch(frames) for frames in read_all(self._live)]

    def look(self) -> None:
        """Call libzmq, because after a lost connection a SUB subscribes again only while its application calls
        libzmq.
        """
        self._live.poll(0)

    def ask(self, start: int) -> None:
        self._replay.send_multipart([b"", u64(start)])

    def answers(self) -> list[list[tuple[bytes, int, bytes]]]:
        for frames in read_all(self._replay):
            if frames[-2] != END:
                self._part.append(batch(frames))
                continue
            self._whole.append(self._part)
            self._part = []
        return self._whole

    def close(self) -> None:
        self._context.destroy()


class ZmqKind:
    asks = True
    loses = True
    seen = True
    sends_state = True

    def settings(self, directory: Path) -> dict[str, Any]:
        first = ports_in_a_row(4)
        return {"endpoint": f"tcp://127.0.0.1:{first}", "replay_endpoint": f"tcp://127.0.0.1:{first + 2}"}

    def connect(self, config: OutputConfig, stream: int, *, slow: bool) -> ZmqReader:
        return ZmqReader(*self.places(config, stream), slow=slow)

    def joined(self, stats: OutputStats, readers: list[ZmqReader]) -> bool:
        for reader in readers:
            reader.look()
        return stats.subscribers == len(readers)

    def payload(self, number: int, size: int) -> bytes:
        return (b"%d" % number).ljust(size, b"\0")

    def places(self, config: OutputConfig, stream: int) -> list[str]:
        return [place for place in config.stream_endpoints(stream) if place is not None]

    def occupied(self, place: str) -> socket.socket:
        address = parse_endpoint(place)
        return socket.create_server((address.host, address.port))
