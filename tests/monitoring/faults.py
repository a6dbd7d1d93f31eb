"""The set-up of the tests with a real Prometheus: kvbus processes with faults, and the alerts that these must cause.

Each source of the faulty kvbus has its own engine, which does one thing wrong for the complete scene. Therefore each
alert has one cause, and an unexpected alert is an error. One kvbus has no faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.auth import create_certificates, load_certificate

from kvbus.config import RedisKeys
from kvbus.parts.log.follower import LEASE
from kvbus.parts.log.location import RedisLocation
from kvbus.parts.log.record import SCHEMA, Stream
from kvbus.parts.log.redis import RedisLog
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles import replay_faults
from tests.doubles.bus import eventually
from tests.doubles.kvbus_process import KvbusProcess
from tests.doubles.payloads import payload, removed, store
from tests.log.records import checked, lease
from tests.monitoring.prometheus import Prometheus
from tests.ports import free_port, free_ports, ports_in_a_row

SCRAPE: Final = 1.0
"""Seconds between two scrapes of Prometheus, and the maximum duration of one scrape."""
PATIENCE: Final = 180.0
"""Seconds after which the test fails if an expected alert does not fire.

On an idle machine all fire within a minute.
"""
WRONG: Final = ("flaky", "lossy", "restarting", "garbled", "mute", "silent", "untitled")
"""Sources of the faulty kvbus whose engines do something wrong. ``steady`` has no fault, ``absent`` has no engine."""
KVBUS: Final = ("healthy", "faulty", "stuck", "starved", "restarted", "stateful", "remote", "writing", "reading")

OTHER: Final = "other"
"""Key prefix of a second log in Redis, whose only writer stops writing."""

Alert = tuple[str, ...]
"""An expected alert: its name, the name of the kvbus, and the source, output or queue that it is about.

