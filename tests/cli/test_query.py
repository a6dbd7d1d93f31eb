"""Tests for ``kvbus query``, which looks up a prompt: in an index process, or in an index that it builds itself."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import click
import pytest

from kvbus.cli.query import token_ids
from kvbus.core.wire.encoding import encode_value
from kvbus.core.wire.schema import BlockStored
from kvbus.transport.engine.publisher import EnginePublisher
from tests.client.blocks import batch, stored, tokens
from tests.doubles.bus import wait_for
from tests.index.programs import Bus, Engine, Index, Truth, running, tokens_of
from tests.ports import free_port


@pytest.mark.parametrize(
    "text", ["[1, 2, 3]", "1 2 3\n", "1,2,3", "[1, 2, 3,]", '{"count": 3, "tokens": [1, 2, 3]}', "\n1\n2\n3\n"]
)
def test_query_reads_token_ids_in_each_common_notation(text):
    assert token_ids(text) == [1, 2, 3]


@pytest.mark.parametrize(
    "text", ["", "hello", '["1"]', "[1.5]", "[true]", "null", "[1, -]", "\u0661", "9" * 5000, "[[]]"]
)
def test_query_refuses_a_file_without_token_ids(text):
    with pytest.raises(click.UsageError, match="is not a token id; for example"):
        token_ids(text)


@pytest.mark.parametrize("text", ["[1, 2", "[1, 2,\n", "1, 2]", "[]x", '{"tokens": [1, 2', "[" * 200_000])
def test_query_refuses_a_truncated_list_of_token_ids(text):
    with pytest.raises(click.UsageError, match="is the file cut off"):
        token_ids(text)


@pytest.mark.parametrize("text", ["[]", '{"tokens": []}'])
def test_query_refuses_an_empty_list_of_token_ids(text):
    with pytest.raises(click.UsageError, match="the list is empty; for example"):
        token_ids(text)


@pytest.mark.parametrize(("hashes", "both"), [("1234,5678", True), ("123,5678", False), ("0x1234,0x5678", False)])
def test_query_warns_about_hashes_that_may_be_integers_or_bytes(hashes, both):
    done = query("--hashes", hashes, "--http", f"127.0.0.1:{free_port()}")
    assert (done.returncode, "as an integer and as hexadecimal bytes" in done.stderr) == (69, both)


@pytest.mark.parametrize("text", ["{}", '{"token_ids": [1]}'])
def test_query_refuses_a_json_object_without_tokens(text):
    with pytest.raises(click.UsageError, match='the object has no "tokens"'):
        token_ids(text)


def test_query_refuses_a_file_that_is_not_text(tmp_path):
    file = tmp_path / "tokens"
    file.write_bytes(b"\xff\xfe")
    done = query("--tokens", str(file))
    assert (done.returncode, "is not a text file" in done.stderr) == (2, True)


def query(*args: str, tokens: Any = (1, 2, 3)) -> subprocess.CompletedProcess[str]:
    """Run ``kvbus query`` as a process that reads the token ids from its standard input."""
    command = [sys.executable, "-m", "kvbus", "query", *args]
    return subprocess.run(command, input=json.dumps(tokens), capture_output=True, text=True, timeout=100, check=False)


class Scene:
    """A running engine, a bus and an index, with a prompt whose blocks the engine holds."""

    def __init__(self, engine: Engine, bus: Bus, index: Index, truth: Truth) -> None:
        self.engine = engine
        self.bus = bus
        self.index = index
        chain = max(truth.chains(), key=len)
        self.tokens = tokens_of(chain)
        ((blocks, tiers),) = truth.expected(chain).values()
        self.blocks = blocks
        self.tiers = ", ".join(f"{medium} {tiers[medium]}" for medium in ("GPU", "CPU") if medium in tiers)
        self.held = f"{blocks} blocks, {len(self.tokens)} tokens"


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Iterator[Scene]:
    directory = tmp_path_factory.mktemp("query")
    engine = Engine(directory, "engine")
    truth = engine.truth()
    bus = Bus(directory, "pod-a", engine)
    index = Index(directory, bus.http)
    with running(engine, bus, index):
        wait_for(lambda: bus.has(truth), "the bus knows every block")
        wait_for(index.ready, "the index is ready")
        wait_for(lambda: not index.ask(tokens=[1])["incomplete"], "the index is complete")
        yield Scene(engine, bus, index, truth)


def test_query_prints_the_answer_of_an_index(scene):
    at = "--http", scene.index.http
    shown = query(*at, "--tokens", "-", tokens=scene.tokens)
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"engine  {scene.held}: ")
    assert all(each in shown.stdout for each in scene.tiers.split(", "))
    raw = json.loads(query(*at, "--tokens", "-", "--json", tokens=scene.tokens).stdout)
    assert raw == scene.index.ask(tokens=scene.tokens)
    nobody = query(*at, "--tokens", "-", "--salt", "s", tokens=scene.tokens)
    assert (nobody.returncode, nobody.stderr) == (0, "kvbus: no source holds a block of the prompt\n")
    refused = query(*at, "--hashes", "xyz")
    assert (refused.returncode, "hashes[0] is neither" in refused.stderr) == (2, True)


def test_query_without_an_index_reads_the_replay_of_a_bus_or_an_engine(scene):
    asked = json.loads(query("--http", scene.index.http, "--tokens", "-", "--json", tokens=scene.tokens).stdout)
    by_bus = query(scene.bus.http, "--tokens", "-", "--json", tokens=scene.tokens)
    assert (by_bus.returncode, json.loads(by_bus.stdout)) == (0, asked)
    for pair in (f"{scene.bus.out},{scene.bus.out_replay}", f"engine={scene.engine.endpoint},{scene.engine.replay}"):
        copies = ("--copies",) if pair.startswith("engine=") else ()
        shown = query(pair, *copies, "--tokens", "-", tokens=scene.tokens)
        assert (shown.returncode, f"  {scene.held}: " in shown.stdout) == (0, True), shown


def test_query_explains_why_it_has_no_answer():
    port = free_port()
    gone = query("--http", f"127.0.0.1:{port}", "--tokens", "-")
    why = f"kvbus: no index answers at http://127.0.0.1:{port} (connection refused): start `kvbus index`, or name a SOURCE\n"
    assert (gone.returncode, gone.stderr) == (69, why)
    odd = query("--http", "ftp://host", "--tokens", "-")
    assert (odd.returncode, "is not HOST:PORT" in odd.stderr) == (2, True)
    neither = query()
    assert (neither.returncode, "either --tokens FILE or --hashes" in neither.stderr) == (2, True)
    silent = query(f"tcp://127.0.0.1:{port},tcp://127.0.0.1:{port}", "--tokens", "-", "--timeout", "1")
    assert (silent.returncode, "no answer from tcp://127.0.0.1" in silent.stderr) == (69, True)
    without = query(f"tcp://127.0.0.1:{port}", "--tokens", "-")
    assert (without.returncode, "has no replay endpoint" in without.stderr) == (2, True)


async def test_query_refuses_a_stream_without_token_ids():
    async with EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True) as engine:
        engine.publish(batch(BlockStored((1, 2), None, encode_value([]), 16)))
        answer = await in_thread(f"{engine.endpoint},{engine.replay_endpoint}")
        assert (answer.returncode, "has no token ids (token_ids: drop)" in answer.stderr) == (78, True)
        engine.publish(batch(stored(1)))
        answer = await in_thread(f"a={engine.endpoint},{engine.replay_endpoint}")
        assert (answer.returncode, answer.stdout) == (0, "a  1 blocks, 2 tokens: GPU 1\n")


async def in_thread(source: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(query, source, "--tokens", "-", tokens=tokens(1))
