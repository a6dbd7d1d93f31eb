"""The real daemon as a simulated process. Network, disk and clock are simulated, and all other code is kvbus's own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

from kvbus.common.errors import KvbusError
from kvbus.config import Config, load
from kvbus.daemon.daemon import Daemon
from kvbus.daemon.runtime import EngineSockets, Runtime
from kvbus.transport.dialling import Dialled
from kvbus.transport.reach import Outcome, Stop
from kvbus.transport.zmtp.settings import System
from tests.doubles.bus import change_sources
from tests.vopr.engines import Directory, SimLive, SimRequest
from tests.vopr.network import Network, queued_bytes
from tests.vopr.process import SimLoop
from tests.vopr.schedule import Schedule
from tests.vopr.store import MemoryStore, Platter


class SimEngineSockets(EngineSockets):
    """The simulated sockets that connect the daemon to simulated engines. No source has CURVE keys.

    Args:
        directory: finds engines by their addresses.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def subscribe(self, endpoint: str, **options: Any) -> Any:
        return SimLive(self._directory, endpoint, options["events"])

    def request(self, endpoint: str, *args: Any, **_: Any) -> Any:
        return SimRequest(self._directory, endpoint, *args)

    async def close(self) -> None:
        """Do nothing, because there is no ZeroMQ context to terminate."""


@contextlib.asynccontextmanager
async def _refused(endpoint: str, *_: Any, **__: Any) -> AsyncIterator[Dialled]:
    """Yield the result of a diagnostic connection attempt: nothing listens at the endpoint."""
    yield Dialled(Outcome(endpoint, Stop.REFUSED))


def loop_time() -> float:
    """Return the time of the event loop of the running process, in seconds."""
    return asyncio.get_running_loop().time()


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Disable logging until the ``with`` block ends, because a simulation would log as much as many real daemons."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


class Setup:
    """The configuration of a world, chosen by its seed.

    Args:
        chance: random numbers of the seed.
    """

    def __init__(self, chance: random.Random) -> None:
        kinds = ["replay", "replay", "replay", "replay", "snapshot", "deaf"]
        self.engines = [chance.choice(kinds) for _ in range(chance.choice([1, 2, 2, 3]))]
        self.ranks = [1, 2, 3] if len(self.engines) == 3 else [0] * len(self.engines)
        """The rank that each engine sends in its batches. The configuration says 0 for every source."""
        self.block_size: int | None = chance.choice([None, None, 1])
        """Block size in tokens that kvbus announces. The engines have blocks of 2 tokens."""
        self.most = chance.choice([8, 64, 4095])
        """Maximum number of blocks that kvbus sends in one batch of a state."""
        self.rotate = chance.choice([3_000, 30_000])
        self.ahead = chance.choice([8, 64, 64, 4096])
        self.buffer = chance.choice([5, 30, 300])
        self.hwm = chance.choice([20, 1000])
        self.settings: dict[str, Any] = {
            "http": None,
            "state_dir": chance.choice([None, "/state", "/state"]),
            "state_sync": chance.choice(["none", "none", "batch"]),
            "block_size": self.block_size or "auto",
            "source_timeout": chance.choice([3.0, 30.0]),
            "on_lost": "clear",
            "reorder_batches": chance.choice([10, 20_000]),
        }
        output = {
            "journal_batches": chance.choice([2, 20, 10_000]),
            "send_hwm": chance.choice([5, 10_000]),
            "send_bytes": chance.choice([2_000, 1 << 20]),
            "queue_batches": chance.choice([3, 10_000, 10_000]),
        }
        self.outputs = [
            {"name": "each", "endpoint": "tcp://*:6000", "replay_endpoint": "tcp://*:7000", **output},
        ]
        if chance.random() < 0.5:
            self.outputs.append(
                {
                    "name": "all",
                    "endpoint": "tcp://*:8000",
                    "replay_endpoint": "tcp://*:8001",
                    "layout": "merged",
                    "profile": "dynamo",
                    **output,
                }
            )

        self.ranks_named: Literal["fixed", "late"] = chance.choice(["fixed", "late"])
        """Whether each batch of an engine names the rank, or only the batches from a certain seq on."""

    def config(self, sources: list[int], *, elsewhere: bool = False) -> Config:
        """Return a configuration with these engines as sources.

        With ``elsewhere``, its outputs have other addresses.
        """
        moved = ("tcp://*:", "tcp://*:1") if elsewhere else ("", "")
        return load(
            None,
            env={},
            overrides={
                **self.settings,
                "sources": [self._source(number) for number in sources],
                "outputs": [{key: _moved(value, *moved) for key, value in each.items()} for each in self.outputs],
            },
        )

    def _source(self, number: int) -> dict[str, Any]:
        host = f"tcp://engine{number}"
        source: dict[str, Any] = {"name": f"engine{number}", "endpoint": f"{host}:5557", "slot": number}
        if self.engines[number] != "deaf":
            source["replay_endpoint"] = f"{host}:5558"
        if self.engines[number] == "snapshot":
            source["snapshot_endpoint"] = f"{host}:5559"
        return source

    def endpoints(self, output: int, slot: int) -> tuple[str, str]:
        """Return the live endpoint and the replay endpoint of a stream."""
        return (f"tcp://*:{6000 + slot}", f"tcp://*:{7000 + slot}") if output == 0 else ("tcp://*:8000", "tcp://*:8001")


