"""One run: an engine, something between (or nothing), routers; every process with its CPU time and memory.

Where there are two cores, engine and routers share the first, and what is between has the last to itself.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import urllib.request
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Self

import msgspec

from kvbus.daemon.seq_reservation import SeqReservations
from tests.ports import ports_in_a_row

from . import asker, engine, reader, router
from .counters import Counters
from .loads import load_named
from .processes import (
    LOAD_CORE,
    MEASURED_CORE,
    environment,
    fine_cpu_seconds,
    rss_bytes,
    started,
    wait_until,
    waited_seconds,
)
from .recorded import FAMILIES

Between = Literal["direct", "proxy", "floor", "blocking", "naive", "asyncio", "kvbus"]
BETWEEN: Final[tuple[Between, ...]] = ("direct", "proxy", "floor", "blocking", "naive", "asyncio", "kvbus")


class Child:
    """A process that is spoken to in JSON lines."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def answer(self) -> Any:
        """The next line it says.

        Raises:
            RuntimeError: it ended instead.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(10)
            raise RuntimeError(f"{self.process.args[2]!s} ended: {self._log.read_text()[-2000:]}")  # type: ignore[index]
        return json.loads(line)

    def expect(self, word: str) -> None:
        """The next line must be this one.

        Raises:
            RuntimeError: it is another, or there is none.
        """
        if (said := self.answer()) != word:
            raise RuntimeError(f"{self.process.args[2]!s} said {said!r}, not {word!r}")  # type: ignore[index]

    def tell(self, command: str) -> None:
        """Say something, without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, command: str) -> Any:
        """Say something and wait for the answer."""
        self.tell(command)
        return self.answer()


@dataclass
class Setup:
    """What is to be run.

    Attributes:
        between: what stands between engine and routers.
        load: name of the load.
        batches: of each rank.
        routers: how many; each listens to every rank.
        ranks: of the engine.
        rate: batches a second of each rank; 0: as fast as the routers take them.
        apart: at a rate the ranks take turns.
        window: batches under way at most.
        prefill: of the batches, so many leave before the clock starts.
        verify: the routers keep everything and count the blocks.
        pinned: False lets every process use every core.
        kvbus: further settings.
        state_dir: kvbus keeps its state, in the run's own directory.
        first_seq: kvbus's numbering begins at this number or soon behind it, as after an earlier process.
    """

    between: Between
    load: str
    batches: int
    routers: int = 1
    ranks: int = 1
    rate: float = 0.0
    window: int = 2000
    prefill: int = 0
    verify: bool = False
    pinned: bool = True
    kvbus: dict[str, Any] = field(default_factory=dict)
    state_dir: bool = False
    first_seq: int = 0
    apart: bool = False


@dataclass
class Result:
    """What one run gave."""

    seconds: float
    """From the first batch that left the engine to the end's arrival at the last router."""
    batches: int
    """Of all ranks, without prefill."""
    heard: list[router.Heard]
    cpu: dict[str, float]
    """CPU seconds of ``engine``, ``relay`` and ``routers`` while the load was sent and received."""
    rss: int = 0
    """Bytes that the relay has resident at the end."""
    waited: float = 0.0
    """Seconds that the relay's threads were ready to run, and had no core."""
    late: int = 0
    """Batches that left more than an interval behind their time."""
    times: array[float] = field(default_factory=lambda: array("d"))
    """(arrival, latency), in turn."""

    @property
    def cpu_us(self) -> float:
        """The relay's CPU time a batch, in microseconds."""
        return self.cpu["relay"] / self.batches * 1e6

    @property
    def latencies(self) -> list[float]:
        """Seconds, sorted."""
        return sorted(self.times[1::2])


