"""The processes of a fleet: engines, a leaf for each, a log's server, two aggregators, routers; and what each takes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Final, NamedTuple

import msgspec

from tests.ports import ports_in_a_row

from .many_engines import Sent
from .many_engines import Spec as EnginesSpec
from .many_routers import Command, Exact, Heard
from .processes import environment, fine_cpu_seconds, rss_bytes, started, wait_until
from .rebuild import SERVERS
from .region_model import ROUTERS
from .setups import Child

MOST: Final = 1500
"""Seconds after which the kernel ends any process of a fleet, whatever became of this one."""

PATIENCE: Final = 240.0
PARTITIONS: Final = 16
"""Of Kafka's topics, as docs/LOG.md makes them."""


class Fleet(NamedTuple):
    """What is run.

    Attributes:
        engines: how many.
        blocks: of each engine's cache.
        decode: tokens that a running request makes in a step: more make larger batches.
        rates: batches a second of each engine, one after the other.
    """

    engines: int
    blocks: int
    decode: int
    rates: tuple[float, ...]


def topic(number: int) -> str:
    """Of an engine's stream, as routers read it."""
    return f"kv@pod-{number}.engine.0@m"


def scraped(http: str) -> dict[str, float]:
    """The metrics of one kvbus, by name: the sum over all labels."""
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#"):
            name = re.split(r"[{ ]", line, maxsplit=1)[0]
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found


def connections() -> list[tuple[int, int, int, int, int]]:
    """Of each TCP socket of processes that we may see: pid, own port, peer's port, bytes sent, bytes received."""
    said = subprocess.run(["ss", "-tinpHO"], check=True, capture_output=True, text=True).stdout
    found = []
    for line in said.splitlines():
        ends = re.search(r":(\d+)\s+\S+:(\d+)\s", line)
        owner = re.search(r"pid=(\d+)", line)
        if ends and owner:
            sent, received = (re.search(rf"bytes_{what}:(\d+)", line) for what in ("sent", "received"))
            sizes = [int(size[1]) if size else 0 for size in (sent, received)]
            found.append((int(owner[1]), int(ends[1]), int(ends[2]), sizes[0], sizes[1]))
    return found


def busy_seconds() -> float:
    """CPU seconds that everybody on this machine has used."""
    fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def _bounded() -> None:
    """Set the alarm that ends the process; it outlives exec."""
    signal.alarm(MOST)


def _short(values: list[float]) -> list[float]:
    """Each of a few; of many the mean."""
    return values if len(values) <= 2 else [mean(values)]


