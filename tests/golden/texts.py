"""Golden texts: what users read and programs parse, recorded word by word in ``data``."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kvbus.common.errors import ConfigError
from kvbus.config.load import load
from tests.doubles.bus import running_bus

DATA: Final = Path(__file__).with_name("data")


def texts() -> dict[str, Callable[[], str]]:
    """Every golden text by the name of its file in ``data``."""
    return {
        "configurations.txt": lambda: "".join(_configurations()),
        "defaults.yaml": _defaults,
        "metrics.txt": lambda: "".join(f"{line}\n" for line in sorted(_metrics())),
    }


def _configurations() -> Iterator[str]:
    """What kvbus says of each configuration in ``configurations.jsonl``, all of which are bad."""
    for number, line in enumerate((DATA / "configurations.jsonl").read_text().splitlines(), 1):
        case: dict[str, Any] = json.loads(line)
        yield f"# line {number}\n{_refused(**case)}\n\n"


def _refused(file: str | None, environment: dict[str, str], flags: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as directory:
        path = None if file is None else Path(directory) / "kvbus.yaml"
        if path is not None and file is not None:
            path.write_text(file)
        try:
            load(path, env=environment, overrides=flags)
        except ConfigError as error:
            return f"exit {error.exit_code.value}: {error}".replace(f"{directory}/", "")
    return "accepted"


def _defaults() -> str:
    """The whole configuration that a bus with one source and one output has."""
    overrides = {"worker": "w", "sources": [{"endpoint": "tcp://127.0.0.1:5557"}], "outputs": [{}]}
    return load(None, env={}, overrides=overrides).to_yaml()


def _metrics() -> Iterator[str]:
    """Name, type and labels of every metric of a bus with each optional part."""
    for family in text_string_to_metric_families(asyncio.run(_scraped())):
        if family.name.startswith("kvbus_"):
            labels = sorted({label for sample in family.samples for label in sample.labels})
            yield f"{family.name} {family.type} {','.join(labels)}"


async def _scraped() -> str:
    found = {"name": "workers", "discover": {"file": {"path": "/nonexistent"}}}
    front = {"listen": "127.0.0.1:0", "engine": "http://127.0.0.1:1", "source": "engine"}
    grpc = {**front, "engine": "127.0.0.1:1"}
    async with running_bus(more_sources=[found], output={"layout": "merged"}, front=front, front_grpc=grpc) as bus:
        assert bus.daemon.http_address is not None
        host, port = bus.daemon.http_address
        async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}/metrics") as answer:
            return await answer.text()
