"""A message's whole way through the process, counted: instructions from socket to socket, by valgrind's callgrind.

No clock has a part in it. Engine and routers are in the counting process, kvbus's real daemon is a process under
``valgrind``. The engine sends a message when a router has the last one (``lone``), or a hundred while the daemon's loop
stands still (``burst``), and at last one by one to sixteen routers (``fan-out``). Builds of Python differ, so what is bound is the ratio to a yardstick: the same message sent
and received by pyzmq's multipart calls. What the core does of it is counted alone by :mod:`tests.bench.counted`.

    python -m tests.bench.around             what it is now, beside the bounds
    python -m tests.bench.around --record    that becomes the bound

Bounds are of the core's sources (``KVBUS_PURE=1``); compiled modules keep them the more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Final

import uvloop
import zmq

from kvbus.config import Config
from kvbus.core.wire.frames import ASKS_REPLAY
from kvbus.daemon import daemon as daemons
from kvbus.daemon.collector import rest_collector
from tests.ports import ports_in_a_row

from .loads import load_named
from .processes import fine_cpu_seconds, started

BOUNDS: Final = Path(__file__).with_name("around.json")
TOLERANCE: Final = 0.03
"""By how much of itself a ratio may exceed its bound."""

VERSION: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
VALGRIND: Final = shutil.which("valgrind")

WARM: Final = 200
LONE: Final = 400
BURST: Final = 100
BURSTS: Final = 4
ROUTERS: Final = 16
FANNED: Final = 100
PATIENCE: Final = 500_000
"""Milliseconds until what does not come is an error."""

MARK, HOLD, GO, YARDSTICK = b"m", b"h", b"g", b"y"
"""What the daemon's process is told on stdin: a mark in the count; stand still; go on; the yardstick."""


def serve(endpoint: str, output: str) -> None:
    """Be kvbus, until stdin is closed."""
    daemons.TICK = 3600.0  # type: ignore[misc]  # its work is a matter of time, not of messages
    config = Config.model_validate(
        {
            "sources": [{"endpoint": endpoint}],
            "outputs": [{"endpoint": output, "heartbeat": 0}],
            "http": None,
            "state_dir": None,
        }
    )

    async def run() -> None:
        over = asyncio.Event()

        def obey() -> None:
            word = os.read(0, 1)
            if word == MARK:
                os.getpgid(0)  # callgrind writes down what it has counted
            elif word == YARDSTICK:
                _yardstick()
            elif not word:
                over.set()
            os.write(1, word)
            if word == HOLD:
                select.select([0], [], [])

        asyncio.get_running_loop().add_reader(0, obey)
        daemon = daemons.Daemon(config, keep_seqs=False)
        await daemon.start()
        rest_collector()  # as `kvbus run` does: else a pass over everything falls into one count or another
        await over.wait()
        await daemon.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def _yardstick() -> None:
    """Send and receive messages by pyzmq alone."""
    payload = load_named("1x1").take(1)[0]
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://yardstick")
        other.connect("inproc://yardstick")
        for number in range(LONE):
            one.send_multipart([b"", number.to_bytes(8, "big"), payload])
            other.recv_multipart()


