"""Tests for access from another pod to the HTTP server of kvbus, as the default chart configures it.

The other pod sees whether kvbus is healthy, but can read no token id.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.chaos.namespaces import Network
from tests.chart.charts import load, render
from tests.doubles.child import Child, python

pytestmark = pytest.mark.slow

PORT: Final = 9477
ASK: Final = """
import http.client, json, sys
host, port, path, source, headers = json.loads(sys.argv[1])
connection = http.client.HTTPConnection(host, port, timeout=60, source_address=(source, 0) if source else None)
connection.request("GET", path, headers=headers)
answer = connection.getresponse()
print(json.dumps([answer.status, answer.read().decode()]))
"""


class Answer(NamedTuple):
    status: int
    body: str


class Pod:
    """A kvbus in a network namespace with a loopback and one more address. The test process acts as another pod."""

    def __init__(self, network: Network, kvbus: Child, engine: Child) -> None:
        self.network, self.kvbus, self.engine = network, kvbus, engine

    async def ask(
        self, path: str, *, inside: bool = False, to: str | None = None, source: str | None = None, **headers: str
    ) -> Answer:
        """Send an HTTP request, from this process or from inside the pod, by default to the pod's address."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = json.dumps([to or self.network.address, PORT, path, source, named])
        command = [sys.executable, "-c", ASK, request]
        process = await asyncio.create_subprocess_exec(
            *(self.network.inside(command) if inside else command),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        printed, errors = await process.communicate()
        if process.returncode:
            raise ConnectionError(errors.decode())
        return Answer(*json.loads(printed))

    async def source(self) -> dict[str, Any] | None:
        """Return kvbus's only source from ``/sources``, as another pod sees it; None while no process listens there."""
        assert self.kvbus.running, self.kvbus.log.read_text()
        try:
            (entry,) = json.loads((await self.ask("/sources")).body)
        except ConnectionError:
            return None
        return dict(entry)


@contextlib.asynccontextmanager
async def pod(directory: Path) -> AsyncIterator[Pod]:
    release = render()
    text = str(release.file())
    config = load(text)
    assert config["http"] == f"0.0.0.0:{PORT}"
    (directory / "state").mkdir()
    (directory / "kvbus.yaml").write_text(text.replace(config["state_dir"], str(directory / "state")))
    network = Network(directory, "pod")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(network.close)
        try:
            await network.open()
        except OSError as error:
            pytest.skip(f"needs root and ip, for a network namespace with an address of its own: {error}")
        run = ["kvbus", "run", "-c", str(directory / "kvbus.yaml")]
        kvbus = Child("kvbus", network.inside(python(*run)), directory)
        engine = Child(
            "engine", network.inside(python("kvbus", *release.engine["args"], "--requests=20", "--rate=100")), directory
        )
        for each in (kvbus, engine):
            stack.push_async_callback(each.close)
            await each.start()
        yield Pod(network, kvbus, engine)


async def settled(here: Pod) -> int:
    """Wait until kvbus has relayed the engine's complete workload, and return the number of blocks."""
    async with asyncio.timeout(60):
        while True:
            source = await here.source()
            if source and source["state"] == "live" and "the workload has ended" in here.engine.log.read_text():
                return sum(source["blocks"].values())
            await asyncio.sleep(0.05)


async def test_another_pod_can_read_health_and_metrics_but_no_token_id(tmp_path: Path) -> None:
    async with pod(tmp_path) as here:
        blocks = await settled(here)
        assert blocks > 0
        own, port = here.network.address, f":{PORT}"

        for path in ("/livez", "/readyz", "/metrics", "/sources", "/"):
            for answer in (await here.ask(path), await here.ask(path, Host="evil.example")):
                assert answer.status == 200, path
                assert "token_ids" not in answer.body

        refused = [
            await here.ask("/blocks"),
            await here.ask("/blocks", Host=f"localhost{port}"),
            await here.ask("/blocks", Host=f"127.0.0.1{port}", X_Forwarded_For="127.0.0.1", X_Real_IP="127.0.0.1"),
            await here.ask("/blocks", Host="localhost", Forwarded="for=127.0.0.1"),
            await here.ask("/blocks", inside=True),
            # A service mesh's proxy connects from 127.0.0.6, and so forwards requests of other pods.
            await here.ask("/blocks", inside=True, source="127.0.0.6", Host=f"localhost{port}"),
        ]
        for answer in refused:
            assert answer.status == 403
            error = json.loads(answer.body)["error"]
            assert "token ids" in error
            assert f"kubectl port-forward POD {PORT}" in error
            assert f"http://127.0.0.1{port}/blocks" in error
        assert json.loads((await here.ask("/overview")).body)["content"] == error, "as the page shows it"

        foreign = await here.ask("/blocks", inside=True, to="127.0.0.1", Host=f"{own}{port}")
        assert (foreign.status, "Host header" in foreign.body) == (403, True)
        rebound = await here.ask("/blocks", inside=True, to="127.0.0.1", Host="evil.example")
        assert (rebound.status, "Host header" in rebound.body) == (403, True)

        for host in (f"127.0.0.1{port}", "localhost:12345"):  # the local end of a port-forward may have any port
            given = await here.ask("/blocks", inside=True, to="127.0.0.1", Host=host)
            assert given.status == 200
            lines = [json.loads(line) for line in given.body.splitlines()]
            assert len(lines) == blocks
            assert all(line["token_ids"] for line in lines)

        metrics = (await here.ask("/metrics")).body
        assert f'kvbus_http_refused_total{{reason="peer"}} {len(refused)}.0' in metrics
        assert 'kvbus_http_refused_total{reason="host"} 2.0' in metrics
        assert f"/blocks refused to {here.network.outside}: peer" in here.kvbus.log.read_text()