Of a finding also its id.
"""

OF_FINDINGS: Final = frozenset({"KvbusFinding", "KvbusNote"})
"""Alerts that fire for every finding. The faults cause more findings than those that are expected here."""

EXPECTED: Final[frozenset[Alert]] = frozenset(
    {
        ("KvbusGaps", "faulty", "flaky"),
        ("KvbusBatchesLost", "faulty", "lossy"),
        ("KvbusPartial", "faulty", "lossy"),
        ("KvbusEngineRestarts", "faulty", "restarting"),
        ("KvbusEventsRejected", "faulty", "garbled"),
        ("KvbusPartial", "faulty", "garbled"),
        ("KvbusReplayFailing", "faulty", "mute"),
        ("KvbusSourceSilent", "faulty", "silent"),
        ("KvbusSourceDown", "faulty", "absent"),
        ("KvbusSourceConflict", "faulty", "twofold"),
        # Each change between the two publishers first counts as a restart.
        ("KvbusEngineRestarts", "faulty", "twofold"),
        ("KvbusEventsRejected", "faulty", "twofold"),
        ("KvbusPartial", "faulty", "twofold"),
        ("KvbusSlowRouter", "faulty", "slow"),
        ("KvbusRouterBehind", "faulty", "slow"),
        ("KvbusOutputOverflow", "faulty", "narrow"),
        ("KvbusNoRouter", "faulty", "narrow"),
        ("KvbusReplayRefused", "faulty", "routers"),
        ("KvbusGapOpen", "stuck", "engine"),
        ("KvbusNearLimit", "stuck", "engine"),
        ("KvbusHandshakesFailed", "faulty", "locked"),
        ("KvbusNoRouter", "faulty", "locked"),
        ("KvbusLogLags", "remote", "streams"),
        ("KvbusNoRouter", "remote", "routers"),  # kvbus does not serve streams that it cannot read
        ("KvbusLogFenced", "writing", "log"),
        ("KvbusLogStateOverdue", "writing", "away"),
        ("KvbusHandshakesFailed", "writing", "away"),
        ("KvbusNoRouter", "writing", "away"),
        ("KvbusLogUnreadable", "reading", "streams"),
        ("KvbusLogSilent", "reading", "streams"),
        ("KvbusFinding", "faulty", "untitled", "topic"),
        ("KvbusFinding", "faulty", "discovery_fails"),
        ("KvbusFinding", "faulty", "engine_left_out"),
        ("KvbusFinding", "remote", "discovery_fails"),
        ("KvbusFinding", "stuck", "reload_refused"),
        ("KvbusLoopLag", "starved"),
        ("KvbusRestarts", "restarted"),
        ("KvbusDown", "restarted"),
        ("KvbusStateRefused", "stateful"),
        ("KvbusStateNotWritten", "stateful"),
    }
)

_counter: Final = itertools.count(1)


def batch(blocks: int = 1) -> bytes:
    """Return a batch whose blocks no other batch has."""
    first = next(_counter) * 1000
    return payload(store(list(range(first, first + blocks))), ts=time.time())


def publish_one(engine: EnginePublisher) -> None:
    engine.publish(batch())


class Kvbus(KvbusProcess):
    """A kvbus process of the test, with an output of its own."""

    def __init__(
        self, directory: Path, name: str, outputs: list[dict[str, Any]] | None = None, **settings: Any
    ) -> None:
        self.name = name
        (directory / name).mkdir()
        self.out, self.out_replay = (f"127.0.0.1:{port}" for port in free_ports(2))
        routers = {"name": "routers", "endpoint": f"tcp://{self.out}", "replay_endpoint": f"tcp://{self.out_replay}"}
        merged = [output | {"layout": "merged"} for output in (routers, *(outputs or ()))]
        config = {"outputs": merged, "probe_interval": 0.3, "state_dir": None, **settings}
        super().__init__(directory / name, config)

    def follow(self, *engines: tuple[str, str, str]) -> None:
        """Configure these engines as sources. Each is a tuple of name, live endpoint and replay endpoint."""
        self.config["sources"] = [
            {"name": name, "endpoint": endpoint, "replay_endpoint": replay} for name, endpoint, replay in engines
        ]

    def reload(self, text: str) -> None:
        self.file.write_text(text)
        self.signal(signal.SIGHUP)

    async def stop(self) -> None:
        assert await asyncio.to_thread(self.terminate) == 0, self.said


def scrape_config(rules: Path, buses: list[Kvbus]) -> str:
    """Return the configuration of Prometheus, with the name of each kvbus as its `instance`."""
    return json.dumps(
        {
            "global": {
                "scrape_interval": f"{SCRAPE * 1000:.0f}ms",
                "scrape_timeout": f"{SCRAPE * 1000:.0f}ms",
                "evaluation_interval": "1s",
            },
            "rule_files": [str(rules)],
            "scrape_configs": [
                {
                    "job_name": "kvbus",
                    "static_configs": [{"targets": [bus.http], "labels": {"instance": bus.name}} for bus in buses],
                }
            ],
        }
    )


def damage(state: Path) -> list[Path]:
    """Make every saved state below a directory unusable, and return its files."""
    files = list(state.glob("state.db"))
    for file in files:
        file.write_bytes(b"damaged" + file.read_bytes())
    return files


class Engines:
    """Engines in this process. Each publishes at its own rate until the scene ends."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self, live: str | None = None, replay: str | None = None, *, bind: bool = True) -> EnginePublisher:
        own_live, own_replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
        engine = EnginePublisher(live or own_live, replay or own_replay, bind=bind)
        return await self._stack.enter_async_context(engine)

    def keep(self, doing: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(doing))

    def check(self) -> None:
        for task in self.tasks:
            if task.done():
                task.result()


async def every(seconds: float, act: Callable[[], object]) -> None:
    """Call ``act`` every ``seconds`` seconds until the task is cancelled, for example to publish at a fixed rate."""
    while True:
        act()
        await asyncio.sleep(seconds)


