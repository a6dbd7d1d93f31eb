"""`kvbus run` as a process of its own: started, asked over HTTP, stopped, killed and started again."""

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


class KvbusProcess:
    """One process after the other, on the same configuration and directory.

    Args:
        directory: for the configuration, the log and the runtime directory.
        config: of kvbus; ``http`` is a free port of loopback unless given.
    """

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self.directory = directory
        self.config = {"http": f"127.0.0.1:{free_port()}", **config}
        self.log = directory / "kvbus.log"
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")}
        self.env["XDG_RUNTIME_DIR"] = str(directory)
        self.version = "kvbus"
        """What ``python -m`` runs."""
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: Watch | None = None

    @property
    def http(self) -> str:
        """Host and port of the HTTP server."""
        return str(self.config["http"])

    @property
    def file(self) -> Path:
        return self.directory / "kvbus.yaml"

    def write(self) -> None:
        """Write the configuration."""
        self.file.write_text(json.dumps(self.config))  # JSON is YAML

    def start(self, before: Callable[[], None] | None = None) -> None:
        """Start a process; it calls ``before`` before everything else."""
        self.write()
        command = [sys.executable, "-m", *self.version.split(), "run", "-c", str(self.file)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=self.env,
                stdout=log,
                stderr=log,
                preexec_fn=before,  # noqa: PLW1509
                process_group=0,
            )
        self._watch = Watch(self._process.pid)

    @property
    def running(self) -> subprocess.Popen[bytes]:
        """The process, which has not ended."""
        assert self._process is not None
        assert self._process.poll() is None, f"kvbus ended by itself:\n{self.said}"
        return self._process

    @property
    def said(self) -> str:
        """The log of every process so far."""
        return self.log.read_text()

    @property
    def pid(self) -> int:
        return self.running.pid

    def get(self, path: str) -> bytes:
        """Return the answer to a path, or nothing if kvbus does not listen yet or refuses."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=60) as answer:
                return bytes(answer.read())
        except (urllib.error.URLError, ConnectionError):
            return b""

    def ready(self) -> bool:
        """Whether kvbus says that it is ready; an error if it has ended."""
        return bool(self.running and self.get("/readyz"))

    def sources(self) -> list[dict[str, Any]]:
        """Return what `/sources` says."""
        said: list[dict[str, Any]] = json.loads(self.get("/sources") or b"[]")
        return said

    def metric(self, sample: str) -> float:
        """Return one sample of `/metrics`, by its name and labels in the order of the alphabet."""
        lines = self.get("/metrics").decode().splitlines()
        found = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{sample} ")]
        assert found, f"no {sample} in /metrics"
        return float(found[0])

    def signal(self, number: signal.Signals) -> None:
        self.running.send_signal(number)

    def pause(self) -> None:
        """Stop it where it stands, as a node without a free core does."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def terminate(self) -> int:
        """Send SIGTERM and return the exit code."""
        process = self.running
        process.terminate()
        return self._ended(process)

    def kill(self) -> None:
        process = self.running
        process.kill()
        self._ended(process)

    def _ended(self, process: subprocess.Popen[bytes]) -> int:
        code = process.wait(60)
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        return code

    def close(self) -> None:
        """Kill the process if it still runs."""
        if self._process is not None:
            self._process.kill()  # does nothing to one that has ended
            self._ended(self._process)


class Process(KvbusProcess):
    """`kvbus run` on the ranks of one engine; the endpoints are those of rank 0."""

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
        """Of the engine, of its replay, of the output and of its replay."""
        return [f"tcp://127.0.0.1:{port + rank}" for port in self._ports]


class QuickProcess(Process):
    """The same, forked off a process that has imported everything: a start takes milliseconds instead of half a second.

    A checkpoint is due after 64 KiB of log instead of 128 MiB, so that kills meet checkpoints that are being written.
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
        """Let it run out of memory, at whatever it is doing."""
        assert self._told("exhaust") == f"-{ExitCode.INTERNAL.value}\n", self.log.read_text()

    def close(self) -> None:
        """End the process that the others are forked off, and the last of them with it."""
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


@contextlib.contextmanager
def killed_at_the_end(process: Process) -> Iterator[Process]:
    process.start()
    try:
        yield process
    finally:
        process.kill()


def run_async(main: Any) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


class Command:
    """One ``kvbus`` process; ended by its own id, whatever happens. What it says is in `said`."""

    def __init__(self, directory: Path, *args: str, name: str = "kvbus") -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("KVBUS_")}
        env["XDG_RUNTIME_DIR"] = str(directory)  # marks of the numbering are kept there
        env["STATE_DIRECTORY"] = str(directory)
        self._log = directory / f"{name}.log"
        self._out = directory / f"{name}.out"
        with self._log.open("wb") as log, self._out.open("wb") as out:
            self.process = subprocess.Popen([sys.executable, "-m", "kvbus", *args], env=env, stderr=log, stdout=out)

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def printed(self) -> str:
        return self._out.read_text()

    def ended(self, patience: float = 60) -> int:
        return self.process.wait(patience)

    async def ends(self, patience: float = 60) -> int:
        await eventually(lambda: self.process.poll() is not None, f"the end: {self.said}", patience)
        return self.process.wait(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)


class Place:
    """Endpoints on free ports, and the configuration of a bus on them."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        ports = free_ports(5)
        self.directory = directory
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

    def start(self) -> Command:
        file = self.directory / "kvbus.yaml"
        file.write_text(json.dumps(self.config))  # JSON is YAML
        return Command(self.directory, "run", "-c", str(file))

    def get(self, path: str) -> tuple[int, str]:
        """Status and body; 0 while nobody answers."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    async def ready(self, command: Command) -> None:
        def there() -> bool:
            assert command.process.poll() is None, command.said
            return self.get("/readyz")[0] == 200

        await eventually(there, "a bus that is ready")

    async def subscribed(self) -> None:
        """Until then what is published goes to nobody."""
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
