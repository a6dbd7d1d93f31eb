"""Golden texts: what kvbus prints for people and programs, recorded word by word in ``data``."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kvbus.common.errors import ConfigError
from kvbus.config.load import load
from kvbus.telemetry.table import OUTPUTS
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually, running_bus
from tests.doubles.payloads import payload, removed, store
from tests.doubles.socket_routers import RouterOnASet

DATA: Final = Path(__file__).with_name("data")


def texts() -> dict[str, Callable[[], str]]:
    """Return the function that makes each golden text, by the name of the text's file in ``data``."""
    return {
        "configurations.txt": lambda: "".join(_configurations()),
        "defaults.yaml": _defaults,
        "fields.txt": lambda: "".join(f"{line}\n" for line in _fields()),
        "metrics.txt": lambda: "".join(f"{line}\n" for line in sorted(_metrics())),
    }


def _configurations() -> Iterator[str]:
    """Yield kvbus's error for each configuration in ``configurations.jsonl``. All of them are invalid."""
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
    """Return, as YAML, the configuration of a kvbus with one source and one output, with all default values."""
    overrides = {"worker": "w", "sources": [{"endpoint": "tcp://127.0.0.1:5557"}], "outputs": [{}]}
    return load(None, env={}, overrides=overrides).to_yaml()


def _metrics() -> Iterator[str]:
    """Yield name, type and labels of every metric, with each optional part enabled."""
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
        bus.daemon.output_stats[0].parts = frozenset({row.part for row in OUTPUTS} - {""})
        host, port = bus.daemon.http_address
        async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}/metrics") as answer:
            return await answer.text()


def _fields() -> Iterator[str]:
    """Yield every field of the JSON that kvbus and its commands print, with the type of its value."""
    with tempfile.TemporaryDirectory() as directory:
        for origin, values in asyncio.run(_printed(directory)).items():
            yield from sorted({f"{origin}  {line}" for value in values for line in _typed(value)})


def _typed(value: object, at: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from _typed(each, f"{at}.{name}")
    elif isinstance(value, list) and value:
        for each in value:
            yield from _typed(each, f"{at}[]")
    else:
        yield f"{at or '.'}: {type(value).__name__}"


async def _printed(directory: str) -> dict[str, list[Any]]:
    """Return the JSON of a kvbus's HTTP paths and of each command, by its origin.

    The kvbus has one engine and one router.
    """
    async with running_bus(worker="w", state_dir=directory) as bus:
        assert bus.daemon.http_address is not None
        http = "http://{}:{}".format(*bus.daemon.http_address)
        router = RouterOnASet(bus.out, bus.out_replay)
        router.subscribe()
        with contextlib.closing(router):
            stats = bus.daemon.outputs.stats[0]
            await eventually(lambda: stats.subscribers == 1, "the router's subscription")
            async with EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine:
                await engine.wait_for_subscriber(60)
                for event in (store([1, 2]), removed([2])):
                    engine.publish(payload(event))
                await eventually(lambda: bus.caught_up(1) and router.read() == 2, "two batches at the router")
                async with aiohttp.ClientSession() as session:
                    found = {path: [await (await session.get(http + path)).json()] for path in ("/sources", "/routers")}
                source = f"{bus.out},{bus.out_replay}"
                running = (
                    _command("doctor", "--http", http),
                    _command("query", source, "--hashes", "1"),
                    _command("tail", bus.out, "--replay-endpoint", bus.out_replay, "--from-start", "--count", "2"),
                )
                found |= dict(await asyncio.gather(*running))
    check = _command("check", "--source", "tcp://127.0.0.1:1", "--output", "tcp://*:2", "--without-keys")
    return found | dict(await asyncio.gather(check, _command("state", "show", "-d", directory)))


async def _command(*words: str) -> tuple[str, list[Any]]:
    """Run a kvbus command with ``--json``. Return its name and its output."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "kvbus", *words, "--json")
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    said, errors = await process.communicate()
    name = " ".join(itertools.takewhile(lambda word: word.isalpha(), words))
    assert said, f"{name}: {errors.decode()}"
    try:
        return f"kvbus {name}", [json.loads(said)]
    except json.JSONDecodeError:  # one object per line
        return f"kvbus {name}", [json.loads(line) for line in said.splitlines()]