class Region:
    """The processes of a fleet, and what is asked of them."""

    def __init__(self, fleet: Fleet, log: str, directory: Path, stack: contextlib.ExitStack) -> None:
        self.fleet, self.directory, self._stack = fleet, directory, stack
        count = fleet.engines
        base = ports_in_a_row(3 * count + 4)
        ports = iter(range(base, base + 3 * count + 4))
        self.live = [next(ports) for _ in range(count)]
        self.replay = [next(ports) for _ in range(count)]
        self.leaf_http = [f"127.0.0.1:{next(ports)}" for _ in range(count)]
        self.http = [f"127.0.0.1:{next(ports)}" for _ in range(2)]
        self.out = [next(ports) for _ in range(2)]
        make, kind_of = SERVERS[log]
        partitions = {"partitions": PARTITIONS} if log == "kafka" else {}
        self.server = make(directory)
        stack.callback(self.server.kill)
        self.server.start()
        self.kind = kind_of(self.server, **partitions)
        asyncio.run(self.kind.make())
        self._truths = 0
        self.began_at = time.monotonic()
        """The leaves' states are about as old."""

    def start(self) -> None:
        """Everything, up to routers that hold all."""
        each = [
            (f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}")
            for live, replay in zip(self.live, self.replay, strict=True)
        ]
        spec = EnginesSpec(each, self.fleet.blocks, self.fleet.decode)
        self.engines = self._child("many_engines", msgspec.json.encode(spec).decode())
        self.routers = self._child("many_routers")
        for child in (self.engines, self.routers):
            child.expect("ready")
        ((name, keys),) = self.kind.settings().items()
        output = {"name": "log", "type": name, "endpoint": self.kind.endpoint, name: keys}
        self.leaves = []
        for number, (live, replay) in enumerate(each):
            settings = {
                "model": "m",
                "worker": f"pod-{number}",
                "sources": [{"name": "engine", "endpoint": live, "replay_endpoint": replay}],
                "outputs": [output],
                "http": self.leaf_http[number],
            }
            self.leaves.append(self._stack.enter_context(self._kvbus(f"leaf-{number}", settings)))
            if number % 8 == 7:
                self._await_leaf(number)
        self._await_leaf(self.fleet.engines - 1)
        self._aggregators: list[contextlib.ExitStack] = [contextlib.ExitStack(), contextlib.ExitStack()]
        self.aggregators = [self._aggregator(number) for number in range(2)]
        for number in range(2):
            self.tell("begin", self.half(number), self.out[number])
        self.filled = self.sent().bytes
        self.exact(range(ROUTERS), self.pause())

    @staticmethod
    def half(number: int) -> range:
        """The routers that an aggregator has by itself."""
        return range(number * ROUTERS // 2, (number + 1) * ROUTERS // 2)

    def _await_leaf(self, number: int) -> None:
        wait_until(lambda: self._answers(number), f"leaf {number} has written its state", PATIENCE, 0.1)

    def _answers(self, number: int) -> bool:
        if self.leaves[number].poll() is not None:
            raise RuntimeError((self.directory / f"leaf-{number}.log").read_text()[-2000:])
        try:
            return scraped(self.leaf_http[number])["kvbus_output_states_sent_total"] > 0
        except OSError:
            return False

    @contextlib.contextmanager
    def _kvbus(self, name: str, settings: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
        runtime = self.directory / f"runtime-{name}"
        runtime.mkdir(exist_ok=True)
        config = self.directory / f"{name}.yaml"
        config.write_text(json.dumps(settings))  # JSON is YAML
        command = [sys.executable, "-m", "kvbus", "run", "-c", str(config)]
        env = environment(XDG_RUNTIME_DIR=str(runtime))
        with started(command, log=self.directory / f"{name}.log", env=env, preexec_fn=_bounded) as run:
            yield run

    def _aggregator(self, number: int) -> subprocess.Popen[bytes]:
        ((log, keys),) = self.kind.settings().items()
        settings = {
            "sources": [{"name": "fleet", "discover": {log: {"endpoint": self.kind.endpoint, **keys}}}],
            "outputs": [
                {
                    "name": "routers",
                    "endpoint": f"tcp://127.0.0.1:{self.out[number]}",
                    "layout": "per_topic",
                    "topic": "kv@{source}@m",
                    "replay_endpoint": None,
                }
            ],
            "http": self.http[number],
        }
        stack = self._aggregators[number] = self._stack.enter_context(contextlib.ExitStack())
        return stack.enter_context(self._kvbus(f"aggregator-{number}", settings))

    def _child(self, module: str, *arguments: str) -> Child:
        log = self.directory / f"{module}.log"
        process = self._stack.enter_context(
            started(
                [sys.executable, "-m", f"tests.bench.{module}", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stack.enter_context(log.open("ab")),
                preexec_fn=_bounded,
            )
        )
        return Child(process, log)

    def end(self) -> None:
        """Let all leaves end side by side; who has started them waits for each."""
        for leaf in self.leaves:
            leaf.terminate()

    # -- what is said to them ------------------------------------------------------------------------------------------

    def tell(self, what: str, routers: Sequence[int], port: int = 0) -> None:
        """Let routers begin, go elsewhere, or end."""
        command = Command(what, list(routers), f"tcp://127.0.0.1:{port}")
        if self.routers.ask(msgspec.json.encode(command).decode()) != "done":
            raise RuntimeError(f"the routers did not {what}")

    def run(self, rate: float) -> None:
        """Let the engines publish."""
        self.engines.ask(json.dumps({"do": "run", "rate": rate}))

    def pause(self) -> str:
        """Stop the engines; the file with what they hold."""
        self._truths += 1
        truth = str(self.directory / f"truth-{self._truths}")
        self.engines.ask(json.dumps({"do": "pause", "truth": truth}))
        return truth

    def exact(self, routers: Sequence[int], truth: str) -> list[Exact]:
        """Wait until each of these routers holds the truth."""
        topics = [topic(number) for number in range(self.fleet.engines)]
        command = Command("await", list(routers), truth=truth, topics=topics, patience=PATIENCE)
        return msgspec.convert(self.routers.ask(msgspec.json.encode(command).decode()), list[Exact])

    def heard(self) -> dict[int, Heard]:
        """What each router has received; nothing may have misled it."""
        told = msgspec.convert(self.routers.ask('{"do": "count"}'), list[Heard])
        for each in told:
            if each.violations:
                raise RuntimeError(f"router {each.router}: {each.violations[:5]}")
        return {each.router: each for each in told}

    def sent(self) -> Sent:
        """What the engines have published."""
        return msgspec.convert(self.engines.ask('{"do": "count"}'), Sent)

    def kill(self, number: int) -> None:
        """End an aggregator as a crash does."""
        self.aggregators[number].kill()
        self.aggregators[number].wait()
        self._aggregators[number].close()

    def restart(self, number: int) -> None:
        """Start it anew."""
        self.aggregators[number] = self._aggregator(number)

    # -- what is seen --------------------------------------------------------------------------------------------------

    def pids(self) -> dict[str, list[int]]:
        """By role."""
        return {
            "leaf": [leaf.pid for leaf in self.leaves],
            "broker": [self.server.pid],
            "aggregator": [each.pid for each in self.aggregators],
            "router": [self.routers.pid],
            "engine": [self.engines.pid],
        }

    def hops(self) -> dict[str, int]:
        """Bytes that TCP has carried at each hop, in its main direction and (`back`) in the other."""
        broker, ports = int(self.kind.endpoint.rpartition(":")[2]), set(self.live)
        pids = {role: set(pids) for role, pids in self.pids().items()}
        found = dict.fromkeys(("engine", "log", "log back", "aggregator", "aggregator back", "router 0", "router 1"), 0)
        for pid, own, peer, sent, received in connections():
            if pid in pids["engine"] and own in ports:
                found["engine"] += sent
            elif pid in pids["leaf"] and peer == broker:
                found["log"] += sent
                found["log back"] += received
            elif pid in pids["aggregator"] and peer == broker:
                found["aggregator"] += received
                found["aggregator back"] += sent
            elif pid in pids["aggregator"] and own in self.out:
                found[f"router {self.out.index(own)}"] += sent
        return found

    def window(self, seconds: float, split: tuple[int, int]) -> dict[str, Any]:
        """What everything takes for so many seconds; ``split``: routers at each aggregator."""
        pids = self.pids()
        metrics = [[(time.monotonic(), scraped(http)) for http in self.leaf_http]]
        hops, heard, sent, busy = self.hops(), self.heard(), self.sent(), busy_seconds()
        cpu = {role: [fine_cpu_seconds(pid) for pid in each] for role, each in pids.items()}
        time.sleep(seconds)
        after_cpu = {role: [fine_cpu_seconds(pid) for pid in each] for role, each in pids.items()}
        now, after_heard, after_hops, after_busy = self.sent(), self.heard(), self.hops(), busy_seconds()
        metrics.append([(time.monotonic(), scraped(http)) for http in self.leaf_http])
        after = [scraped(http) for http in self.http]
        took = now.at - sent.at
        used = {role: [b - a for a, b in zip(cpu[role], after_cpu[role], strict=True)] for role in cpu}
        written = sum(
            (b["kvbus_output_batches_total"] - a["kvbus_output_batches_total"]) / (then - at)
            for (at, a), (then, b) in zip(*metrics, strict=True)
        )
        got = [each.messages - heard[number].messages for number, each in after_heard.items()]
        size = [each.size - heard[number].size for number, each in after_heard.items()]
        return {
            "seconds": took,
            "split": split,
            "load": os.getloadavg()[0],
            "others": (after_busy - busy - sum(map(sum, used.values()))) / took,
            "batches": (now.batches - sent.batches) / took,
            "bytes": (now.bytes - sent.bytes) / took,
            "written": written,
            "cpu": {role: _short([each / took for each in values]) for role, values in used.items()},
            "rss": {role: _short([rss_bytes(pid) / 2**20 for pid in each]) for role, each in pids.items()},
            "hops": {name: (value - hops[name]) / took for name, value in after_hops.items()},
            "heard": sum(got) / took / len(got),
            "heard bytes": sum(size) / took / len(size),
            "journal": [each["kvbus_output_journal_bytes"] for each in after],
            "state bytes": sum(each["kvbus_output_state_bytes_total"] for _, each in metrics[1]),
            "sent bytes": now.bytes,
        }
