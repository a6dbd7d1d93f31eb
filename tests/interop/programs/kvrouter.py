"""Run Dynamo's KvRouter and its KvEventPublisher in one process, with a discovery in files.

The publisher reads a ZeroMQ stream and passes its events on to the router. The program runs in Dynamo's own environment
(`.ci/dynamo.lock`), without etcd and NATS. It reads lines of JSON as all router programs of these tests do. Each stream
is one rank of the same worker.
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
    KvEventPublisher,
    KvRouter,
    KvRouterConfig,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime

RANKS = 4
"""Number of ranks of the worker: the maximum that the tests use. One stream may contain several ranks."""

MODEL = {
    "config.json": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2, "eos_token_id": 1},
    "tokenizer.json": {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}},
}
"""The model card that the program publishes without a model, because a router accepts events only from workers with
one.
"""


async def _generate(_request: Any, _context: Any = None) -> Any:
    yield {}


def _hashes(dumped: Any) -> set[int]:
    events = json.loads(dumped) if isinstance(dumped, str) else dumped
    stored = [event["event"]["data"].get("stored") for event in events]
    return {block["block_hash"] for each in stored if each for block in each["blocks"]}


async def main(model: Path) -> None:
    first = json.loads(await asyncio.to_thread(sys.stdin.readline))
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", enable_nats=False, event_plane="zmq")
    endpoint = runtime.endpoint("dynamo.backend.generate")
    serving = asyncio.ensure_future(endpoint.serve_endpoint(_generate))
    config = ModelRuntimeConfig()
    config.data_parallel_size = RANKS
    await register_model(
        ModelInput.Tokens,
        ModelType.Completions,
        endpoint,
        str(model),
        "m",
        kv_cache_block_size=first["block_size"],
        runtime_config=config,
        worker_type=WorkerType.Aggregated,
        ignore_weights=True,
        skip_model_assets=True,
    )
    # Dynamo sends no event again, so the reader of the events must run before the publisher starts.
    router = KvRouter(endpoint, first["block_size"], KvRouterConfig())
    publishers = [
        KvEventPublisher(
            endpoint,
            worker_id=endpoint.connection_id(),
            kv_block_size=first["block_size"],
            dp_rank=rank,
            enable_local_indexer=True,  # without it the router accepts no events
            zmq_endpoint=stream["live"],
            zmq_topic=stream.get("topic", ""),
        )
        for rank, stream in enumerate(first["streams"])
    ]
    while line := await asyncio.to_thread(sys.stdin.readline):
        if serving.done():
            serving.result()
        known = {block for block, *_ in json.loads(line)["known"]}
        held = _hashes(await router.dump_events()) & known
        print(json.dumps({"held": sorted(held)}), flush=True)  # noqa: T201 - this is what it is asked for
    del publishers


with tempfile.TemporaryDirectory() as home:
    os.environ["DYN_FILE_KV"] = f"{home}/discovery"
    for name, content in MODEL.items():
        Path(home, name).write_text(json.dumps(content))
    asyncio.run(main(Path(home)))
