"""Tests that give the specification's test vectors to the real Dynamo indexer.

A file in docs/spec/results has the expected result for each vector.
"""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING, Any, Final

import pytest
import zmq

from kvbus.tools.conform.vectors import END, VECTORS, Vector, message, stored
from tests.conform.results import RESULTS
from tests.interop.dynamo import MASK, PYTHON_ENV, DynamoIndexer

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.dynamo, pytest.mark.slow]

WRONG: Final = json.loads((RESULTS / "vectors-dynamo-1.6.1-indexer.json").read_text())
TIERS: Final = {"GPU": "device", "CPU": "host_pinned", "DISK": "disk"}
NO_FURTHER: Final = "and it reads no further"
LAST: Final = 999
"""Hash of a block that the test stores after each vector. An indexer that has it has read the complete vector."""


class Publisher:
    """A publisher that sends the frames of a test vector unchanged, and gives the vector's answer to each replay
    request.
    """

    def __init__(self, context: zmq.Context[Any], vector: Vector) -> None:
        self._live = context.socket(zmq.XPUB)
        self._replay = context.socket(zmq.ROUTER)
        self.live = f"tcp://127.0.0.1:{self._live.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay = f"tcp://127.0.0.1:{self._replay.bind_to_random_port('tcp://127.0.0.1')}"
        self._answer = vector.replay or [END]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over.is_set():
            if self._replay.poll(50):
                peer = self._replay.recv_multipart()[0]
                for frames in self._answer:
                    self._replay.send_multipart([peer, *frames])

    def wait_for_a_subscription(self) -> None:
        assert self._live.poll(60_000)
        self._live.recv()

    def send(self, frames: list[bytes]) -> None:
        self._live.send_multipart(frames)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        for each in (self._live, self._replay):
            each.close(0)


@pytest.fixture(scope="module")
def indexer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DynamoIndexer]:
    if not os.environ.get(PYTHON_ENV):
        pytest.skip(f"{PYTHON_ENV} names no Python with ai-dynamo-runtime; .ci/run does that")
    with DynamoIndexer(tmp_path_factory.mktemp("dynamo") / "log") as running:
        yield running


@pytest.fixture
def publish() -> Iterator[Any]:
    made: list[Publisher] = []
    context = zmq.Context()

    def make(vector: Vector) -> Publisher:
        made.append(Publisher(context, vector))
        return made[-1]

    yield make
    for each in made:
        each.close()
    context.term()


def next_seq(vector: Vector) -> int:
    """Return the seq after the highest valid seq in a test vector."""
    numbers = [int.from_bytes(frames[1][:8], "big") for frames in vector.live if len(frames[1]) >= 8]
    return max(number for number in numbers if number < 2**63) + 1


def test_the_table_of_deviations_names_only_test_vectors() -> None:
    assert WRONG.keys() <= VECTORS.keys()


def finds(indexer: DynamoIndexer, model: str, tokens: list[int]) -> bool:
    """Return whether the indexer finds these tokens in 60 s. If it is known to fail at this vector, wait only 3 s."""
    try:
        indexer.wait_until_finds(model, tokens, 3.0 if NO_FURTHER in WRONG.get(model, "") else 60.0)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", VECTORS)
def test_the_dynamo_indexer_has_the_expected_result_for_each_vector(
    name: str, indexer: DynamoIndexer, publish: Any
) -> None:
    vector = VECTORS[name]
    engine = publish(vector)
    indexer.register(name, engine.live, engine.replay, 2)
    engine.wait_for_a_subscription()
    for frames in [*vector.live, message(next_seq(vector), stored(LAST))]:
        engine.send(frames)
    reads_on = finds(indexer, name, stored(LAST)["token_ids"])
    found = {(block.tier, block.hash) for block in indexer.blocks(name) if block.hash != LAST}
    view = {(TIERS[medium], block & MASK if isinstance(block, int) else block) for _, medium, block in vector.view}
    missing, dead = len(view - found), len(found - view)
    said = ", ".join([f"{missing} missing"] * bool(missing) + [f"{dead} dead"] * bool(dead))
    assert ", ".join([said] * bool(said) + [NO_FURTHER] * (not reads_on)) == WRONG.get(name, "")
