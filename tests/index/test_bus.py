"""Tests for how `kvbus index` follows a bus: which output of the bus it reads, and at which address."""

from __future__ import annotations

import asyncio
from typing import Any

import click
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvbus.cli.index import named_streams
from kvbus.common.tasks import end_tasks
from kvbus.config import load
from kvbus.index.bus import Bus, Output, Source, UnusableError, as_seen_from, readable_output
from kvbus.tools.asking import Login

URL = "http://bus:9477"


def outputs(*sections: dict[str, Any]) -> list[Output]:
    """Return the outputs of a configuration, as an index reads them from `/overview`."""
    config = load(
        None,
        env={},
        overrides={"sources": SOURCES, "outputs": [{"name": f"out-{n}", **s} for n, s in enumerate(sections)]},
    )
    known = Output.__struct_fields__
    return [
        Output(**{name: value for name, value in each.items() if name in known}) for each in config.to_dict()["outputs"]
    ]


SOURCES = [{"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"}]
GOOD = {"endpoint": "tcp://*:5657", "replay_endpoint": "tcp://*:5658"}
OTHER = {"endpoint": "tcp://*:6657"}
TOKENLESS = {"endpoint": "tcp://*:7657", "token_ids": "drop"}
DIALLING = {"endpoint": "tcp://router:5557", "bind": False}


def test_an_index_reads_the_first_readable_output_or_the_named_output():
    found = outputs(TOKENLESS, GOOD, OTHER)
    assert readable_output(found, None, URL, curve=False).name == "out-1"
    assert readable_output(found, "out-2", URL, curve=False).name == "out-2"


@pytest.mark.parametrize(
    ("sections", "wanted", "why"),
    [
        ([GOOD, TOKENLESS], "out-1", "output out-1 has no token ids"),
        ([DIALLING], None, "output out-0 dials its router"),
        ([GOOD], "routers", "has no output 'routers'; its outputs are: out-0"),
    ],
)
def test_an_index_refuses_an_unreadable_output_with_the_reason(sections, wanted, why):
    with pytest.raises(UnusableError, match=why) as error:
        readable_output(outputs(*sections), wanted, URL, curve=False)
    assert error.value.exit_code == 78


def test_an_index_requires_keys_for_an_output_with_curve():
    (output,) = outputs(GOOD)
    output.curve_secret_key_file = "/keys/kvbus.key_secret"
    with pytest.raises(UnusableError, match="requires CURVE: give --curve-secret-key"):
        readable_output([output], None, URL, curve=False)
    assert readable_output([output], None, URL, curve=True) is output


@pytest.mark.parametrize(
    ("endpoint", "url", "seen"),
    [
        ("tcp://*:5657", URL, "tcp://bus:5657"),
        ("tcp://0.0.0.0:5657", "https://10.0.0.7:9477", "tcp://10.0.0.7:5657"),
        ("tcp://*:5657", "http://[::1]:9477", "tcp://[::1]:5657"),
        ("tcp://127.0.0.1:5657", URL, "tcp://127.0.0.1:5657"),
        ("ipc:///run/kv", URL, "ipc:///run/kv"),
    ],
)
def test_a_wildcard_endpoint_becomes_the_host_of_the_bus_url(endpoint, url, seen):
    assert as_seen_from(endpoint, url) == seen


@pytest.mark.parametrize("source", ["127.0.0.1:9477", "a=127.0.0.1:5657", "tcp://h:1,h:2", "=tcp://h:1"])
def test_an_index_refuses_a_source_without_a_scheme_and_shows_the_two_forms(source: str) -> None:
    with pytest.raises(click.UsageError, match=r"neither the URL of a bus, such as http://.*such as tcp://"):
        named_streams([source])


@pytest.mark.parametrize(
    "section",
    [
        {"endpoint": "vsock://3:5657"},
        {"endpoint": "tcp://*:65535", "replay_endpoint": None, "layout": "per_source"},
        {"topic": "kv@{zone}", "layout": "per_topic"},
    ],
    ids=["endpoint", "port", "topic"],
)
async def test_an_index_treats_a_bus_with_an_unknown_overview_as_unreachable(section):
    """If an index cannot read the ``/overview`` of a bus, it treats this bus as one that does not answer, and follows
    its other buses.
    """
    (output,) = outputs(GOOD)
    config = {"worker": "w", "model": None, "outputs": [msgspec.to_builtins(output) | section]}
    bodies = {"/overview": {"config": config}, "/sources": [msgspec.to_builtins(Source("s", 1, 1, "live", False))]}

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(bodies[request.path])

    app = web.Application()
    app.router.add_get("/{path}", answer)
    async with TestServer(app) as server:
        bus = Bus(str(server.make_url("")).rstrip("/"), Login())
        following = asyncio.create_task(bus.follow(lambda: None))
        await asyncio.wait([following, waiting := asyncio.create_task(bus.asked.wait())], return_when="FIRST_COMPLETED")
        ended = following.done()
        await end_tasks([following, waiting])
    assert not ended
    assert not bus.answers
