"""`kvbus run` as a separate process that tests start, query over HTTP, stop, kill and restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import IO, Any, Self

import uvloop

from kvbus.common.errors import ExitCode
from kvbus.transport.engine.publisher import EnginePublisher
from tests.children import Watch
from tests.doubles.bus import eventually
from tests.doubles.socket_routers import RouterOnASet
from tests.ports import free_port, free_ports, ports_in_a_row


class Program:
    """A kvbus command that a test can run several times. A signal goes only to the newest process of this object.

    Args:
        directory: directory of the log file, the standard output, the state and the runtime files.
        args: command line after ``python -m kvbus``.
        name: name of the log file.
    """

    def __init__(self, directory: Path, *args: str, name: str = "kvbus") -> None:
        self.log = directory / f"{name}.log"
        self.args = args
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")}
        self.env |= {"XDG_RUNTIME_DIR": str(directory), "STATE_DIRECTORY": str(directory)}
        self.version = "kvbus"
        """The module that ``python -m`` runs, followed by arguments that stand before `args`."""
        self._out = directory / f"{name}.out"
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: Watch | None = None

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", *self.version.split(), *self.args]

    def start(self, before: Callable[[], None] | None = None) -> None:
        """Start a process. The child process calls ``before`` before it executes the program."""
        with self.log.open("ab") as log, self._out.open("ab") as out:
            self._process = subprocess.Popen(
                self.command,
                env=self.env,
                stdout=out,
                stderr=log,
                preexec_fn=before,  # noqa: PLW1509
                process_group=0,
            )
        self._watch = Watch(self._process.pid)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The most recently started process, which may have ended."""
        assert self._process is not None
        return self._process

    @property
    def running(self) -> subprocess.Popen[bytes]:
        """The most recently started process. The test fails if that process has ended."""
        assert self.process.poll() is None, f"kvbus ended by itself:\n{self.said}"
        return self.process

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def said(self) -> str:
        """The log output of all processes that this object has started."""
        return self.log.read_text()

    @property
    def printed(self) -> str:
        """The standard output of all processes that this object has started."""
        return self._out.read_text()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, wait until the process ends, and return its exit code."""
        self.signal(number)
        return self.ended()

    def signal(self, number: signal.Signals) -> None:
        self.running.send_signal(number)

    def ended(self, patience: float = 60) -> int:
        """Wait until the process ends, and return its exit code. This blocks the event loop."""
        code = self.process.wait(patience)
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        return code

    async def ends(self, patience: float = 60) -> int:
        """Wait for the end of the process, without blocking the event loop, and return the exit code."""
        await eventually(lambda: self.process.poll() is not None, f"the end: {self.said}", patience)
        return self.ended()

    def close(self) -> None:
        """Kill the process if it is running."""
        if self._process is not None:
            self._process.kill()  # kill() does nothing if the process has ended
            self.ended()


class KvbusProcess(Program):
    """`kvbus run` with a configuration that a test may change between two starts.

    Args:
        directory: directory of the configuration, the log file and the runtime files.
        config: kvbus's configuration. ``http`` is a free loopback port by default.
    """

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self.directory = directory
        self.config = {"http": f"127.0.0.1:{free_port()}", **config}
        super().__init__(directory, "run", "-c", str(self.file))

    @property
    def http(self) -> str:
        """Host and port of kvbus's HTTP server."""
        return str(self.config["http"])

    @property
    def file(self) -> Path:
        return self.directory / "kvbus.yaml"

    def write(self) -> None:
        """Write kvbus's configuration to its file, which the next start reads."""
        self.file.write_text(json.dumps(self.config))  # JSON is YAML

    def start(self, before: Callable[[], None] | None = None) -> None:
        self.write()
        super().start(before)

    @property
    def pid(self) -> int:
        return self.running.pid

    def get(self, path: str) -> bytes:
        """Return the body of an HTTP GET.

        Return an empty body if kvbus does not listen yet, or answers with an error.
        """
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=60) as answer:
                return bytes(answer.read())
        except (urllib.error.URLError, ConnectionError):
            return b""

    def ready(self) -> bool:
        """Return whether kvbus answers `/readyz` with success.

        Raises:
            AssertionError: the kvbus process has ended.
        """
        return bool(self.running and self.get("/readyz"))

    def sources(self) -> list[dict[str, Any]]:
        """Return what kvbus's `/sources` shows: one row for each source."""
        said: list[dict[str, Any]] = json.loads(self.get("/sources") or b"[]")
        return said

    def metric(self, sample: str) -> float:
        """Return the value of one sample of `/metrics`.

        ``sample`` is the metric's name with its labels in alphabetical order.
        """
        lines = self.get("/metrics").decode().splitlines()
        found = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{sample} ")]
        assert found, f"no {sample} in /metrics"
        return float(found[0])

    def pause(self) -> None:
        """Stop the process with SIGSTOP, to simulate a node without a free CPU core."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def terminate(self) -> int:
        """Send SIGTERM, wait until the process ends, and return its exit code."""
        return self.end()

    def kill(self) -> None:
        self.end(signal.SIGKILL)


class Process(KvbusProcess):
    """`kvbus run` with the ranks of one engine as its sources. The endpoint attributes are the endpoints of rank 0."""

    def __init__(self, directory: Path, *, keeps_state: bool, ranks: int = 1, replay_timeout: float = 2.0) -> None:
        self._ports = [ports_in_a_row(ranks) for _ in range(4)]
        self.engine, self.engine_replay, self.out, self.out_replay = self.endpoints(0)
        source = {"name": "engine", "endpoint": self.engine, "replay_endpoint": self.engine_replay}
        config = {
            "sources": [source | {"data_parallel_size": ranks}],
            "outputs": [{"endpoint": self.out, "replay_endpoint": self.out_replay, "heartbeat": 0.2}],
            "state_dir": str(directory / "state") if keeps_state else None,
            "probe_interval": 0.2,
            "replay_timeout": replay_timeout,
        }
        super().__init__(directory, config)

    def endpoints(self, rank: int) -> list[str]:
        """Return four endpoints of a rank: the engine's live stream and replay, then the output's live stream and
        replay.
        """
        return [f"tcp://127.0.0.1:{port + rank}" for port in self._ports]


class QuickProcess(Process):
    """A `Process` that starts within milliseconds. A helper process has imported every module and forks it.

    A normal start takes 500 ms. The process writes a checkpoint after 64 KiB of write-ahead log instead of 128 MiB, so
    that some kills interrupt the writing of a checkpoint.
    """

    def __init__(self, directory: Path, *, keeps_state: bool) -> None:
        super().__init__(directory, keeps_state=keeps_state)
        self.write()
        with self.log.open("ab") as log:
            self._nursery: subprocess.Popen[str] = subprocess.Popen(
                [sys.executable, "-m", "tests.doubles.nursery", str(self.file), str(64 * 1024)],
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def start(self, before: Callable[[], None] | None = None) -> None:
        assert before is None
        assert self._told("start") == "started\n"

    def kill(self) -> None:
        assert self._told("kill") == f"{signal.SIGKILL.value}\n", f"kvbus ended by itself:\n{self.log.read_text()}"

    def exhaust(self) -> None:
        """Raise MemoryError in kvbus's main thread, at whatever instruction it executes."""
        assert self._told("exhaust") == f"-{ExitCode.INTERNAL.value}\n", self.log.read_text()

    def close(self) -> None:
        """End the helper process that forks kvbus. This also kills the running kvbus."""
        with self._nursery:
            _pipe(self._nursery.stdin).close()
            self._nursery.wait(60)

    def _told(self, what: str) -> str:
        _pipe(self._nursery.stdin).write(f"{what}\n")
        _pipe(self._nursery.stdin).flush()
        return _pipe(self._nursery.stdout).readline()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def run_async(main: Any) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


