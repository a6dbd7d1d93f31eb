# ruff: noqa: INP001, S603, T201 - a script that runs this image's own kvbus and tells what came out
"""Publish, relay, subscribe: what a simulated engine holds at the end is what a router holds behind kvbus.

kvbus runs as the environment configures it (``KVBUS_…``), with the engine on loopback, as in a worker's pod.
Exit code 0: every block came out, and no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvbus.client import BlockView, Subscriber

PATIENCE = 60.0
"""Seconds for the whole of it."""
REQUESTS = 100
LINGER = 5
"""Seconds the idle engine stays, so that its last batches can be asked for; then it tells what it held, and ends."""
KVBUS = str(Path(sys.executable).parent / "kvbus")


def main() -> int:
    """Run the circuit and compare."""
    shown = subprocess.run([KVBUS, "check", "--json"], check=True, capture_output=True, text=True).stdout
    config = json.loads(shown)
    source, output = config["sources"][0], config["outputs"][0]
    with tempfile.TemporaryDirectory() as scratch, running("run", "--set", f"source_timeout={PATIENCE}"):
        await_ready(config["http"])
        truth_file = Path(scratch) / "truth.json"
        size = [] if config["block_size"] == "auto" else [f"--block-size={config['block_size']}"]
        simulated = (
            *("sim", f"--endpoint={source['endpoint']}", f"--replay-endpoint={source['replay_endpoint']}"),
            *(f"--ranks={source['data_parallel_size']}", f"--requests={REQUESTS}", "--rate=200", *size),
            *(f"--exit-after={LINGER}", f"--truth-file={truth_file}"),
        )
        with running(*simulated):
            return asyncio.run(compare(truth_file, output, source["data_parallel_size"]))


@contextlib.contextmanager
def running(*command: str) -> Iterator[None]:
    """A kvbus command in the background, ended at the end."""
    process = subprocess.Popen([KVBUS, *command])
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def await_ready(http: str) -> None:
    """Wait until kvbus has bound everything."""
    end = time.monotonic() + PATIENCE
    url = f"http://127.0.0.1:{http.rpartition(':')[2]}/readyz"
    while True:
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=2):
            return
        if time.monotonic() > end:
            raise SystemExit(f"kvbus is not ready: {url}")
        time.sleep(0.1)


async def compare(truth_file: Path, output: dict[str, Any], ranks: int) -> int:
    """Follow every stream until the views are the truth."""
    merged = output["layout"] == "merged"
    streams = [(near(output["endpoint"], i), near(output["replay_endpoint"], i)) for i in range(1 if merged else ranks)]
    views = [BlockView() for _ in streams]

    def held() -> set[tuple[int, str, int | str]]:
        return {
            (rank or 0 if merged else i, medium, name.hex() if isinstance(name, bytes) else name)
            for i, view in enumerate(views)
            for rank, _, medium, name in view.keys()  # noqa: SIM118 - a view iterates over its blocks
        }

    async def follow(i: int) -> None:
        async for update in Subscriber(*streams[i]):
            views[i].update(update)

    tasks = [asyncio.create_task(follow(i)) for i in range(len(streams))]
    end = time.monotonic() + PATIENCE
    truth: set[tuple[int, str, int | str]] = set()
    try:
        while not truth or held() != truth:
            if time.monotonic() > end:
                have = held()
                missing, odd = len(truth - have), len(have - truth)
                print(f"FAILED: {len(truth)} blocks live, {missing} of them missing, {odd} too many")
                return 1
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)
            truth = truth or read(truth_file)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    print(f"ok: {len(truth)} live blocks of {ranks} rank(s) came through {len(streams)} stream(s) exactly")
    return 0


def read(truth_file: Path) -> set[tuple[int, str, int | str]]:
    """Rank, medium and hash of what the engine holds; nothing before the file is complete."""
    try:
        blocks = json.loads(truth_file.read_text())["blocks"]
    except (FileNotFoundError, json.JSONDecodeError):  # not written yet, or not to its end
        return set()
    return {(block["rank"], block["medium"], block["hash"]) for block in blocks}


def near(endpoint: str, stream: int) -> str:
    """Where the n-th stream is, seen from this container."""
    host, _, port = endpoint.rpartition(":")
    return f"{re.sub(r'^tcp://.*', 'tcp://127.0.0.1', host)}:{int(port) + stream}"


if __name__ == "__main__":
    sys.exit(main())
