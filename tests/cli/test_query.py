"""``kvbus query``: what it asks a running bus, and how it shows the answer."""

import asyncio
import json

import click
import pytest
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.cli.query import lifetime, token_ids
from tests.ports import free_port


@pytest.mark.parametrize(
    "text", ["[1, 2, 3]", "1 2 3\n", "1,2,3", "[1, 2, 3,]", '{"count": 3, "tokens": [1, 2, 3]}', "\n1\n2\n3\n"]
)
def test_token_ids_are_read_as_people_have_them(text):
    assert token_ids(text) == [1, 2, 3]


@pytest.mark.parametrize("text", ["", "[]x", "hello", '["1"]', "[1.5]", "[true]", "{}", "null", "[1, -]", "\u0661"])
def test_what_holds_no_token_ids_is_refused(text):
    with pytest.raises(click.UsageError, match="is no token id; for example"):
        token_ids(text)


async def invoke(*args, tokens=(1, 2, 3)):
    """The command in a thread of its own, so that the bus of this loop can answer."""
    runner = CliRunner()
    return await asyncio.to_thread(runner.invoke, main, ["query", *args], input=json.dumps(tokens))


def run(work):
    asyncio.run(work(asyncio.Event()))


async def test_a_bus_that_is_not_there_or_is_none_is_named(monkeypatch):
    monkeypatch.setattr("kvbus.cli.query.run_until_signal", run)
    port = free_port()
    gone = await invoke("--http", f"127.0.0.1:{port}", "--tokens", "-")
    assert (gone.exit_code, gone.stderr) == (
        69,
        f"kvbus: no bus answers at http://127.0.0.1:{port} (connection refused)\n",
    )
    odd = await invoke("--http", "ftp://host", "--tokens", "-")
    assert (odd.exit_code, "is not HOST:PORT" in odd.stderr) == (2, True)
    neither = await invoke()
    assert (neither.exit_code, "either --tokens FILE or --hashes" in neither.stderr) == (2, True)


@pytest.mark.parametrize(
    ("buckets", "said"),
    [
        ({"1.0": 0, "+Inf": 0}, "none has gone that was seen to come"),
        ({"1.0": 1, "3.0": 1, "+Inf": 1}, "half live up to 3.0 s"),
        ({"1.0": 1, "3.0": 0, "+Inf": 2}, "half live longer than 3.0 s"),
    ],
)
def test_half_of_the_lifetimes(buckets, said):
    assert lifetime(buckets) == said
