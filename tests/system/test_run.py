"""``kvbus run`` as a supervisor runs it: signals, exit codes, probes, and whole captures through one bus."""

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
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
import uvloop
import zmq

from kvbus.core.wire.frames import ASKS_REPLAY
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.doubles.router import Block, PlainSetRouter
from tests.doubles.socket_routers import RouterOnASet
from tests.long import sample
from tests.ports import free_ports, ports_in_a_row
from tests.wire.captures import BY_PREFIX, CAPTURES, DATA, load, matches_truth


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


# -- ends

PATIENT = 200
"""Seconds that routers get at the end: a loaded machine passes 30 MB on through small buffers in many turns."""


class Stalled:
    """A router that reads nothing until it is told to: what is published for it piles up in kvbus."""

    def __init__(self, place: Place) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.socket.setsockopt(zmq.RCVBUF, 4096)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.setsockopt(zmq.SUBSCRIBE, ASKS_REPLAY)
        self.socket.connect(place.out)

    def seqs(self, count: int) -> list[int]:
        """The next so many, read as fast as they come."""
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        return [int.from_bytes(self.socket.recv_multipart()[1], "big") for _ in range(count)]

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


@contextlib.asynccontextmanager
async def with_work_left(place: Place, count: int) -> AsyncIterator[tuple[Command, Stalled]]:
    """A bus that has taken everything in, and a router that has not taken everything out."""
    stalled = Stalled(place)
    try:
        with place.start() as bus:
            await place.ready(bus)
            async with engine_at(place) as engine:
                await place.subscribed()
                for n in range(count):
                    # 20 kB each: more in all than the buffers of two sockets take
                    engine.publish(batch(store([n], tokens=[2**20 + n] * 4000, block_size=4000)))
                await eventually(lambda: place.sources()[0]["last_seq"] == count - 1, "everything taken in")
                yield bus, stalled
    finally:
        stalled.close()


def test_sigterm_ends_in_order_and_routers_get_what_was_queued(tmp_path: Path) -> None:
    async def main() -> None:
        place, count = Place(tmp_path, shutdown_timeout=PATIENT), 600
        async with with_work_left(place, count) as (bus, router):
            bus.process.send_signal(signal.SIGTERM)
            await eventually(lambda: "SIGTERM: shutting down" in bus.said, "the signal heard")
            seqs = await asyncio.to_thread(router.seqs, count)
            assert seqs == list(range(count))
            assert await bus.ends() == 0, bus.said

    run_async(main())


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """The router that never reads keeps the first one's orderly end waiting; the second one does not wait."""

    async def main() -> None:
        async with with_work_left(Place(tmp_path, shutdown_timeout=PATIENT), 600) as (bus, _):
            bus.process.send_signal(signal.SIGTERM)
            await eventually(lambda: "SIGTERM: shutting down" in bus.said, "the signal heard")
            bus.process.send_signal(signal.SIGTERM)
            # killed by the signal and not ended by itself: a supervisor can tell
            assert await bus.ends() == -signal.SIGTERM, bus.said

    run_async(main())


def test_a_stalled_router_does_not_keep_the_end_waiting_for_ever(tmp_path: Path) -> None:
    async def main() -> None:
        async with with_work_left(Place(tmp_path), 600) as (bus, _):
            bus.process.send_signal(signal.SIGINT)
            assert await bus.ends() == 0, bus.said
            assert "SIGINT: shutting down" in bus.said

    run_async(main())


@pytest.mark.parametrize("key", ["outputs.0.endpoint", "outputs.0.replay_endpoint", "http", "sources.0.endpoint"])
def test_a_taken_endpoint_is_named_and_exits_69(tmp_path: Path, key: str) -> None:
    place = Place(tmp_path)
    place.config["sources"][0]["bind"] = key.startswith("sources")
    node: Any = place.config
    for piece in key.split("."):
        node = node[int(piece) if piece.isdigit() else piece]
    context = zmq.Context()
    holder = context.socket(zmq.REP)
    holder.bind(node if "://" in node else f"tcp://{node}")
    try:
        with place.start() as bus:
            assert bus.ended() == 69, bus.said
            assert node in bus.said
            assert "Traceback" not in bus.said
            assert "Address already in use".lower() in bus.said.lower()
    finally:
        holder.close(0)
        context.term()


def test_a_bad_configuration_exits_78_with_every_error(tmp_path: Path) -> None:
    place = Place(tmp_path, on_lost="shrug", source_timeout=-1, blok_size=16)
    place.config["outputs"][0]["endpoint"] = "not an endpoint"
    with place.start() as bus:
        assert bus.ended() == 78, bus.said
        for key in ("on_lost", "source_timeout", "blok_size", "outputs[0].endpoint"):
            assert key in bus.said
        assert "4 problems" in bus.said
        assert "Traceback" not in bus.said


