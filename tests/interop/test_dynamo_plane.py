"""Tests for Dynamo's own KvRouter at an output of `type: dynamo`.

Its index stays exact when processes restart or connections are cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.config import parse_endpoint
from kvbus.parts.outputs.dynamo.messages import blocks_of, seed, tokens_hash
from kvbus.parts.outputs.dynamo.registry import EtcdStore
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import wait_for
from tests.doubles.link import Link
from tests.doubles.payloads import cleared, payload, removed, store, tokens_of
from tests.ports import ports_in_a_row

from .dynamo import PYTHON_ENV
from .support import Kvbus, stop_process, wait_for_subscribers

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.dynamo

PROGRAM = Path(__file__).with_name("programs") / "frontend.py"
RANKS = 2
SIZE = 16


class Frontend:
    """The process `programs/frontend.py` (a Dynamo worker and a KvRouter), which ends when the ``with`` block ends."""

    def __init__(self, directory: Path, env: dict[str, str] | None = None, **first: Any) -> None:
        self._log = directory / "frontend.log"
        self._env = {**os.environ, "DYN_FILE_KV": str(directory / "discovery"), **(env or {})}
        self._first = first

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [os.environ[PYTHON_ENV], PROGRAM],
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._write(self._first)
        return self

    def __exit__(self, *_: object) -> None:
        stop_process(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def __call__(self, do: str, **more: Any) -> Any:
        self._write({"do": do, **more})
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the frontend ended:\n{self._log.read_text()[-2000:]}"
        return json.loads(line)

    def holds(self, *blocks: tuple[int, int]) -> None:
        """Wait until the router holds exactly these blocks. Each block is a pair of rank and hash."""
        expected = sorted(blocks)
        wait_for(lambda: self.blocks == expected, f"{expected}, and it has {self.blocks}; log: {self._log}")

    @property
    def blocks(self) -> list[tuple[int, int]]:
        return sorted((rank, block) for rank, _, block in self("dump"))

    def _write(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        self._process.stdin.flush()


class Cable:
    """A link that a test can cut, between kvbus at 127.0.0.1 and the peers that connect to the same port at
    127.0.0.2.
    """

    def __init__(self, endpoint: str, rank: int = 0) -> None:
        port = parse_endpoint(endpoint).port + rank
        self._link = Link("router", port, port, host="127.0.0.2")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._link.start())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._link.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Close all connections of the link, and refuse new ones."""
        self._do(self._link.refuse())

    def mend(self) -> None:
        """Let the link accept new connections again."""
        self._do(self._link.listen())

    def _do(self, what: Any) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(60)


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    if not os.environ.get(PYTHON_ENV):
        pytest.skip(f"{PYTHON_ENV} names no Python with ai-dynamo-runtime (.ci/run sets it)")


@pytest.fixture
def frontend(tmp_path: Path) -> Iterator[Frontend]:
    with Frontend(tmp_path, backend="file", ranks=RANKS, block_size=SIZE) as running:
        yield running


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """The address of an etcd that runs for this test. Skip the test if etcd is not installed."""
    program = shutil.which("etcd")
    if program is None:
        pytest.skip("there is no etcd (Debian: etcd-server)")
    first = ports_in_a_row(2)
    client, peer = (f"http://127.0.0.1:{first + at}" for at in range(2))
    urls = [f"--listen-client-urls={client}", f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}"]
    more = [f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}"]
    with (tmp_path / "etcd.log").open("wb") as log:
        process = subprocess.Popen([program, f"--data-dir={tmp_path}/etcd", *urls, *more], stdout=log, stderr=log)

        def answers() -> bool:
            with contextlib.suppress(OSError):
                return EtcdStore(client).find("v1/") == {}
            return False

        try:
            wait_for(answers, f"etcd answers; log: {tmp_path}/etcd.log")
            yield client
        finally:
            stop_process(process)


@pytest.fixture
def engines() -> Iterator[list[EnginePublisher]]:
    """Publishers of the two ranks of an engine."""
    first = ports_in_a_row(2 * RANKS)
    made = [
        EnginePublisher(f"tcp://127.0.0.1:{first + rank}", f"tcp://127.0.0.1:{first + RANKS + rank}", bind=True)
        for rank in range(RANKS)
    ]
    for each in made:
        each.start()
    yield made
    for each in made:
        each.close()


@pytest.fixture
def kvbus(request: pytest.FixtureRequest, engines: list[EnginePublisher], tmp_path: Path) -> Iterator[Kvbus]:
    more = {"state_dir": str(tmp_path / "state")} if getattr(request, "param", False) else {}
    with bus(engines, tmp_path, {"discovery": f"file://{tmp_path}/discovery"}, **more) as running:
        yield running


