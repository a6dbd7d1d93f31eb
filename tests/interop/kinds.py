"""The routers of the table in docs/INTEROP.md: how each one is started, and the output of kvbus that it reads."""

from __future__ import annotations

import abc
import asyncio
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.doubles.child import Child
from tests.doubles.llmd import LlmdWithReplay
from tests.doubles.ping_as_message import PingAsMessage
from tests.doubles.socket_routers import ClearsByPod, NeverAsks
from tests.ports import free_port

from .cache import BLOCK_SIZE, Known
from .dynamo import PYTHON_ENV, DynamoIndexer
from .go_peers import HOME_ENV, GoSubscriber
from .routers import Kind, Program, Router, Stream
from .vllm_router import VllmRouter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROUTERS_ENV: Final = "TEST_ROUTERS_HOME"
PROGRAMS: Final = Path(__file__).with_name("programs")


class Indexer(Router):
    """Dynamo's standalone indexer as a router under test. Each stream is one rank of the same worker."""

    def __init__(self, directory: Path, name: str) -> None:
        self._indexer = DynamoIndexer(directory / f"{name}.log")

    async def start(self, streams: Sequence[Stream]) -> None:
        self._indexer.__enter__()
        for rank, stream in enumerate(streams):
            self._indexer.register("m", stream.live, stream.replay, BLOCK_SIZE, rank)

    async def held(self, known: Known) -> set[int]:
        return {block.hash for block in self._indexer.blocks("m")} & known.keys()

    async def stop(self) -> None:
        self._indexer.__exit__(None, None, None)


class GoZeromq(Router):
    """A subscriber on go-zeromq, the ZeroMQ library of llm-d, without llm-d: one process for each stream."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._programs: list[tuple[Child, GoSubscriber]] = []

    async def start(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            command = [str(Path(os.environ[HOME_ENV]) / "subscriber"), stream.live, stream.replay]
            child = Child(self._name, command, self._directory, piped=True)
            await child.start()
            self._programs.append((child, GoSubscriber(child)))

    async def held(self, known: Known) -> set[int]:
        return {block for block in known for _, router in self._programs if (None, "GPU", block) in router.live.blocks}

    async def stop(self) -> None:
        for child, router in self._programs:
            await router.close()
            await child.close()


class Double(Router, abc.ABC):
    """A router under test in this process: a double, which follows the rules of a real router.

    It reads all the time, because a SUB that nobody reads does not subscribe again after a reconnection.
    """

    def __init__(self, _directory: Path, _name: str) -> None:
        self._found: set[int] = set()
        self._reading: asyncio.Task[None] | None = None

    async def start(self, streams: Sequence[Stream]) -> None:
        self._open(streams)
        self._reading = asyncio.ensure_future(self._follow())

    async def held(self, known: Known) -> set[int]:
        assert self._reading is not None
        if self._reading.done():
            self._reading.result()
        return self._found

    async def stop(self) -> None:
        assert self._reading is not None
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._close()

    async def _follow(self) -> None:
        while True:
            self._found = await self._read()
            await asyncio.sleep(0.02)

    @abc.abstractmethod
    def _open(self, streams: Sequence[Stream]) -> None: ...

    @abc.abstractmethod
    async def _read(self) -> set[int]: ...

    @abc.abstractmethod
    async def _close(self) -> None: ...


class Silent(Double):
    """A double that reads the live stream and never requests a replay."""

    double: type[NeverAsks] = NeverAsks

    def _open(self, streams: Sequence[Stream]) -> None:
        self._reader = self.double([stream.live for stream in streams])

    async def _read(self) -> set[int]:
        return self._reader.read()

    async def _close(self) -> None:
        self._reader.close()


class ByPod(Silent):
    """A double of a router that reads the live stream.

    When one rank is cleared, it clears all ranks of the worker, as some routers do.
    """

    double = ClearsByPod


class Llmd(Double):
    """A double of llm-d's router with replay enabled: one reader for each stream."""

    def _open(self, streams: Sequence[Stream]) -> None:
        self._readers = [LlmdWithReplay(stream.live, stream.replay) for stream in streams]

    async def _read(self) -> set[int]:
        return {block for reader in self._readers for block in await reader.read_on()}

    async def _close(self) -> None:
        for reader in self._readers:
            reader.close()


class Ping(Double):
    """A double that reads each stream and does not understand ZMTP commands, as go-zeromq does not."""

    def _open(self, streams: Sequence[Stream]) -> None:
        self._readers = [PingAsMessage(stream.live) for stream in streams]

    async def _read(self) -> set[int]:
        return {block for reader in self._readers for block in reader.hashes()}

    async def _close(self) -> None:
        for reader in self._readers:
            await reader.close()


def installed(name: str) -> Callable[[], str | None]:
    """Return a function that says why a router of `.ci/routers.sh` cannot run here, or returns None if it can."""
    return _there(ROUTERS_ENV, name, "routers, as .ci/routers.sh DIR installs them")