def test_an_undeclared_variable_is_an_error(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("KVBUS_")}
    env["KVBUS_HTPP"] = "127.0.0.1:1"
    done = subprocess.run(
        [sys.executable, "-m", "kvbus", "run", "--source", "tcp://127.0.0.1:1", "--output", "tcp://127.0.0.1:2"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 78
    assert "KVBUS_HTPP" in done.stderr
    assert "KVBUS_HTTP" in done.stderr


# -- life


def test_ready_and_alive_without_an_engine_that_comes_later(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(tmp_path)
        with place.start() as bus, router_at(place) as router:
            await place.ready(bus)
            assert place.get("/livez")[0] == 200
            assert [source["state"] for source in place.sources()] == ["connecting"]
            await place.subscribed()
            messages = load("vllm033_map_int")
            async with engine_at(place) as engine:
                for message in messages:
                    engine.publish(message.payload, seq=message.seq)
                await eventually(lambda: place.sources()[0]["last_seq"] == messages[-1].seq, "everything taken in")
                await eventually(lambda: place.sources()[0]["state"] == "live", "the bus at rest")
                await eventually(
                    lambda: router.read() and not matches_truth("vllm033_map_int", router.view), "the truth"
                )
            await eventually(lambda: place.sources()[0]["state"] == "connecting", "the engine's end noticed")
            # the engine is gone: kvbus is not
            assert place.get("/readyz")[0] == place.get("/livez")[0] == 200
            bus.process.terminate()
            assert await bus.ends() == 0
            assert router.view.violations == []

    run_async(main())


def test_the_one_liner(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(tmp_path)
        flags = ("--source", f"{place.engine},{place.engine_replay}", "--output", f"{place.out},{place.out_replay}")
        with Command(tmp_path, "run", *flags, "--http", place.http) as bus, router_at(place) as router:
            await place.ready(bus)
            await place.subscribed()
            async with engine_at(place) as engine:
                engine.publish(batch(store([1, 2])))
                await eventually(lambda: router.read() and len(router.view.blocks) == 2, "the blocks")
            bus.process.terminate()
            assert await bus.ends() == 0
            lines = [json.loads(line) for line in bus.said.splitlines()]  # no terminal: JSON
            assert all({"level", "message"} <= line.keys() or {"level", "msg"} <= line.keys() for line in lines)

    run_async(main())


# -- every capture through one bus

GROUP = 6
"""Players at a time: each is a process of its own."""


def as_router(lines: Sequence[dict[str, Any]]) -> PlainSetRouter:
    """What ``kvbus dump`` printed, as a router would hold it."""
    router = PlainSetRouter()
    for line in lines:
        name, parent = (bytes.fromhex(h) if isinstance(h, str) else h for h in (line["hash"], line["parent"]))
        tokens = tuple(tuple(t) if isinstance(t, list) else t for t in line["token_ids"])
        medium = line["medium"] or "GPU"
        key = (line["group_idx"], "GPU" if medium == "DEVICE" else medium.upper(), name)
        assert key not in router.blocks, f"{key} twice in one dump"
        router.blocks[key] = Block(parent, tokens)
    return router


@pytest.mark.slow
def test_every_capture_played_by_a_process_dumps_as_the_truth(tmp_path: Path) -> None:
    async def main() -> None:
        captures = sorted({*sample(CAPTURES, 8), *BY_PREFIX})
        count = len(captures)
        first = ports_in_a_row(4 * count + 1)
        live, replay, out, out_replay = (f"tcp://127.0.0.1:{first + kind * count}" for kind in range(4))
        at = {
            name: [f"{e.rpartition(':')[0]}:{int(e.rpartition(':')[2]) + i}" for e in (live, replay)]
            for i, name in enumerate(captures)
        }
        place = Place(
            tmp_path,
            sources=[{"name": name, "endpoint": e, "replay_endpoint": r} for name, (e, r) in at.items()],
            outputs=[{"endpoint": out, "replay_endpoint": out_replay, "heartbeat": 0}],
            source_timeout=300,
        )
        place.http = place.config["http"] = f"127.0.0.1:{first + 4 * count}"
        with place.start() as bus:
            await place.ready(bus)
            for group in range(0, count, GROUP):
                names = captures[group : group + GROUP]
                with contextlib.ExitStack() as stack:
                    players: list[Command] = []
                    for name in names:
                        where = ("--endpoint", at[name][0], "--bind", "--replay-endpoint", at[name][1])
                        more = ("--rate", "4000", "--subscribers", "1", "--drop", "0.03", "--seed", "7")
                        player = Command(
                            tmp_path, "play", str(DATA / f"{name}.jsonl"), *where, *more, name=f"play-{name}"
                        )
                        players.append(stack.enter_context(player))

                    def done(names: Sequence[str] = names, players: Sequence[Command] = players) -> bool:
                        for one in (bus, *players):
                            assert one.process.poll() is None, one.said
                        sources = {source["name"]: source for source in place.sources()}
                        return all(
                            sources[name]["last_seq"] == load(name)[-1].seq and sources[name]["state"] == "live"
                            for name in names
                        )

                    await eventually(done, f"{names} played and relayed", 60)
            for group in range(0, count, GROUP):
                names = captures[group : group + GROUP]
                with contextlib.ExitStack() as stack:
                    dumps = {
                        name: stack.enter_context(
                            Command(
                                tmp_path,
                                "dump",
                                f"tcp://127.0.0.1:{first + 3 * count + captures.index(name)}",
                                name=f"dump-{name}",
                            )
                        )
                        for name in names
                    }
                    for name, dump in dumps.items():
                        assert await dump.ends(60) == 0, dump.said
                        assert "warning" not in dump.said
                        found = as_router([json.loads(line) for line in dump.printed.splitlines()])
                        assert found.blocks
                        assert matches_truth(name, found) is None
            # what a bus that is busy asks for at its beginning was never missing: not each source has found a hole
            assert any(source["counts"]["recovered"] for source in place.sources())
            for source in place.sources():
                counts = source["counts"]
                assert counts["missing"] == counts["recovered"] + counts["lost"]
                # only what a life took with it is lost: batches nobody had asked for when the engine restarted
                assert not counts["lost"] or counts["restarts"]
                assert counts["rejected"] == {}
            bus.process.terminate()
            assert await bus.ends() == 0, bus.said

    assert set(CAPTURES) >= BY_PREFIX
    run_async(main())