@contextlib.contextmanager
def bus(engines: list[EnginePublisher], directory: Path, plane: dict[str, Any], **more: Any) -> Iterator[Kvbus]:
    output: dict[str, Any] = {"type": "dynamo", "profile": "dynamo-plane", "replay_endpoint": None, "dynamo": plane}
    output["endpoint"] = f"tcp://127.0.0.1:{ports_in_a_row(RANKS)}"
    source = {
        "name": "e",
        "endpoint": engines[0].endpoint,
        "replay_endpoint": engines[0].replay_endpoint,
        "data_parallel_size": len(engines),
    }
    with Kvbus(engines[0], directory, output, sources=[source], probe_interval=0.5, **more) as running:
        running.endpoint = output["endpoint"]
        for each in engines:
            wait_for_subscribers(each, 1)
        yield running


def fill(engines: list[EnginePublisher]) -> list[tuple[int, int]]:
    """Publish two prompts with a common block on each rank, and return the live blocks as pairs of rank and hash."""
    for rank, engine in enumerate(engines):
        first = 100 * rank
        engine.publish(payload(store([first + 1, first + 2]), rank=rank))
        engine.publish(payload(store([first + 3], parent=first + 1), store([first + 4], parent=first + 3), rank=rank))
        engine.publish(payload(removed([first + 2]), rank=rank))
    return [(rank, 100 * rank + block) for rank in range(RANKS) for block in (1, 3, 4)]


def prompt(*blocks: int) -> list[int]:
    return [token for block in blocks for token in tokens_of(block)]


@pytest.mark.usefixtures("kvbus")
def test_a_late_dynamo_router_has_all_blocks(engines: list[EnginePublisher], frontend: Frontend) -> None:
    truth = fill(engines)
    frontend("register")
    for _ in range(2):
        frontend("router")
        frontend.holds(*truth)
        assert frontend("ask", tokens=prompt(101, 103, 104)) == [[0, 0, 0], [1, 3, 3]]
        assert frontend("ask", tokens=prompt(1, 2)) == [[0, 1, 1], [1, 0, 0]]
        truth.append((0, 7 + len(truth)))
        engines[0].publish(payload(store([truth[-1][1]])))
        frontend.holds(*truth)


@pytest.mark.usefixtures("kvbus")
def test_a_clear_and_a_restart_of_an_engine_affect_only_its_rank(
    engines: list[EnginePublisher], frontend: Frontend
) -> None:
    frontend("register")
    frontend("router")
    frontend.holds()
    fill(engines)
    engines[1].publish(payload(store([150], medium="CPU"), rank=1))
    theirs = [(1, block) for block in (101, 103, 104, 150)]
    engines[0].publish(payload(cleared(), store([9])))
    frontend.holds((0, 9), *theirs)
    engines[1].restart()
    engines[1].publish(payload(store([109]), rank=1))
    frontend.holds((0, 9), (1, 109))


@pytest.mark.parametrize("kvbus", [False, True], indirect=True)
def test_the_dynamo_router_is_exact_after_kvbus_was_killed(
    kvbus: Kvbus, engines: list[EnginePublisher], frontend: Frontend
) -> None:
    frontend("register")
    frontend("router")
    truth = fill(engines)
    frontend.holds(*truth)
    kvbus.kill()
    engines[0].publish(payload(removed([4]), store([8])))
    kvbus.start_again()
    truth = [(0, 8), *(block for block in truth if block != (0, 4))]
    frontend.holds(*truth)
    engines[0].publish(payload(store([10], parent=8)))
    frontend.holds((0, 10), *truth)


def test_kvbus_finds_a_late_dynamo_worker_and_forgets_an_ended_worker(
    kvbus: Kvbus, engines: list[EnginePublisher], tmp_path: Path
) -> None:
    truth = fill(engines)
    sources = tmp_path / "discovery" / "v1" / "event_sources"
    assert kvbus.last_seq() is not None
    with Frontend(tmp_path, backend="file", ranks=RANKS, block_size=SIZE) as first:
        first("register")
        first("router")
        first.holds(*truth)
    wait_for(lambda: not list(sources.iterdir()), "the records of a worker whose card is gone are gone too")
    with Frontend(tmp_path, backend="file", ranks=RANKS, block_size=SIZE) as second:
        second("register")
        second("router")
        second.holds(*truth)
        kvbus.kill()