class Running:
    """A setup whose processes run and know each other."""

    def __init__(self, setup: Setup, directory: Path, stack: contextlib.ExitStack) -> None:
        self.setup = setup
        self.directory = directory
        self._stack = stack
        self._cores = {"load": (LOAD_CORE,), "relay": (MEASURED_CORE,)} if setup.pinned else {"load": (), "relay": ()}
        ranks = setup.ranks
        base = ports_in_a_row(4 * ranks + 1)
        self.live, self.replay, self.out, self.out_replay = (
            [f"tcp://127.0.0.1:{base + group * ranks + rank}" for rank in range(ranks)] for group in range(4)
        )
        self.http = f"127.0.0.1:{base + 4 * ranks}"
        self.counters = directory / "counters"
        Counters(self.counters, 2 * ranks * setup.routers)
        self.times = directory / "times"

    def start(self, before: Callable[[Child], object] | None) -> Self:
        """Start everything, and see that every router hears every rank."""
        setup = self.setup
        self.relay = self._start_relay()
        if before is not None and self.relay is not None:
            before(self.relay)
        self.engine = self._child(
            "engine",
            engine.Spec(
                list(zip(self.live, self.replay, strict=True)),
                setup.load,
                setup.batches,
                str(self.counters),
                list(range(setup.ranks)) * setup.routers,
                setup.rate,
                setup.window,
                setup.prefill,
                setup.apart,
            ),
        )
        self.routers = self._child(
            "router",
            router.Spec(
                (self.live if setup.between == "direct" else self.out) * setup.routers,
                str(self.counters),
                times=str(self.times) if setup.rate else None,
                verify=setup.load if setup.verify else None,
            ),
        )
        for child in (self.engine, self.routers):
            child.expect("ready")
        self._probes: int = self.engine.ask("probe")
        self.probes = setup.ranks * self._probes
        """Blocks that were sent before the load."""
        if setup.prefill:
            self.engine.ask("fill")
        return self

    def run(self) -> Result:
        """Send the load and wait until the routers have it."""
        self.begin()
        return self.end()

    def begin(self) -> None:
        """Let the engine send the load."""
        self._before, self._waited = self.cpu(), self._relay_waited()
        self.engine.tell("run")

    def end(self) -> Result:
        """Wait until the routers have all of it.

        Raises:
            RuntimeError: a seq is missing, or came twice.
        """
        self.routers.expect("over")
        cpu = {name: spent - self._before[name] for name, spent in self.cpu().items()}
        rss = rss_bytes(self.relay.pid) if self.relay is not None else 0
        waited = self._relay_waited() - self._waited
        ran = msgspec.convert(self.engine.answer(), engine.Ran)
        heard = msgspec.convert(self.routers.ask(f"count {self._probes}"), list[router.Heard])
        for each in heard:
            if each.missing or each.went_back:
                raise RuntimeError(f"{self.setup}: a router missed batches: {each}")
        result = Result(
            max(each.ended for each in heard) - ran.first,
            (self.setup.batches - self.setup.prefill) * self.setup.ranks,
            heard,
            cpu,
            rss,
            waited,
            ran.late,
        )
        if self.setup.rate:
            result.times.frombytes(self.times.read_bytes())
        return result

    def reader(self, spec: reader.Spec) -> Child:
        """A late router's process, which waits to be told to ask."""
        child = self._child("reader", spec)
        child.expect("ready")
        return child

    def asker(self, spec: asker.Spec) -> Child:
        """Clients of kvbus's HTTP port, which wait to be told to ask."""
        child = self._child("asker", spec)
        child.expect("ready")
        return child

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far of every process."""
        pids = {"engine": self.engine.pid, "routers": self.routers.pid}
        if self.relay is not None:
            pids["relay"] = self.relay.pid
        return {name: fine_cpu_seconds(pid) for name, pid in pids.items()}

    def _relay_waited(self) -> float:
        return waited_seconds(self.relay.pid) if self.relay is not None else 0.0

    def get(self, path: str) -> Any:
        """What kvbus's HTTP server answers, decoded if it is JSON."""
        with urllib.request.urlopen(f"http://{self.http}{path}", timeout=30) as answer:
            body = answer.read()
        return json.loads(body) if path == "/sources" else body.decode()

    def live_blocks(self) -> int:
        """Blocks that kvbus holds, of all ranks."""
        return sum(sum(source["blocks"].values()) for source in self.get("/sources"))

    def check_kvbus(self, *, joined_late: bool = False) -> None:
        """Nothing was refused, missing or lost on the way in, and nothing dropped on the way out.

        ``joined_late``: many connections take their time, and probes sent before may have been asked for.

        Raises:
            RuntimeError: something was.
        """
        for source in self.get("/sources"):
            counts = source["counts"]
            missing = counts["missing"] - counts["recovered"] * joined_late
            if missing or counts["rejected"] or counts["lost"] or source["state"] != "live":
                raise RuntimeError(f"{self.setup}: {source}")
        for line in self.get("/metrics").splitlines():
            if line.startswith("kvbus_output_dropped_batches_total") and float(line.split()[-1]):
                raise RuntimeError(f"{self.setup}: {line}")

    def _child(self, name: str, spec: msgspec.Struct) -> Child:
        log = self.directory / f"{name}.log"
        process = self._stack.enter_context(
            started(
                [sys.executable, "-m", f"tests.bench.{name}", msgspec.json.encode(spec).decode()],
                cores=self._cores["load"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stack.enter_context(log.open("ab")),
            )
        )
        return Child(process, log)

    def _start_relay(self) -> Child | None:
        setup = self.setup
        if setup.between == "direct":
            return None
        log = self.directory / "relay.log"
        if setup.between == "kvbus":
            self._reserve()
            process = self._stack.enter_context(
                started(
                    [sys.executable, "-m", "kvbus", "run", "-c", str(self._configuration())],
                    cores=self._cores["relay"],
                    log=log,
                    env=environment(XDG_RUNTIME_DIR=str(self.directory)),
                )
            )
            wait_until(lambda: self._answers(process, log), f"kvbus answers (log: {log})")
            return Child(process, log)
        pairs = [endpoint for pair in zip(self.live, self.out, strict=True) for endpoint in pair]
        process = self._stack.enter_context(
            started(
                [sys.executable, "-m", "tests.bench.relays", setup.between, *pairs],
                cores=self._cores["relay"],
                stdout=subprocess.PIPE,
                stderr=self._stack.enter_context(log.open("ab")),
            )
        )
        relay = Child(process, log)
        relay.expect("ready")
        return relay

    def _reserve(self) -> None:
        """Leave the reservations of an earlier process, which has numbered so many batches."""
        if not self.setup.first_seq:
            return
        reservations = SeqReservations(self.directory)
        for rank, endpoint in enumerate(self.out):
            reservations.add(0, rank, f"routers {endpoint}")
            reservations.use(0, rank, self.setup.first_seq)
        reservations.release()

    def _configuration(self) -> Path:
        setup = self.setup
        path = self.directory / "kvbus.yaml"
        source = {
            "name": "engine",
            "endpoint": self.live[0],
            "replay_endpoint": self.replay[0],
            "data_parallel_size": setup.ranks,
        }
        output = {"name": "routers", "endpoint": self.out[0], "replay_endpoint": self.out_replay[0]}
        state = str(self.directory / "state") if setup.state_dir else None
        settings = {"sources": [source], "outputs": [output], "http": self.http, "state_dir": state, **setup.kvbus}
        path.write_text(json.dumps(settings))  # JSON is YAML
        return path

    def _answers(self, process: subprocess.Popen[bytes], log: Path) -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"kvbus ended: {log.read_text()[-2000:]}")
        try:
            self.get("/readyz")
        except OSError:
            return False
        return True