def endpoints(engine: EnginePublisher) -> tuple[str, str]:
    assert engine.replay_endpoint is not None
    return engine.endpoint, engine.replay_endpoint


class Scene:
    """All processes of the test with Prometheus, and the faults that the test causes in them."""

    def __init__(self, directory: Path, stack: contextlib.AsyncExitStack, redis: str) -> None:
        self.directory = directory
        self._redis = redis
        self._log = RedisLog(RedisLocation(redis))
        self._other_log = RedisLog(RedisLocation(redis, RedisKeys(prefix=OTHER)))
        self._silent = asyncio.Event()
        self.engines = Engines(stack)
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self.slow = f"ipc://{directory}/slow"
        faulty_outputs = [
            {"name": "slow", "endpoint": self.slow, "send_hwm": 5},
            {"name": "narrow", "endpoint": f"ipc://{directory}/narrow", "queue_batches": 1},
            self._locked(directory),
        ]
        special: dict[str, dict[str, Any]] = {
            "faulty": {"outputs": faulty_outputs},
            # The replay request stays unanswered for as long as possible, so that the gap outlasts the scene.
            "stuck": {"replay_timeout": 600, "reorder_batches": 50},
            "stateful": {"state_dir": str(directory / "stateful" / "state")},
        }
        self.buses = {name: Kvbus(directory, name, **special.get(name, {})) for name in KVBUS}
        self.lag = 0.0
        """Maximum delay of a timer in this process, in seconds.

        It shows how much the machine's load delays all processes.
        """

    def _locked(self, directory: Path) -> dict[str, Any]:
        """Return the configuration of an output that accepts only routers on an allow-list, which is empty."""
        port = free_port()
        self.locked = f"tcp://127.0.0.1:{port}"
        public, secret = create_certificates(directory, "kvbus")
        Path(secret).chmod(0o600)
        self.locked_key, _ = load_certificate(public)
        (directory / "routers.keys").touch()
        keys = {"curve_secret_key_file": secret, "curve_client_keys": str(directory / "routers.keys")}
        return {"name": "locked", "endpoint": self.locked, **keys}

    async def start(self) -> None:
        """Start the engines, then the buses, then the routers.

        So far only the saved state of one bus is damaged. All other faults begin in :meth:`go_wrong`.
        """
        self.steady = await self.engines.start()
        self.engines.keep(every(0.02, lambda: self.steady.publish(batch(16))))
        self.wrong = {name: await self.engines.start() for name in WRONG}
        self.stuck = await self.engines.start()
        nobody = ports_in_a_row(2)
        absent = ("absent", f"tcp://127.0.0.1:{nobody}", f"tcp://127.0.0.1:{nobody + 1}")
        for name, bus in self.buses.items():
            bus.follow(("engine", *endpoints(self.stuck if name == "stuck" else self.steady)))
        wrong = [(name, *endpoints(engine)) for name, engine in self.wrong.items()]
        self.buses["faulty"].follow(("steady", *endpoints(self.steady)), *wrong, absent)
        for source in self.buses["faulty"].config["sources"]:
            source["topic"] = "kv@" if source["name"] == "untitled" else ""
        self._read_a_log(self.buses["remote"], f"127.0.0.1:{free_port()}")
        self._read_a_log(self.buses["reading"], self._redis, prefix=OTHER)
        await self._write_a_log(self.buses["writing"])
        self.engines.keep(self._fall_silent_in_the_log())
        self.twins = await self._twins(self.buses["faulty"])
        self._discover(self.buses["faulty"])
        await self._damage_state(self.buses["stateful"])
        for bus in self.buses.values():
            bus.start()
        for bus in self.buses.values():
            self._router(f"tcp://{bus.out}", reads=True)
        for name, engine in [*self.wrong.items(), *(("twofold", twin) for twin in self.twins), ("stuck", self.stuck)]:
            try:
                await engine.wait_for_subscriber(60)
            except TimeoutError as error:
                raise AssertionError(f"nobody subscribes to {name}: {self._said()}") from error
        self.engines.keep(self._watch_the_clock())

    def _said(self) -> str:
        return "\n".join(bus.said for bus in self.buses.values() if bus.log.exists())

    def _discover(self, bus: Kvbus) -> None:
        """Add API proxies for an absent engine, and two discovery entries with a fault.

        The first entry cannot be queried. The second finds an engine that is already configured.
        """
        for key, scheme in (("front", "http://"), ("front_grpc", "")):
            here, away = (f"127.0.0.1:{port}" for port in free_ports(2))
            bus.config[key] = {"listen": here, "engine": f"{scheme}{away}", "source": "steady"}
        found = bus.directory / "engines.json"
        found.write_text(json.dumps([{**bus.config["sources"][0], "name": "again"}]))
        for name, path in (("unasked", bus.directory / "nowhere"), ("doubled", found)):
            bus.config["sources"].append({"name": name, "discover": {"file": {"path": str(path)}}})

    async def _write_a_log(self, bus: Kvbus) -> None:
        """Let the bus write to one log that is reachable and to one log that is not."""
        pair = {name: await self.engines.start() for name in ("calm", "quiet")}
        for engine in pair.values():
            self.engines.keep(every(1.0, functools.partial(publish_one, engine)))
        bus.follow(*((name, *endpoints(engine)) for name, engine in pair.items()))
        away = {"endpoint": f"tcp://127.0.0.1:{free_port()}", "redis": {"state_every": 1}}
        bus.config |= {"worker": bus.name, "model": "m"}
        bus.config["outputs"] += [
            {"name": "log", "type": "redis", "endpoint": f"tcp://{self._redis}"},
            {"name": "away", "type": "redis", **away},
        ]

    async def _take_a_stream(self, server: Prometheus) -> None:
        """Become the writer of a log stream that the bus writes, so that the bus loses the stream to another writer."""
        key = Stream("default", "m", "writing/quiet", 0).key
        taken = 'kvbus_output_streams_written{instance="writing", output="log"} == 2'
        await self._until(lambda: server.query(taken), "both streams in the log")
        writer = await self._log.claim(key)
        await writer.close()

    async def _fall_silent_in_the_log(self) -> None:
        """Write leases as the only writer of a log stream, then a record of an unknown schema, and then nothing
        more.
        """
        writer = await self._other_log.claim(Stream("default", "m", "gone/engine", 0).key)
        for seq in itertools.count():
            await writer.append([lease(writer.epoch, seq)])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._silent.wait(), LEASE)
                break
        await writer.append([checked(SCHEMA + 1, None)])
        await writer.close()

    def _read_a_log(self, bus: Kvbus, address: str, **keys: str) -> None:
        """Configure the bus to read its sources only from a log."""
        where = {"endpoint": f"tcp://{address}", **keys}
        bus.config["sources"] = [{"name": "streams", "discover": {"redis": where}}]
        bus.config["discovery_grace"] = 0
        each = {"layout": "per_topic", "topic": "kv@{source}", "replay_endpoint": None}
        bus.config["outputs"] = [output | each for output in bus.config["outputs"]]

    async def _twins(self, bus: Kvbus) -> list[EnginePublisher]:
        """Start two engines that connect to the same endpoint of the bus. Replay requests go to the first engine."""
        live, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
        bus.config["sources"].append({"name": "twofold", "endpoint": live, "replay_endpoint": replay, "bind": True})
        return [
            await self.engines.start(live=live, replay=replay, bind=False),
            await self.engines.start(live=live, bind=False),
        ]

    async def _damage_state(self, bus: Kvbus) -> None:
        bus.start()
        await eventually(bus.ready, "a kvbus that keeps its state")
        await bus.stop()
        assert damage(Path(bus.config["state_dir"]))

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        self._sockets.append(self._context.socket(kind))
        return self._sockets[-1]

    def _router(self, endpoint: str, *, reads: bool, server_key: bytes | None = None) -> None:
        sub = self._socket(zmq.SUB)
        if server_key is not None:
            sub.curve_publickey, sub.curve_secretkey = zmq.curve_keypair()
            sub.curve_serverkey = server_key
        sub.setsockopt(zmq.RCVHWM, 0 if reads else 1)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(endpoint)

        def drain() -> None:
            with contextlib.suppress(zmq.Again):
                while True:
                    sub.recv(zmq.NOBLOCK)

        if reads:
            self.engines.keep(every(0.05, drain))

    async def _watch_the_clock(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.05
            await asyncio.sleep(0.05)
            self.lag = max(self.lag, loop.time() - due)

    def go_wrong(self, server: Prometheus) -> None:
        """Let each faulty engine begin its fault. The name of the engine describes the fault."""
        keep, wrong = self.engines.keep, self.wrong
        turn, other_turn = itertools.count(), itertools.count()

        def flaky() -> None:
            for _ in range(3):  # the first batch is lost, and the second shows the gap
                wrong["flaky"].publish(batch(), live=next(turn) % 3 > 0)

        def lossy() -> None:
            wrong["lossy"].publish(batch())
            if next(other_turn) % 6 == 0:  # rare enough not to fire KvbusGaps
                wrong["lossy"].skip()

        def garbled() -> None:
            wrong["garbled"].publish(
                payload(removed([-next(_counter)]), store([next(_counter) * 1000]), ts=time.time())
            )
            wrong["garbled"].publish(b"\xc1")

        keep(every(0.3, flaky))
        keep(every(0.5, lossy))
        keep(every(0.5, garbled))
        keep(every(0.5, lambda: publish_one(wrong["untitled"])))
        for twin in self.twins:
            keep(every(0.1, functools.partial(publish_one, twin)))
        wrong["mute"].replay_fault = replay_faults.silent
        keep(every(4.0, lambda: wrong["mute"].publish(batch())))
        keep(self._restart_engine(wrong["restarting"]))
        keep(self._fall_silent(wrong["silent"]))
        keep(self._stay_stuck())
        self._router(self.slow, reads=False)
        self._router(self.locked, reads=True, server_key=self.locked_key)
        self.buses["stuck"].reload("sources: none\n")
        keep(self._take_a_stream(server))
        self._silent.set()
        keep(self._ask_malformed())
        keep(self._starve(self.buses["starved"]))
        keep(self._restart(self.buses["restarted"], server))
        keep(self._fill_disk(self.buses["stateful"], server))

    async def _restart_engine(self, engine: EnginePublisher) -> None:
        for _ in range(5):
            for _ in range(4):
                engine.publish(batch())
                await asyncio.sleep(0.3)
            engine.restart(linger=0.1)
            await engine.wait_for_subscriber(60)
        await every(0.3, lambda: engine.publish(batch()))

    async def _fall_silent(self, engine: EnginePublisher) -> None:
        for _ in range(20):
            engine.publish(batch())
            await asyncio.sleep(0.1)

    async def _stay_stuck(self) -> None:
        engine = self.stuck
        for _ in range(5):
            engine.publish(batch())
        engine.replay_fault = replay_faults.silent
        engine.publish(batch(), live=False)
        await every(0.05, lambda: engine.publish(batch()))

    async def _ask_malformed(self) -> None:
        dealer = self._socket(zmq.DEALER)
        dealer.connect(f"tcp://{self.buses['faulty'].out_replay}")
        await every(1.0, lambda: dealer.send_multipart([b"", b"not eight bytes"]))

    async def _starve(self, bus: Kvbus) -> None:
        """Stop the bus's process for every second interval of about 0.3 s, so that it seems to get no CPU."""
        try:
            while True:
                bus.signal(signal.SIGSTOP)
                await asyncio.sleep(0.3)
                bus.signal(signal.SIGCONT)
                await asyncio.sleep(0.3)
        finally:
            bus.signal(signal.SIGCONT)

    async def _restart(self, bus: Kvbus, server: Prometheus) -> None:
        """Restart the bus three times, each time after Prometheus has scraped it, and then end it for good."""
        query = f'process_start_time_seconds{{instance="{bus.name}"}} and up == 1'
        seen: set[float] = set()

        def seen_again() -> bool:
            starts = {value for _, value in server.query(query)} - seen
            seen.update(starts)
            return bool(starts)

        for _ in range(3):
            await self._until(seen_again, "a start seen by Prometheus")
            await bus.stop()
            bus.start()
        await self._until(lambda: ("KvbusRestarts", bus.name) in firing(server), "KvbusRestarts")
        await bus.stop()

    async def _fill_disk(self, bus: Kvbus, server: Prometheus) -> None:
        """Limit the bus's files to 64 KiB, which has the same effect as a full disk."""
        writing = f'kvbus_state_writing{{instance="{bus.name}"}} == 1'
        await self._until(lambda: server.query(writing), "a state that is written")
        resource.prlimit(bus.pid, resource.RLIMIT_FSIZE, (2**16, 2**16))

    async def _until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until a condition holds, as `eventually` does, but run the condition in a thread.

        It may send requests to Prometheus. The thread lets the engines publish while the condition waits for an answer.
        """
        end = asyncio.get_running_loop().time() + PATIENCE
        while not await asyncio.to_thread(condition):
            assert asyncio.get_running_loop().time() < end, f"not within {PATIENCE:g} s: {what}"
            await asyncio.sleep(0.2)

    async def until_watched(self, server: Prometheus) -> None:
        """Wait until Prometheus has scraped every kvbus, because it does not see a counter's increases before its
        first scrape.
        """

        def everyone() -> bool:
            assert all(bus.running for bus in self.buses.values())
            return len(server.query("kvbus_build_info")) == len(self.buses)

        await self._until(everyone, "every kvbus scraped")

    async def until_all_fire(self, server: Prometheus) -> None:
        """Wait until every expected alert has fired."""

        def missing() -> frozenset[Alert]:
            return EXPECTED - fired(server)

        end = asyncio.get_running_loop().time() + PATIENCE
        while left := await asyncio.to_thread(missing):
            self.engines.check()
            assert asyncio.get_running_loop().time() < end, f"did not fire: {sorted(left)}"
            await asyncio.sleep(0.5)
        self.engines.check()

    async def close(self) -> None:
        for task in self.engines.tasks:
            task.cancel()
        await asyncio.gather(*self.engines.tasks, return_exceptions=True)
        for bus in self.buses.values():
            bus.close()
        for socket in self._sockets:
            socket.close(0)
        self._context.term()


def _about(labels: dict[str, str]) -> Alert:
    about = (labels[key] for key in ("source", "output", "discovery", "name", "id") if key in labels)
    return (labels["alertname"], labels["instance"], *about)


def firing(server: Prometheus) -> frozenset[Alert]:
    """Return the alerts that Prometheus fires now."""
    return frozenset(_about(labels) for labels, _ in server.query('ALERTS{alertstate="firing"}'))


def fired(server: Prometheus, at: float | None = None) -> frozenset[Alert]:
    """Return the alerts that have fired in the last ten minutes. All faults of the test together take less time."""
    return frozenset(
        _about(labels) for labels, _ in server.query('max_over_time(ALERTS{alertstate="firing"}[10m])', at)
    )


@contextlib.asynccontextmanager
async def scene(directory: Path, redis: str) -> AsyncIterator[Scene]:
    """Start all processes and yield the set-up. ``redis`` is the address of a Redis server."""
    async with contextlib.AsyncExitStack() as stack:
        played = Scene(directory, stack, redis)
        try:
            await played.start()
            yield played
        finally:
            await played.close()