class Place:
    """Endpoints on free ports, and a configuration of kvbus that uses them."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        ports = free_ports(5)
        self.directory = directory
        self.file = directory / "kvbus.yaml"
        self.engine, self.engine_replay, self.out, self.out_replay = (f"tcp://127.0.0.1:{port}" for port in ports[:4])
        self.http = f"127.0.0.1:{ports[4]}"
        self.config = {
            "sources": [{"endpoint": self.engine, "replay_endpoint": self.engine_replay}],
            "outputs": [{"endpoint": self.out, "replay_endpoint": self.out_replay, "heartbeat": 0}],
            "http": self.http,
            "probe_interval": 0.2,
            "log_format": "text",
            "state_dir": None,
            **settings,
        }

    def write(self) -> None:
        """Write kvbus's configuration to its file, which the next start reads."""
        self.file.write_text(json.dumps(self.config))  # JSON is YAML

    def kvbus(self) -> Program:
        """Return a `kvbus run` with this configuration. Used as a context manager, it starts and ends the process."""
        self.write()
        return Program(self.directory, "run", "-c", str(self.file))

    def get(self, path: str) -> tuple[int, str]:
        """Return the status and body of an HTTP GET. The status is 0 if kvbus does not listen."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    async def ready(self, bus: Program) -> None:
        def there() -> bool:
            return bool(bus.running and self.get("/readyz")[0] == 200)

        await eventually(there, "a bus that is ready")

    async def subscribed(self) -> None:
        """Wait until a router has subscribed to the output. No router gets a batch that was published earlier."""
        there = 'kvbus_output_subscribers{output="routers"} 1.0'
        await eventually(lambda: there in self.get("/metrics")[1], "a router's subscription")

    def sources(self) -> list[dict[str, Any]]:
        return list(json.loads(self.get("/sources")[1]))


@contextlib.asynccontextmanager
async def engine_at(place: Place) -> AsyncIterator[EnginePublisher]:
    async with EnginePublisher(place.engine, place.engine_replay, bind=True) as engine:
        await engine.wait_for_subscriber(60)
        yield engine


@contextlib.contextmanager
def router_at(place: Place) -> Iterator[RouterOnASet]:
    router = RouterOnASet(place.out, place.out_replay)
    router.subscribe()
    try:
        yield router
    finally:
        router.close()