def _there(variable: str, name: str, what: str) -> Callable[[], str | None]:
    """Return a function that looks for a file in the directory that an environment variable names.

    The function returns why the file is missing, or None if it exists.
    """

    def lacking() -> str | None:
        found = os.environ.get(variable)
        if not found:
            return f"{variable} names no {what}; .ci/run does that"
        path = Path(found) / name
        return None if path.exists() else f"there is no {path}: it could not be installed"

    return lacking


def _program(
    binary: str,
    first: Callable[[Sequence[Stream]], dict[str, Any]],
    *arguments: str,
    env: Callable[[], Mapping[str, str]] = dict,
) -> Callable[[Path, str], Router]:
    def make(directory: Path, name: str) -> Router:
        command = [str(Path(os.environ[ROUTERS_ENV]) / binary), *arguments]
        # A killed program leaves temporary files, so they go to the test's directory.
        return Program(command, directory, name, first, {"TMPDIR": str(directory), **env()})

    return make


def vllm_router(directory: Path, name: str, *, kind: type[VllmRouter] = VllmRouter, **more: Any) -> VllmRouter:
    """Return a vLLM router under test, with the installed program."""
    program = Path(os.environ[ROUTERS_ENV]) / "vllm-router/bin/vllm-router"
    return kind(program, directory, name, **more)


def named_streams(streams: Sequence[Stream]) -> dict[str, Any]:
    named = [{"name": f"w{at}", "live": each.live, "replay": each.replay} for at, each in enumerate(streams)]
    return {"streams": named, "block_size": BLOCK_SIZE}


def _kv_router(directory: Path, name: str) -> Router:
    command = [os.environ[PYTHON_ENV], str(PROGRAMS / "kvrouter.py")]
    return Program(command, directory, name, named_streams)


def _pod_address() -> tuple[str, int, int]:
    """Return a loopback address that no other test uses, and the usual ports of a pod."""
    unique = free_port()
    return f"127.77.{unique >> 8}.{unique & 0xFF}", 5557, 5558


def _aibrix_env() -> dict[str, str]:
    return {
        "AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED": "true",
        "AIBRIX_PREFIX_CACHE_USE_REMOTE_TOKENIZER": "true",
        "AIBRIX_PREFIX_CACHE_BLOCK_SIZE": str(4 * BLOCK_SIZE),  # in bytes: four for each token
    }


def smg_relay(*options: str) -> Callable[[Path, str], Router]:
    """Return a function that creates SMG's relay with these command-line options."""
    return _program("smg/bin/python", named_streams, str(PROGRAMS / "smg_relay.py"), *options)


VLLM_ROUTER: Final = installed("vllm-router/bin/vllm-router")
DYNAMO: Final = _there(PYTHON_ENV, "", "Python with ai-dynamo-runtime")
GO_ZEROMQ: Final = _there(HOME_ENV, "subscriber", "peers on go-zeromq, as .ci/gozmq.sh DIR builds them")

LLMD_TOPIC: Final = "kv@w@m"
LLMD_OUTPUT: Final = {"profile": "llm-d", "topic": "kv@{worker}@{model}"}

KINDS: Final = (
    Kind(
        "llm-d-kv-cache 0.9.0",
        _program("llmd", named_streams),
        installed("llmd"),
        LLMD_OUTPUT,
        LLMD_TOPIC,
    ),
    Kind("Dynamo 1.6.1, indexer", Indexer, DYNAMO),
    Kind("Dynamo 1.6.1, KvRouter", _kv_router, DYNAMO),
    Kind("vLLM router 0.1.17", partial(vllm_router, replays=True), VLLM_ROUTER, {"profile": "vllm-router"}),
    Kind("vLLM router, no replay", partial(vllm_router, replays=False), VLLM_ROUTER, {"profile": "vllm-router"}),
    Kind(
        "SMG relay 0.14.1",
        smg_relay(),
        installed("smg/bin/smg"),
        {"profile": "smg"},
    ),
    Kind(
        "SMG Rust relay 1.13.0",
        smg_relay("--rust"),
        installed("smg/bin/smg"),
        {"profile": "smg"},
    ),
    Kind(
        "AIBrix 0.7.0",
        _program("aibrix", named_streams, env=_aibrix_env),
        installed("aibrix"),
        {"profile": "aibrix"},
        listens=_pod_address,
        by_position=True,
    ),
    Kind("go-zeromq 0.17.0", GoZeromq, GO_ZEROMQ, LLMD_OUTPUT),
    Kind("llm-d with replay (double)", Llmd, output=LLMD_OUTPUT, topic=LLMD_TOPIC),
    Kind("never asks (double)", Silent, output={"profile": "vllm"}),
    Kind("clears by pod (double)", ByPod, output=LLMD_OUTPUT, topic=LLMD_TOPIC, short=False),
    Kind("PING as a message (double)", Ping, output=LLMD_OUTPUT, topic=LLMD_TOPIC, short=False),
)
"""All kinds of routers under test, in the order of the columns in docs/INTEROP.md."""
