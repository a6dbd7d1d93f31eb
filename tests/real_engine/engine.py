"""A real ``vllm serve`` on the CPU, with a plugin that reports which blocks its block pool holds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.children import Watch
from tests.doubles.child import Child
from tests.ports import free_port, ports_in_a_row

from .asking import answering, fetched

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .outcome import Blocks

HOME_ENV: Final = "TEST_REAL_ENGINE_HOME"
MODEL: Final = "tiny"
"""The name under which the engine serves its model, whichever model it is."""

START: Final = 300.0
"""Maximum seconds until a started engine is ready. An idle machine needs 25 seconds."""

PREFIX_KINDS: Final = {"full_attention", "mla_attention", "sink_full_attention"}


@dataclass(frozen=True)
class Setup:
    """The settings with which an engine is started. ``MODELS`` in an argument stands for the models' directory."""

    model: str = "llama"
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    block_size: int = 32
    """Tokens of a block. On a CPU it must be a multiple of 32; vLLM's default is 128."""
    blocks: int = 300
    context: int = 2048
    ranks: int = 1
    buffer_steps: int = 10_000


@dataclass(frozen=True)
class Pool:
    """The blocks in the block pools of all ranks, and the number of events that the engine has not published yet."""

    blocks: Blocks
    kinds: list[str]
    waiting: int

    def of(self, groups: str) -> Blocks:
        """Return the blocks of the pool that kvbus announces with this value of its setting ``groups``."""
        if groups == "all":
            return self.blocks
        return {key: copies for key, copies in self.blocks.items() if self.kinds[key[1]] in PREFIX_KINDS}


class ProcessGroup(Child):
    """A program and all processes that it starts, which a test stops together."""

    async def start(self) -> None:
        if self.command[0] != "setsid":
            self.command.insert(0, "setsid")
        await super().start()
        self._watch = Watch(self.pid)

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def close(self) -> None:
        if self.process is not None:
            self.send(signal.SIGKILL)
            self._watch.close()
        await super().close()


class Engine:
    """One engine, which can be started repeatedly at the same ports.

    Args:
        home: directory into which .ci/real-engine.sh has installed the engine.
        setup: the engine's settings.
        directory: directory of the engine's log.
        name: name of the engine's log.
    """

    def __init__(self, home: Path, setup: Setup, directory: Path, name: str) -> None:
        self.setup = setup
        self._dumps = ports_in_a_row(setup.ranks)
        self.port = free_port()
        self.api = f"http://127.0.0.1:{self.port}"
        live, replay = ports_in_a_row(setup.ranks), ports_in_a_row(setup.ranks)
        self.endpoint, self.replay_endpoint = f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}"
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{live}",
            "replay_endpoint": f"tcp://*:{replay}",
            "buffer_steps": setup.buffer_steps,
            "topic": "",
        }
        command = [
            str(home / "bin" / "vllm"),
            "serve",
            str(home / "models" / setup.model),
            *on_cpu(setup.blocks, setup.context),
        ]
        command += ["--port", str(self.port), "--kv-events-config", json.dumps(events)]
        command += ["--block-size", str(setup.block_size)]
        if setup.ranks > 1:
            command += ["--data-parallel-size", str(setup.ranks)]
        own = [argument.replace("MODELS", str(home / "models")) for argument in setup.arguments]
        self.process = ProcessGroup(name, [*command, *own], directory)
        self.process.env |= {**environment(self._dumps), **setup.env}

    async def start(self) -> None:
        await self.process.start()
        await answering(f"{self.api}/health", START, self.process)

    async def stop(self) -> None:
        """Stop the engine with SIGTERM, if it runs."""
        try:
            if self.process.running:
                await self.process.end(patience=60)
        finally:
            await self.process.close()

    async def kill(self) -> None:
        """Send SIGKILL to each of the engine's processes."""
        await self.process.kill()
        await self.process.close()

    async def pool(self) -> Pool:
        """Return the blocks in the block pool of each rank."""
        blocks: Blocks = {}
        kinds: list[str] = []
        waiting = 0
        for rank in range(self.setup.ranks):
            told = json.loads(await fetched(f"http://127.0.0.1:{self._dumps + rank}/dump"))
            blocks |= {(rank, group, name): copies for group, name, copies in told["blocks"]}
            kinds, waiting = told["kinds"], waiting + told["waiting"]
        return Pool(blocks, kinds, waiting)


def on_cpu(blocks: int, context: int) -> list[str]:
    """Return the command-line arguments of vLLM for a tiny model without weights, on a CPU."""
    arguments = f"--served-model-name {MODEL} --load-format dummy --dtype float32 --enforce-eager --max-num-seqs 16"
    arguments += f" --max-model-len {context} --num-gpu-blocks-override {blocks}"
    return [*arguments.split(), "--host", "127.0.0.1", "--enable-prompt-tokens-details"]


def environment(dumps: int) -> dict[str, str]:
    """Return the environment of an engine on a CPU without a network.

    Its hashes are repeatable, and its development endpoints (reset, sleep) are enabled.
    """
    return {
        "BLOCK_POOL_DUMP_PORT": str(dumps),
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
