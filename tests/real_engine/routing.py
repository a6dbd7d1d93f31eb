"""Run the real vLLM router in front of two real engines with small block pools.

It reads the engines' events or kvbus's. Eight conversations have eight turns each. Before each request kvbus's client
says which engine has its longest prefix. The engine's answer says how many tokens of the prompt it had in its cache.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvbus.client import PrefixRouter, Subscriber
from tests.doubles.child import Child
from tests.ports import free_ports, ports_in_a_row

from .asking import answering, fetched
from .engine import MODEL, Engine, Setup
from .outcome import Outcome, Point, score
from .scene import Bus
from .traffic import tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUTERS_ENV: Final = "TEST_ROUTERS_HOME"
CONVERSATIONS: Final = 8
TURNS: Final = 8
RESTART: Final = TURNS // 2
"""Number of the turn, counted from 0, before which the router restarts."""

SEEDS: Final = (5, 6, 7, 8)
"""Seeds of the runs. One run is not enough, because chance decides which engine evicts."""

SETUP: Final = Setup(blocks=65, buffer_steps=8)
"""Settings of the engines: a pool so small that it must evict, and a small replay buffer.

The buffer lacks as many batches as a usual buffer does after hours.
"""

DIRECTLY, THROUGH_KVBUS = "directly", "through kvbus"
_DECISION: Final = re.compile(r"KV prefix decision .*credited_prefix_tokens=(\d+)")
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Routed:
    """The results of one run of the vLLM router.

    Attributes:
        requests: number of requests.
        credited: requests for which the router knew a prefix.
        held: requests for which an engine had a prefix.
        landed: of these, requests that were sent to the engine with the longest prefix.
        cached: prompt tokens that the engines had in their caches.
        best: prompt tokens that the best choices of engines would have found.
        prompts: tokens of all prompts.
        held_after: ``held`` in the two turns after the restart of the vLLM router.
        landed_after: ``landed`` in the two turns after the restart of the vLLM router.
    """

    events: str
    restart: bool
    seed: int
    requests: int = 0
    credited: int = 0
    held: int = 0
    landed: int = 0
    cached: int = 0
    best: int = 0
    prompts: int = 0
    held_after: int = 0
    landed_after: int = 0


def program() -> Path:
    """Return the path of the vLLM router that .ci/routers.sh has installed."""
    return Path(os.environ[ROUTERS_ENV]) / "vllm-router" / "bin" / "vllm-router"


class VllmRouter:
    """The vLLM router. It gets the event endpoints as flags, because it cannot find them by itself.

    Args:
        engines: the engines to which it routes.
        streams: live endpoint and replay endpoint for each engine.
        directory: directory of the router's log.
    """

    def __init__(
        self, engines: Sequence[Engine], streams: Sequence[tuple[str, str]], directory: Path, name: str
    ) -> None:
        port, metrics = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        command = [str(program()), "--worker-urls", *(engine.api for engine in engines), "--policy", "kv_aware"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
        command += ["--worker-startup-check-interval", "1", "--log-level", "debug"]
        for engine, (live, replay) in zip(engines, streams, strict=True):
            command += [
                "--kv-event-source",
                f"{engine.api}={live}",
                "--kv-event-replay-source",
                f"{engine.api}={replay}",
            ]
        # The router assigns workers that these flags name to the model "unknown".
        command += ["--kv-event-block-size", str(SETUP.block_size), "--kv-event-model", "unknown"]
        self._process = Child(name, ["sh", "-c", 'exec "$@" >&2', "sh", *command], directory)

    async def start(self) -> None:
        await self._process.start()
        await answering(f"{self.url}/readiness", 60, self._process)

    async def restart(self) -> None:
        await self._process.end()
        await self.start()

    async def close(self) -> None:
        await self._process.close()

    def credited(self) -> int:
        """Return the number of requests for which the router knew a prefix, from its log."""
        log = _COLOURS.sub("", self._process.log.read_text(errors="replace"))
        return sum(decision != "0" for decision in _DECISION.findall(log))


async def conversations(oracle: PrefixRouter, router: VllmRouter, run: Routed) -> None:
    """Send the requests of all conversations, turn by turn.

    A turn has one request of each conversation. These requests are sent at the same time.
    """
    rng = random.Random(run.seed)
    systems = [tokens(rng, 128) for _ in range(4)]
    prompts = [systems[number % 4] + tokens(rng, 40) for number in range(CONVERSATIONS)]

    async def turn(number: int, at: int) -> None:
        prompt = prompts[number]
        await asyncio.sleep(rng.random() * 0.3)
        found = max(oracle.longest_prefix(prompt).values(), default=0) * SETUP.block_size
        best = min(found, (len(prompt) - 1) // SETUP.block_size * SETUP.block_size)  # the last token is always computed
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "ignore_eos": True}
        usage = json.loads(await fetched(f"{router.url}/v1/completions", asked))["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        run.requests += 1
        run.prompts += len(prompt)
        run.cached += cached
        run.best += best
        if best:
            run.held += 1
            run.landed += cached >= best
            if RESTART <= at < RESTART + 2:
                run.held_after += 1
                run.landed_after += cached >= best
        prompts[number] = prompt + tokens(rng, 54)

    for at in range(TURNS):
        if run.restart and at == RESTART:
            await router.restart()
        await asyncio.gather(*(turn(number, at) for number in range(CONVERSATIONS)))


async def play(home: Path, directory: Path, outcome: Outcome) -> list[Routed]:
    """Play all runs. Each begins with empty caches and a new router."""
    engines = [Engine(home, SETUP, directory, name) for name in ("engine-a", "engine-b")]
    names = [engine.process.name for engine in engines]
    own = [(engine.endpoint, engine.replay_endpoint) for engine in engines]
    sources = [
        {"name": name, "endpoint": live, "replay_endpoint": replay}
        for name, (live, replay) in zip(names, own, strict=True)
    ]
    first, replays = ports_in_a_row(2), ports_in_a_row(2)
    streams = [(f"tcp://127.0.0.1:{first + slot}", f"tcp://127.0.0.1:{replays + slot}") for slot in range(2)]
    output = {"profile": "vllm-router", "endpoint": streams[0][0], "replay_endpoint": streams[0][1]}
    bus = Bus(directory, {"sources": sources, "outputs": [output]})
    found: list[Routed] = []
    try:
        with outcome.caught(directory):
            await asyncio.gather(*(engine.start() for engine in engines))
            await bus.start()
            for restart, seed, turned in itertools.product((False, True), SEEDS, (0, 1)):
                events = (DIRECTLY, THROUGH_KVBUS)[(seed + turned) % 2]  # each kind of events comes first equally often
                run = Routed(events, restart, seed)
                router = VllmRouter(engines, own if events == DIRECTLY else streams, directory, f"router {len(found)}")
                for engine in engines:
                    await fetched(f"{engine.api}/reset_prefix_cache", {})
                    await fetched(f"{engine.api}/v1/completions", {"model": MODEL, "prompt": [9] * 40, "max_tokens": 1})
                try:
                    await router.start()
                    async with PrefixRouter(
                        dict(zip(names, (Subscriber(*each) for each in streams), strict=True))
                    ) as oracle:
                        await oracle.settled()
                        await conversations(oracle, router, run)
                    run.credited = router.credited()
                finally:
                    await router.close()
                found.append(run)
            for name, engine in zip(names, engines, strict=True):
                pool = (await engine.pool()).blocks
                scores = {"kvbus": score(pool, await bus.blocks(f"?source={name}"), counted=True)}
                outcome.points.append(Point(name, len(pool), 0, 0, scores, 0.0))
    finally:
        await bus.process.close()
        await asyncio.gather(*(engine.stop() for engine in engines))
    return found
