"""Run a Dynamo worker with a model card but without a publisher, and the KvRouter of an unmodified frontend.

The program runs in Dynamo's own environment (`.ci/dynamo.lock`), without NATS. It reads lines of JSON: the first line
describes the worker, and each further line is a command.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from dynamo.llm import (
    KvRouter,
    KvRouterConfig,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    compute_block_hash_for_seq,
    register_model,
)
from dynamo.runtime import DistributedRuntime

MODEL = {
    "config.json": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2, "eos_token_id": 1},
    "tokenizer.json": {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}},
}


async def _generate(_request: Any, _context: Any = None) -> Any:
    yield {}


def _write(model: Path) -> None:
    for name, content in MODEL.items():
        (model / name).write_text(json.dumps(content))


def _blocks(dumped: Any) -> list[tuple[int, str, int]]:
    events = json.loads(dumped) if isinstance(dumped, str) else dumped
    stored = [(event, event["event"]["data"].get("stored")) for event in events]
    return sorted(
        (event["event"]["dp_rank"], event["storage_tier"], block["block_hash"])
        for event, each in stored
        if each
        for block in each["blocks"]
    )


class Frontend:
    def __init__(self, first: dict[str, Any]) -> None:
        self._first = first
        self._size = first["block_size"]
        backend = first["backend"]
        self._runtime = DistributedRuntime(
            asyncio.get_running_loop(), backend, "tcp", enable_nats=False, event_plane="zmq"
        )
        self._endpoint = self._runtime.endpoint("dynamo.backend.generate")
        self._router: KvRouter | None = None

    async def register(self) -> dict[str, Any]:
        """Serve the worker's endpoint, and publish the worker's model card."""
        self._serving = asyncio.ensure_future(self._endpoint.serve_endpoint(_generate))
        config = ModelRuntimeConfig()
        config.data_parallel_size = self._first["ranks"]
        if self._first.get("agent"):
            config.kv_event_source_mode = "state_agent_v2"
        with tempfile.TemporaryDirectory() as model:
            _write(Path(model))
            await register_model(
                ModelInput.Tokens,
                ModelType.Completions,
                self._endpoint,
                model,
                "m",
                kv_cache_block_size=self._size,
                runtime_config=config,
                worker_type=WorkerType.Aggregated,
                ignore_weights=True,
                skip_model_assets=True,
            )
        return {"worker": self._endpoint.connection_id()}

    async def agent(self, sources: list[list[str]]) -> dict[str, Any]:
        """Run Dynamo's state agent, which reads the events of all ranks.

        It has a slot for each rank: the endpoint and the topic at which it reads the rank's events.
        """
        from dynamo.llm import KvStateAgentHost, KvStateAttachmentOwner  # noqa: PLC0415 - not in every release

        self._host = KvStateAgentHost(self._runtime.endpoint("dynamo.kv_state_agent.control"), 8)
        await self._host.start()
        domain = f"{1:032x}:{2:032x}"
        slots = [
            {
                "cache_owner_id": f"{domain}/{rank:016x}/{rank + 1:032x}",
                "global_dp_rank": rank,
                "kv_state_endpoint": "dynamo/backend/generate",
                "indexer_domain_id": domain,
                "kv_block_size": self._size,
                "raw_zmq_endpoint": endpoint,
                "raw_topic": topic,
                "image_token_id": None,
                "video_token_id": None,
                "router_hint_source": None,
            }
            for rank, (endpoint, topic) in enumerate(sources)
        ]
        self._owner = KvStateAttachmentOwner(self._endpoint, self._endpoint.connection_id(), slots)
        await self._owner.start()
        return {"status": await self._host.status()}

    async def agent_status(self) -> dict[str, Any]:
        """Return the status of the slots of Dynamo's state agent (:meth:`agent`)."""
        return {"status": await self._host.status()}

    async def router(self) -> dict[str, Any]:
        """Replace the router by a new router with an empty index."""
        self._router = None
        self._router = KvRouter(self._endpoint, self._size, KvRouterConfig())
        return {}

    async def dump(self) -> list[Any]:
        """Return the rank, tier and hash of each block in the router's index."""
        assert self._router is not None
        return _blocks(await self._router.dump_events())

    async def ask(self, tokens: list[int], **options: Any) -> list[Any]:
        """Return each rank that holds a part of a prompt, with its number of blocks on the device and in host
        memory.
        """
        assert self._router is not None
        scores = await self._router.get_overlap_scores(tokens, **options)
        return sorted(
            [each["dp_rank"], each["device_blocks"], each["host_pinned_blocks"]] for each in scores["workers"]
        )

    async def hash(self, tokens: list[int], size: int, **options: Any) -> list[int]:
        """Return the hashes that Dynamo computes for the blocks of these tokens."""
        return compute_block_hash_for_seq(tokens, size, **options)


async def main() -> None:
    first = json.loads(await asyncio.to_thread(sys.stdin.readline))
    frontend = Frontend(first) if "ranks" in first else Frontend.__new__(Frontend)
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        answer = await getattr(frontend, asked.pop("do"))(**asked)
        print(json.dumps(answer), flush=True)  # noqa: T201 - this is what it is asked for


assert os.environ.get("DYN_FILE_KV") or os.environ.get("ETCD_ENDPOINTS")
asyncio.run(main())
