"""kvbus is killed again and again under traffic: no seq goes back, and the router ends with the truth."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from kvbus.play import Faults, Publish, Stats, schedule
from kvbus.transport.publisher import EnginePublisher
from tests.system.bus import RouterOnASet, eventually, free_ports
from tests.wire.captures import load, matches_truth

NAME = "vllm033_map_int"
KILLS = 12


class Process:
    """One `kvbus run` after the other, on the same endpoints."""

    def __init__(self, directory: Path, *, keeps_state: bool) -> None:
        ports = free_ports(4)
        self.engine, self.engine_replay, self.out, self.out_replay = (f"tcp://127.0.0.1:{port}" for port in ports)
        self._config = directory / "kvbus.yaml"
        self._config.write_text(
            f"sources: [{{endpoint: '{self.engine}', replay_endpoint: '{self.engine_replay}'}}]\n"
            f"outputs: [{{endpoint: '{self.out}', replay_endpoint: '{self.out_replay}', heartbeat: 0.2}}]\n"
            f"http: null\nstate_dir: {directory / 'state' if keeps_state else 'null'}\nprobe_interval: 0.2\n"
        )
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")}
        self._env["XDG_RUNTIME_DIR"] = str(directory)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvbus", "run", "-c", str(self._config)], env=self._env, stderr=subprocess.DEVNULL
        )

    def kill(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, "kvbus ended by itself"
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)


@contextlib.contextmanager
def killed_at_the_end(process: Process) -> Iterator[Process]:
    process.start()
    try:
        yield process
    finally:
        process.kill()


@pytest.mark.parametrize("keeps_state", [True, False])
def test_killed_at_random_instants(tmp_path: Path, keeps_state: bool) -> None:
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        killed_at_the_end(Process(tmp_path, keeps_state=keeps_state)) as process,
    ):
        runner.run(under_traffic(process, buffer_steps=100 if keeps_state else 10_000))


async def under_traffic(process: Process, buffer_steps: int) -> None:
    """An engine that forgets quickly can be told exactly only by a bus that remembers; one that does not, by any."""
    rng = random.Random(20)
    messages = load(NAME)
    kill_before = set(rng.sample(range(len(messages)), KILLS))
    router = RouterOnASet(process.out, process.out_replay)
    router.subscribe()
    try:
        async with EnginePublisher(
            process.engine, process.engine_replay, bind=True, buffer_steps=buffer_steps
        ) as engine:
            await engine.wait_for_subscriber(30)
            starts = 1
            for at, step in enumerate(schedule(messages, Faults(), Stats())):
                assert isinstance(step, Publish)
                engine.publish(step.message.payload, seq=step.message.seq)
                if at in kill_before:
                    process.kill()
                    process.start()
                    starts += 1
                    if buffer_steps < len(messages):
                        # traffic goes on while the bus is away only where the engine will remember it
                        await engine.wait_for_subscriber(30, count=starts)
                await asyncio.sleep(0.001)  # a pace: what is under way at a kill fits the buffer of the engine
                await router.follow()
            seen = router.next

            async def up_to_date() -> bool:
                await router.follow()
                return matches_truth(NAME, router.view) is None

            loop = asyncio.get_running_loop()
            end = loop.time() + 30
            while not await up_to_date():
                assert loop.time() < end, matches_truth(NAME, router.view)
                await asyncio.sleep(0.01)
            await eventually(lambda: router.read() > seen, "the stream goes on")
    finally:
        router.close()
    assert router.went_back == 0
    assert router.view.violations == []
