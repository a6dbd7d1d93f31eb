"""``kvbus query``: what it asks a running bus, and how it shows the answer."""

import asyncio
import json
import re

import click
import pytest
from click.testing import CliRunner

from kvbus.admin import query as module
from kvbus.admin.access import Access
from kvbus.cli import main
from kvbus.cli.query import lifetime, token_ids
from kvbus.core.stats import HttpRefusal
from tests.admin.test_query import BEST, LARGE, TOKENS, asking
from tests.doubles.payloads import removed
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


async def invoke(*args, tokens=TOKENS):
    """The command in a thread of its own, so that the bus of this loop can answer."""
    runner = CliRunner()
    return await asyncio.to_thread(runner.invoke, main, ["query", *args], input=json.dumps(tokens))


async def test_it_shows_who_holds_what(monkeypatch):
    monkeypatch.setattr(module, "BUILD_TIMEOUT", 0.001)  # the first answer is that the tree is being built
    monkeypatch.setattr("kvbus.cli.query.run_until_signal", run)
    async with asking() as here:
        where = ["--http", here.url.removesuffix("/query")]
        shown = await invoke(*where, "--tokens", "-")
        assert (shown.exit_code, shown.output) == (0, "engine  3 blocks, 48 tokens: GPU 3, CPU 1\n")
        raw = await invoke(*where, "--hashes", f"{LARGE}, 2,0x3", "--json")
        assert json.loads(raw.output) == {"results": [{"matches": [BEST]}], "incomplete": []}
        nobody = await invoke(*where, "--tokens", "-", "--salt", "s")
        assert (nobody.exit_code, nobody.stderr) == (0, "kvbus: no source holds anything of it\n")
        refused = await invoke(*where, "--hashes", "xyz")
        assert (refused.exit_code, "hashes[0] is neither" in refused.stderr) == (2, True)


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


async def test_a_bus_that_refuses_says_why(monkeypatch):
    monkeypatch.setattr("kvbus.cli.query.run_until_signal", run)
    monkeypatch.setattr(Access, "refusal", lambda *_: HttpRefusal.HOST)
    async with asking() as here:
        refused = await invoke("--http", here.url.removesuffix("/query"), "--tokens", "-")
        assert "the Host header has to be localhost" in refused.stderr


async def test_analytics(monkeypatch):
    monkeypatch.setattr("kvbus.cli.query.run_until_signal", run)
    async with asking(analytics=True) as here:
        where = ["--http", here.url.removesuffix("/query"), "--analytics"]
        await here.say(removed([3]))
        shown = await invoke(*where)
        assert (shown.exit_code, shown.stderr) == (0, "")
        assert re.fullmatch(
            r"engine  2 live blocks, 0% of them elsewhere too; 0\.0\d* stored and 0\.0\d* removed a second; "
            r"0% of 3 stored again; half live up to 1\.0 s\n",
            shown.stdout,
        )
        both = await invoke(*where, "--tokens", "-")
        assert both.stdout.splitlines()[1].startswith("engine  2 blocks, 32 tokens: GPU 2")
        assert json.loads((await invoke(*where, "--json")).stdout)["analytics"][0]["blocks"]["live"] == 2
    assert (await invoke()).exit_code == (await invoke("--analytics", "--lora", "a")).exit_code == 2
    async with asking() as here:
        off = await invoke("--http", here.url.removesuffix("/query"), "--analytics")
        assert (off.exit_code, "analytics are off; the configuration has to say" in off.stderr) == (2, True)


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
