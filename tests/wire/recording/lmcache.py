"""Record the stream of a real ``vllm serve`` that uses LMCache's connector, beside a real LMCache server, on the CPU.

python -m tests.wire.recording.lmcache --engine E --lmcache L --name lmcache056_vllm032

E is the environment of ``make real-engine``. L holds LMCache and the packages that it needs beyond E's:

pip install --no-deps --target L lmcache==0.5.6 sortedcontainers aiofiles aiofile opentelemetry-exporter-prometheus

LMCache's chunks are twice as long as the engine's blocks. Both caches are small, so both evict.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import base64
import json
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import aiohttp
import zmq
import zmq.asyncio

from tests.ports import free_ports
from tests.real_engine.asking import answering, fetched
from tests.real_engine.engine import MODEL, START, Engine, ProcessGroup, Setup
from tests.real_engine.traffic import Traffic
from tests.wire.captures import DATA

BLOCK, CHUNK = 32, 64
SERVER: Final = "from lmcache.cli.main import main; main()"
KEYS: Final = "result = [key.chunk_hash.hex() for key in app.state.engine.context.storage_manager._l1_manager._objects]"
"""A script for the LMCache server's ``POST /run_script``, whose result is the list of the chunks that the server
holds.
"""


class LMCacheServer:
    """An LMCache server on the CPU, whose memory holds about sixty of LMCache's chunks of tokens."""

    def __init__(self, home: Path, directory: Path, path: str) -> None:
        port, http, metrics = free_ports(3)
        self.port, self.api = port, f"http://127.0.0.1:{http}"
        arguments = f"server --host 127.0.0.1 --port {port} --http-port {http} --prometheus-port {metrics}"
        arguments += f" --chunk-size {CHUNK} --l1-size-gb 0.002 --no-l1-use-lazy --eviction-policy LRU"
        arguments += " --supported-transfer-mode lmcache_driven --run-script-api-enabled"
        command = [str(home / "bin" / "python"), "-c", SERVER, *arguments.split()]
        self.process = ProcessGroup("lmcache", command, directory)
        self.process.env |= {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}

    async def start(self) -> None:
        await self.process.start()
        await answering(f"{self.api}/status", START, self.process)

    async def chunks(self) -> set[int]:
        """The chunks that the server holds, under the names that vLLM gives to byte hashes."""
        form = aiohttp.FormData()
        form.add_field("script", KEYS.encode(), filename="keys.py")
        async with (
            aiohttp.ClientSession(raise_for_status=True) as session,
            session.post(f"{self.api}/run_script", data=form) as answer,
        ):
            return {int(each, 16) % 2**64 for each in ast.literal_eval(await answer.text())}


def setup(server: LMCacheServer, path: str) -> Setup:
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port}
    connector = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    env = {"PYTHONPATH": path, "LMCACHE_MP_TRANSFER_MODE": "lmcache_driven", "LMCACHE_TRACK_USAGE": "false"}
    return Setup(
        arguments=("--kv-transfer-config", json.dumps(connector)), env=env, block_size=BLOCK, blocks=60, context=1024
    )


async def read(socket: zmq.asyncio.Socket, lines: list[dict[str, Any]]) -> None:
    began = time.monotonic()
    while True:
        topic, seq, payload = await socket.recv_multipart()
        at = {"t": round(time.monotonic() - began, 4), "topic": topic.decode(), "seq": int.from_bytes(seq, "big")}
        lines.append(at | {"payload": base64.b64encode(payload).decode()})


async def rest(engine: Engine) -> None:
    """Send a few requests, so that the engine publishes the events that it got from LMCache.

    It publishes these events only in its next steps.
    """
    for _ in range(3):
        await asyncio.sleep(1)
        await fetched(f"{engine.api}/v1/completions", {"model": MODEL, "prompt": [3, 4, 5], "max_tokens": 2})
    await asyncio.sleep(1)


async def record(given: argparse.Namespace, directory: Path) -> None:
    lines: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        server = LMCacheServer(given.engine, directory, given.lmcache)
        stack.push_async_callback(server.process.close)
        await server.start()
        engine = Engine(given.engine, setup(server, given.lmcache), directory, "engine")
        stack.push_async_callback(engine.process.close)
        await engine.start()
        socket = stack.enter_context(zmq.asyncio.Context()).socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(engine.endpoint)
        socket.subscribe(b"")
        stack.callback(socket.close)
        reader = asyncio.create_task(read(socket, lines))
        stack.callback(reader.cancel)
        await rest(engine)
        await Traffic(engine.api, given.seed).send(given.requests, ("plain", "choices"))
        await rest(engine)
        pool, chunks = await engine.pool(), await server.chunks()
    assert [line["seq"] for line in lines] == list(range(len(lines)))
    assert pool.waiting == 0
    blocks = [
        {"hash": int(name), "group_idx": group, "medium": "GPU", "copies": copies, "kind": pool.kinds[group]}
        for (_, group, name), copies in sorted(pool.blocks.items())
    ]
    of_lmcache = {"group_idx": None, "medium": "CPU", "copies": 1, "kind": None}
    blocks += [{"hash": chunk, **of_lmcache} for chunk in sorted(chunks)]
    (given.out / f"{given.name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (given.out / f"{given.name}.truth.json").write_text(json.dumps({"blocks": blocks}))
    sys.stdout.write(f"{given.name}: {len(lines)} batches, {len(pool.blocks)} blocks, {len(chunks)} chunks\n")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--lmcache", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--out", type=Path, default=DATA)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(record(given, Path(directory)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