class Counting:
    """The daemon's process under callgrind, an engine before it and routers behind it."""

    def __init__(self, process: subprocess.Popen[bytes], engine: Any, join: Callable[[], Any], profile: Path) -> None:
        self._process = process
        self._engine = engine
        self._join = join
        self._routers: list[Any] = []
        self._profile = profile
        self._payloads = enumerate(load_named("1x1").take(2000 + 2 * WARM + LONE + BURSTS * BURST + FANNED))

    def count(self) -> dict[str, float]:
        """Instructions a message."""
        assert self._engine.poll(PATIENCE), "kvbus does not subscribe"
        self._grow(1)
        self._one_by_one(WARM)
        marks = [self._mark()]
        self._one_by_one(LONE)
        marks.append(self._mark())
        for _ in range(BURSTS):
            self._tell(HOLD)
            self._send(BURST)
            self._rest()
            self._tell(GO)
            self._receive(BURST)
        marks.append(self._mark())
        self._tell(YARDSTICK)
        marks.append(self._mark())
        self._grow(ROUTERS)
        self._one_by_one(WARM // 4)
        marks.append(self._mark())
        self._one_by_one(FANNED)
        marks.append(self._mark())
        lone, burst, yardstick, _, many = (after - before for before, after in pairwise(marks))
        return {
            "lone": lone / LONE,
            "burst": burst / (BURSTS * BURST),
            "fan-out": many / FANNED,
            "yardstick": yardstick / LONE,
        }

    def _grow(self, routers: int) -> None:
        """Have so many routers, each of which gets every message."""
        self._routers += [self._join() for _ in range(routers - len(self._routers))]
        self._send(1)
        for router in self._routers:
            while not router.poll(100):  # until its subscription has arrived
                self._send(1)
        self._rest()
        for router in self._routers:
            while router.poll(0):
                router.recv_multipart()

    def _one_by_one(self, count: int) -> None:
        for _ in range(count):
            self._send(1)
            self._receive(1)

    def _send(self, count: int) -> None:
        for number, payload in islice(self._payloads, count):
            self._engine.send_multipart([b"", number.to_bytes(8, "big"), payload])

    def _receive(self, count: int) -> None:
        for router in self._routers:
            for _ in range(count):
                assert router.poll(PATIENCE), "a message is lost"
                router.recv_multipart()

    def _write(self, word: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word)
        self._process.stdin.flush()

    def _tell(self, word: bytes) -> None:
        assert self._process.stdout is not None
        self._write(word)
        assert self._process.stdout.read(1) == word

    def _rest(self) -> None:
        """Wait until the process has nothing more to do."""
        spent = -1.0
        while spent != (now := fine_cpu_seconds(self._process.pid)):
            spent = now
            time.sleep(0.05)

    def _mark(self) -> int:
        """Instructions so far."""
        self._rest()
        self._tell(MARK)
        dumps = self._profile.parent.glob(f"{self._profile.name}.*")
        return sum(
            int(total) for dump in dumps for total in re.findall(rb"^totals: (\d+)", dump.read_bytes(), re.MULTILINE)
        )


def measured() -> dict[str, float]:
    """Instructions a message."""
    with contextlib.ExitStack() as stack:
        profile = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbus-around-"))) / "calls"
        first = ports_in_a_row(2)
        endpoint, output = (f"tcp://127.0.0.1:{port}" for port in (first, first + 1))
        context: zmq.Context[Any] = stack.enter_context(zmq.Context())
        engine = stack.enter_context(context.socket(zmq.XPUB))
        engine.setsockopt(zmq.LINGER, 0)
        engine.bind(endpoint)

        def join() -> zmq.Socket[bytes]:
            router = stack.enter_context(context.socket(zmq.SUB))
            router.setsockopt(zmq.LINGER, 0)
            for topic in (b"", ASKS_REPLAY):
                router.setsockopt(zmq.SUBSCRIBE, topic)
            router.connect(output)
            return router

        command = ["valgrind", "--tool=callgrind", "--dump-before=getpgid", f"--callgrind-out-file={profile}"]
        command += [sys.executable, "-m", "tests.bench.around", endpoint, output]
        pipe = subprocess.PIPE
        process = stack.enter_context(started(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL))
        return Counting(process, engine, join, profile).count()


def ratios(counted: dict[str, float]) -> dict[str, float]:
    """Each count by the yardstick's."""
    return {name: round(counted[name] / counted["yardstick"], 3) for name in ("lone", "burst", "fan-out")}


def bounds() -> dict[str, float] | None:
    """What was recorded for this Python version."""
    known: dict[str, float] | None = json.loads(BOUNDS.read_text()).get(VERSION) if BOUNDS.exists() else None
    return known


def main(arguments: list[str]) -> None:
    """``ENDPOINT OUTPUT`` is the daemon's process; ``--record`` writes down the bounds; nothing prints all beside them."""
    if len(arguments) == 2:
        serve(*arguments)
        return
    counted = measured()
    found = ratios(counted)
    if arguments == ["--record"]:
        known = json.loads(BOUNDS.read_text()) if BOUNDS.exists() else {}
        BOUNDS.write_text(json.dumps(dict(sorted({**known, VERSION: found}.items())), indent=2) + "\n")
    known = bounds() or {}
    for name, value in counted.items():
        bound = f", {found[name]} of the yardstick, bound {known.get(name)}" if name in found else ""
        sys.stdout.write(f"{name:10} {value:10,.0f} instructions a message{bound}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