def _moved(value: Any, old: str, new: str) -> Any:
    return value.replace(old, new) if old and isinstance(value, str) else value


class Bus:
    """A simulated machine on which a kvbus daemon can be started, stopped and killed.

    Args:
        schedule: the schedule of the world.
        network: the network of the world.
        directory: finds engines by their addresses.
        setup: the configuration of the world.
        failed: called with each unhandled exception.
    """

    def __init__(self, schedule: Schedule, network: Network, directory: Directory, setup: Setup, failed: Any) -> None:
        self.schedule, self.network, self.setup, self._failed = schedule, network, setup, failed
        self._runtime = Runtime(
            wall_clock=schedule.wall,
            stopwatch=loop_time,
            random_bytes=schedule.chance("the bus").randbytes,
            open_store=self._open_store,
            engine_sockets=lambda: SimEngineSockets(directory),
            dial=_refused,
            system=System(network.bind, queued_bytes),
            state_batch_blocks=setup.most,
        )
        self.platter = Platter(schedule.chance("disk"))
        self.platter.killed = self.kill
        self.platter.spent = self._spend
        self.sources = list(range(len(setup.engines)))
        self.loop: SimLoop | None = None
        self.daemon: Daemon | None = None
        self.refused = 0
        """Number of times that a daemon refused to start."""
        self._changing: set[asyncio.Task[None]] = set()
        self.after_turn: Any = lambda: None

    @property
    def running(self) -> bool:
        """Whether the daemon is running and has finished its start."""
        return self.loop is not None and self.daemon is not None and self.daemon.started

    def start(self) -> None:
        """Start a simulated kvbus process unless one is running."""
        if self.loop is None:
            self.network.begin_numbering()
            self.loop = SimLoop(self.schedule, self._failed)
            self.loop.after_turn = self.after_turn
            self.loop.call_soon(self._boot, self.loop)

    def _boot(self, loop: SimLoop) -> None:
        try:
            self.daemon = Daemon(self.setup.config(self.sources), runtime=self._runtime)
        except KvbusError:
            self.refused += 1
            loop.call_soon(self._gone, loop)
            return
        loop.create_task(self._serve(loop, self.daemon))

    def _open_store(self, config: Config) -> MemoryStore:
        setup = self.setup
        return MemoryStore(self.platter, config, checkpoint_after=setup.rotate, reserve_ahead=setup.ahead)

    def _spend(self, seconds: float) -> None:
        if self.loop is not None:
            self.loop.spend(seconds)

    async def _serve(self, loop: SimLoop, daemon: Daemon) -> None:
        try:
            await daemon.start()
        except KvbusError:
            self.refused += 1
            loop.call_soon(self._gone, loop)

    def _gone(self, loop: SimLoop) -> None:
        loop.kill()
        if self.loop is loop:
            self.platter.let_go()
            self.loop = self.daemon = None
            self._changing.clear()

    def second(self, *, elsewhere: bool) -> bool:
        """Start a second daemon process with the state directory of the first, and return whether it starts, which
        is a defect.

        Args:
            elsewhere: whether the outputs of the second process have other addresses.
        """
        loop = SimLoop(self.schedule, self._failed)
        config = self.setup.config(self.sources, elsewhere=elsewhere)
        try:
            with loop.running():
                second = Daemon(config, runtime=self._runtime)
                starting = second.start()
                with contextlib.suppress(StopIteration):
                    starting.send(None)
        except KvbusError:
            return False
        finally:
            loop.kill()
        return True

    def kill(self) -> None:
        """Kill the daemon process, as SIGKILL does."""
        if self.loop is not None:
            self._gone(self.loop)

    def stop(self) -> None:
        """Stop the daemon process, as SIGTERM does."""
        if self.loop is not None and self.daemon is not None and self.daemon.started:
            self.daemon.started, daemon = False, self.daemon
            loop = self.loop
            loop.call_soon(lambda: loop.create_task(self._close(loop, daemon)))

    async def _close(self, loop: SimLoop, daemon: Daemon) -> None:
        daemon.started = True
        for task in list(self._changing):
            task.cancel()
        await daemon.close()
        loop.call_soon(self._gone, loop)

    def change_sources(self) -> None:
        """Change the daemon's sources to the engines in `sources`, as discovery does."""
        if self.running and self.loop is not None and self.daemon is not None:
            self.loop.call_soon(self._begin_change, self.loop, self.daemon)

    def _begin_change(self, loop: SimLoop, daemon: Daemon) -> None:
        async def change() -> None:
            with contextlib.suppress(KvbusError):
                await change_sources(daemon, self.setup.config(self.sources))

        task = loop.create_task(change())
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)