def test_a_dynamo_router_gets_missed_events_after_a_lost_connection(
    engines: list[EnginePublisher], frontend: Frontend, tmp_path: Path
) -> None:
    """The router gets the missed events when the connection returns.

    The router then already knows the publisher, and the ids of the events that it has read.
    """
    plane = {"discovery": f"file://{tmp_path}/discovery", "advertise": "127.0.0.2"}
    with bus(engines, tmp_path, plane) as kvbus, Cable(kvbus.endpoint) as first, Cable(kvbus.endpoint, 1) as second:
        truth = fill(engines)
        frontend("register")
        frontend("router")
        frontend.holds(*truth)
        for block in (5, 6):
            first.cut()
            second.cut()
            engines[0].publish(payload(removed([block - 1]), store([block]), store([block + 10], medium="CPU")))
            truth = [(0, block), (0, block + 10), *(known for known in truth if known != (0, block - 1))]
            first.mend()
            second.mend()
            frontend.holds(*truth)


def test_the_rank_in_the_batches_overrides_the_position_in_the_configuration(
    engines: list[EnginePublisher], frontend: Frontend, tmp_path: Path
) -> None:
    """By its position in the configuration the source is rank 0, but its batches name rank 1.

    A router must find its blocks under rank 1.
    """
    frontend("register")
    frontend("router")
    with bus(engines[:1], tmp_path, {"discovery": f"file://{tmp_path}/discovery"}):
        engines[0].publish(payload(store([1]), rank=1))
        frontend.holds((1, 1))
        engines[0].publish(payload(store([2], parent=1), rank=1))
        frontend.holds((1, 1), (1, 2))


def test_the_dynamo_router_finds_kvbus_by_etcd(engines: list[EnginePublisher], etcd: str, tmp_path: Path) -> None:
    truth = fill(engines)
    with bus(engines, tmp_path, {"discovery": etcd}) as kvbus:
        with Frontend(tmp_path, {"ETCD_ENDPOINTS": etcd}, backend="etcd", ranks=RANKS, block_size=SIZE) as frontend:
            frontend("register")
            frontend("router")
            frontend.holds(*truth)
            kvbus.kill_and_start_again()
            engines[0].publish(payload(store([30])))
            frontend.holds((0, 30), *truth)
            assert len(EtcdStore(etcd).find("v1/event_sources/")) == RANKS
        wait_for(lambda: not EtcdStore(etcd).find("v1/event_"), "the records of a worker that is gone are gone too", 60)


@pytest.mark.usefixtures("kvbus")
def test_the_dynamo_router_finds_blocks_with_adapters_salts_and_images(
    engines: list[EnginePublisher], frontend: Frontend
) -> None:
    frontend("register")
    frontend("router")
    image = "ab" * 32
    tokens = prompt(1, 2)
    salted = [["dynamo-cache-salt:s"], None]
    engines[0].publish(payload(store([1, 2], tokens=tokens, lora_name="a")))
    engines[0].publish(payload(store([3, 4], tokens=tokens, extra_keys=salted)))
    engines[0].publish(payload(store([5], parent=4, tokens=prompt(9), extra_keys=[None])))
    engines[0].publish(payload(store([6, 7], tokens=tokens, extra_keys=[None, [[image, 3]]])))
    frontend.holds(*((0, block) for block in range(1, 8)))

    def found(blocks: int, asked: list[int], **options: Any) -> None:
        assert frontend("ask", tokens=asked, **options)[0][1] == blocks, options

    found(2, tokens, lora_name="a")
    found(0, tokens, lora_name="b")
    found(3, tokens + prompt(9), cache_namespace="s")
    found(1, tokens)  # only one block: the second has an image
    pictures = [None, {"mm_objects": [{"mm_hash": int(image[:16], 16), "offsets": []}]}]
    found(2, tokens, block_mm_infos=pictures)


def test_kvbus_computes_the_same_hashes_as_dynamo(tmp_path: Path) -> None:
    names = st.none() | st.text(max_size=20)
    token = st.integers(0, 2**32 - 1)
    with Frontend(tmp_path, hashes=True) as dynamo:

        @settings(deadline=None, max_examples=300)
        @given(st.data(), st.integers(1, 8), st.integers(1, 5), names, names)
        def same(data: Any, size: int, count: int, lora: str | None, namespace: str | None) -> None:
            tokens = data.draw(st.lists(token, min_size=size * count, max_size=size * count))
            images = data.draw(
                st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=3), min_size=count, max_size=count)
            )
            last = data.draw(st.none() | token)
            theirs = dynamo(
                "hash",
                tokens=tokens if last is None else [*tokens, last],
                size=size,
                lora_name=lora,
                cache_namespace=namespace,
                is_eagle=last is not None,
                block_mm_infos=[
                    {"mm_objects": [{"mm_hash": image, "offsets": []} for image in each]} if each else None
                    for each in images
                ],
            )
            ours = tokens if last is None else list(zip(tokens, [*tokens[1:], last], strict=True))
            base = seed(lora, namespace)
            blocks = blocks_of(ours, size)
            assert [tokens_hash(block, base, each) for block, each in zip(blocks, images, strict=True)] == theirs

        same()