@contextlib.contextmanager
def running(setup: Setup, before: Callable[[Child], object] | None = None) -> Iterator[Running]:
    """Start all processes of a setup; they are ended, and their files removed, when the block ends.

    ``before`` sees the relay before anything has been sent to it.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbus-bench-")))
        yield Running(setup, directory, stack).start(before)


def with_a_cache(setup: Setup) -> Setup:
    """The same, of a load whose cache fills first before the clock starts."""
    warm = load_named(setup.load).warm
    return replace(setup, batches=warm + setup.batches, prefill=warm)


LEAST: Final = 0.98
"""Share of a recording's batches that leaves kvbus: of copies nothing is left."""


def check_batches(setup: Setup, result: Result) -> None:
    """Every batch came to every router; of a recording nearly every one, where kvbus is between.

    Raises:
        RuntimeError: some did not.
    """
    least = setup.batches * (LEAST if setup.between == "kvbus" and setup.load in FAMILIES else 1)
    for heard in result.heard:
        if not least <= heard.batches <= setup.batches:
            raise RuntimeError(f"{setup}: there came {heard}")


def run(setup: Setup) -> Result:
    """One run."""
    with running(setup) as processes:
        result = processes.run()
        if setup.between == "kvbus":
            processes.check_kvbus()
        return result


def percentile(ordered: list[float], share: float) -> float:
    """The value below which ``share`` of the sorted values lie."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
