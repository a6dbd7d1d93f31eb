"""The cases of the tests with a real engine: in each, something happens to the engine while kvbus reads it.

`CASES` lists them.
"""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.ports import free_port

from .asking import fetched
from .engine import MODEL, Engine, Setup
from .scene import KVBUS, Scene
from .traffic import KINDS, Traffic

if TYPE_CHECKING:
    from collections.abc import Sequence

Play = Callable[[Scene], Awaitable[None]]
Config = Callable[[Engine], dict[str, Any]]

BROKEN: Final = {"4.3", "4.4", "7.2", "11.2"}
"""Clauses of the specification that vLLM is known to break.

A long answer to a replay loses batches, or its end, at the socket's limit of 1,000 messages. A removal does not say how
many copies remain. A clear waits for the engine's next step.
"""

ADAPTERS: Final = ("lora-a", "lora-b")

ENGINES: Final = {
    "llama": Setup(
        context=8192,
        arguments=(
            "--enable-lora",
            "--max-lora-rank",
            "8",
            "--lora-modules",
            *(f"{name}=MODELS/{name}" for name in ADAPTERS),
        ),
    ),
    "two ranks": Setup(ranks=2),
    "sha256_cbor, byte hashes": Setup(
        arguments=("--prefix-caching-hash-algo", "sha256_cbor"), env={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}
    ),
    "xxhash, blocks of 128": Setup(arguments=("--prefix-caching-hash-algo", "xxhash"), block_size=128),
    "gemma3": Setup(model="gemma3"),
    "mistral": Setup(model="mistral"),
}
"""The settings of the engines under test, by name. All cases of an engine use the same engine process.

Each case starts its own kvbus, so kvbus joins late.
"""


def traffic(*kinds: str, count: int = 80, models: Sequence[str] = (MODEL,)) -> Play:
    """Return a case that twice sends ``count`` requests of some kinds (by default, of all kinds).

    After each time, it compares the blocks of the engine, kvbus and the routers.
    """

    async def play(scene: Scene) -> None:
        for _ in range(2):
            await scene.traffic.send(count, kinds or KINDS, models)
            await scene.quiet(f"{count} requests")

    return play


async def reset(scene: Scene) -> None:
    await scene.traffic.send(40)
    await scene.quiet("before")
    await fetched(f"{scene.engine.api}/reset_prefix_cache", {})
    pool, held = await scene.engine.pool(), await scene.bus.blocks()
    scene.outcome.notes.append(
        f"just after the reset, the pool has {len(pool.blocks)} blocks and kvbus {len(held)}, "
        f"because the engine publishes {pool.waiting} event only at its next step"
    )
    await scene.traffic.send(1)
    await scene.quiet("one request after the reset")


async def sleep(scene: Scene) -> None:
    await scene.traffic.send(40)
    await scene.quiet("before")
    await fetched(f"{scene.engine.api}/sleep?level=1", {})
    await scene.quiet("asleep", within=15, asleep=True)
    await fetched(f"{scene.engine.api}/wake_up", {})
    await scene.traffic.send(40)
    await scene.quiet("awake again")


async def kvbus_killed(scene: Scene) -> None:
    sending = asyncio.ensure_future(scene.traffic.send(150))
    await scene.flowing(20)
    await scene.bus.process.kill()
    await scene.bus.start()
    await sending
    await scene.quiet("kvbus killed under traffic, and started again")


async def engine_killed(scene: Scene) -> None:
    sending = asyncio.ensure_future(scene.traffic.send(300))
    await scene.flowing(20)
    await scene.engine.kill()
    scene.outcome.notes.append(f"{await sending} of 300 requests got no answer, because the engine was killed")
    await scene.engine.start()
    await scene.traffic.send(60)
    await scene.quiet("engine killed under traffic, started again, 60 requests")


async def behind_front(scene: Scene) -> None:
    """Check that kvbus's API proxy answers a request for the engine's event endpoints with kvbus's own endpoints.

    The client that sends this request is another kvbus.
    """
    front = f"http://{scene.config['front']['listen']}"
    told = json.loads(await fetched(f"{front}/kv_event_sources"))["0"]
    assert (told["endpoint"], told["replay_endpoint"]) == scene.streams[0], told
    directory = scene.directory / "asks"
    directory.mkdir()
    async with Scene(scene.engine, directory, discovered(front), scene.outcome, counted=False) as asking:
        await Traffic(front, seed=1).send(40)
        await scene.quiet("40 requests through the front")
        await asking.quiet("another kvbus, which has asked the front")


async def conforms(scene: Scene) -> None:
    """Run `kvbus conform engine` against the engine, and compare the routers afterwards.

    The command resets the cache and puts the engine to sleep.
    """
    engine = scene.engine
    command = [
        KVBUS,
        "conform",
        "engine",
        engine.endpoint,
        "--replay-endpoint",
        engine.replay_endpoint,
        "--api",
        engine.api,
    ]
    process = await asyncio.create_subprocess_exec(*command, "--seconds", "10", "--json", stdout=PIPE)
    said, _ = await process.communicate()
    (scene.directory / "conform.json").write_bytes(said)
    report = json.loads(said)
    broken = [each["clause"] for each in report["verdicts"] if (each["outcome"], each["level"]) == ("broken", "MUST")]
    counts = ", ".join(f"{count} {outcome}" for outcome, count in report["counts"].items())
    scene.outcome.notes += [
        f"the command's verdicts: {counts}; the engine breaks a MUST of clauses {', '.join(broken) or 'none'}",
        *report["notes"],
    ]
    assert set(broken) <= BROKEN, f"vLLM breaks {broken}"
    await scene.traffic.send(40)
    await scene.quiet("40 requests after it")


def nothing(_: Engine) -> dict[str, Any]:
    return {}


def with_api(engine: Engine) -> dict[str, Any]:
    return {"source": {"api": engine.api}}


def every_group(_: Engine) -> dict[str, Any]:
    return {"groups": "all"}


def discovered(url: str) -> dict[str, Any]:
    return {"source": {"discover": {"http": {"url": url}}}, "output": {"layout": "merged"}}


def with_front(engine: Engine) -> dict[str, Any]:
    return {"front": {"listen": f"127.0.0.1:{free_port()}", "engine": engine.api}}


@dataclass(frozen=True)
class Case:
    """One case: what happens, to which engine, and with which configuration of kvbus."""

    name: str
    play: Play
    engine: str = "llama"
    config: Config = nothing


CASES: Final = (
    Case("mixed requests", traffic()),
    Case("evictions", traffic("unique")),
    Case("copies (n = 3, equal prompts)", traffic("choices", "twins")),
    Case("aborted requests", traffic("abort")),
    Case("LoRA", traffic(models=(MODEL, *ADAPTERS))),
    Case("salts", traffic("salt", "plain")),
    Case("kvbus knows the engine's API", traffic(), config=with_api),
    Case("reset", reset),
    Case("sleep", sleep, config=with_api),
    Case("kvbus discovers the engine by its API", traffic(), config=lambda engine: discovered(engine.api)),
    Case("requests through kvbus's front", behind_front, config=with_front),
    Case("kvbus conform engine", conforms),
    Case("kvbus is killed", kvbus_killed),
    Case("the engine is killed", engine_killed),
    *(Case("mixed requests", traffic(), engine) for engine in ENGINES if engine != "llama"),
    *(Case("kvbus with groups: all", traffic(), engine, every_group) for engine in ("gemma3", "mistral")),
    Case("kvbus with groups: all is killed", kvbus_killed, "gemma3", every_group),
    Case("the engine is killed", engine_killed, "two ranks"),
)
