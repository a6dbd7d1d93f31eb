"""Tests that kvbus announces a stream in Dynamo's discovery while the stream's worker has a model card there.

It never replaces the announcement of another publisher.
"""

from __future__ import annotations

import contextlib
import json
import logging

import pytest

from kvbus.parts.outputs.dynamo import announcer
from kvbus.parts.outputs.dynamo.announcer import Announcer, Source
from kvbus.parts.outputs.dynamo.registry import CARDS, CHANNELS, INSTANCES, SOURCES, FileStore, Scope, records
from tests.doubles.bus import eventually
from tests.transport.loops import both_loops

SCOPE = Scope("dynamo", "backend", "generate")
HERE = "tcp://10.0.0.1:5857"


class Plane:
    """Dynamo's discovery in files, and a stream that kvbus announces there."""

    def __init__(self, directory):
        self.store = FileStore(directory)
        self.announcer = Announcer("o", SCOPE, self.store, "10.0.0.1")
        self.moves = []
        self.rank = 1
        self._publishers = iter(range(100, 200))

    def card(self, worker, host="10.0.0.9"):
        path = f"{SCOPE.workers}{worker:x}"
        instance = {"instance_id": worker, "transport": {"tcp": f"{host}:4000/{worker:x}/x"}}
        self.store.put(
            {
                f"{INSTANCES}/{path}": json.dumps(instance).encode(),
                f"{CARDS}/{path}": json.dumps({"type": "Model", "instance_id": worker}).encode(),
            }
        )

    def no_card(self, worker):
        self.store.delete([f"{CARDS}/{SCOPE.workers}{worker:x}"])

    def add(self, wanted=None):
        def moved(worker, publisher, rank):
            self.moves.append((worker, publisher))
            self.rank = rank

        source = Source("e", 1, HERE, wanted, lambda: next(self._publishers), moved)
        self.announcer.add(0, source)

    def announced(self):
        """The worker, publisher and endpoint of each event source that Dynamo's discovery contains."""
        channels = self.store.find(f"{CHANNELS}/{SCOPE.events}")
        found = []
        for path, body in self.store.find(f"{SOURCES}/{SCOPE.events}").items():
            about = json.loads(body)["metadata"]
            channel = json.loads(channels[path.replace(SOURCES, CHANNELS)])
            assert about["worker"]["dp_rank"] == self.rank
            found.append(
                (about["worker"]["worker_id"], about["publisher_id"], channel["transport"]["config"]["endpoint"])
            )
        return sorted(found)

    async def until(self, *expected):
        await eventually(lambda: self.seen() == list(expected), f"{expected}")

    def seen(self):
        with contextlib.suppress(KeyError, ValueError):
            return self.announced()
        return None  # only one of the two records exists


@pytest.fixture
def plane(tmp_path, monkeypatch):
    monkeypatch.setattr(announcer, "PACE", 0.01)
    return Plane(tmp_path)


@contextlib.contextmanager
def closing(plane):
    try:
        yield
    finally:
        plane.announcer.remove(0)


@both_loops
async def test_a_stream_is_announced_while_its_worker_has_a_card(plane):
    plane.add()
    with closing(plane):
        plane.card(7)
        await plane.until((7, 100, HERE))
        plane.no_card(7)
        await plane.until()
        plane.card(8)
        await plane.until((8, 102, HERE))
        assert plane.moves == [(7, 100), (None, 101), (8, 102)]
    await plane.until()


@both_loops
async def test_a_stream_is_announced_again_when_its_engine_has_another_rank(plane):
    plane.card(7)
    plane.add()
    with closing(plane):
        await plane.until((7, 100, HERE))
        plane.announcer.set_rank(0, 3)
        await plane.until((7, 101, HERE))
        assert plane.rank == 3


@both_loops
async def test_of_several_workers_that_on_the_same_host_is_announced(plane, caplog):
    for worker in (7, 8):
        plane.card(worker)
    plane.add()
    with closing(plane):
        await eventually(lambda: "cannot find worker e among Dynamo's workers [7, 8]" in caplog.text, "a warning")
        plane.card(9, host="10.0.0.1")
        await plane.until((9, 100, HERE))
    assert caplog.text.count("cannot find worker e") == 1


@both_loops
async def test_of_several_workers_the_configured_one_is_announced(plane):
    for worker in (7, 8):
        plane.card(worker)
    plane.add(wanted=8)
    with closing(plane):
        await plane.until((8, 100, HERE))


@both_loops
@pytest.mark.parametrize(
    "record",
    [
        b"",
        b'{"\xad',
        b"[]",
        b"[" * 60_000,
        b"3",
        b'{"instance_id": "x", "metadata": 3}',
        b'{"instance_id": [], "transport": {"config": 3}, "metadata": {"worker": {"worker_id": 7, "dp_rank": 1}}}',
    ],
)
async def test_malformed_records_do_not_prevent_an_announcement(plane, record):
    for bucket, path in (
        (CARDS, SCOPE.workers),
        (INSTANCES, SCOPE.workers),
        (SOURCES, SCOPE.events),
        (CHANNELS, SCOPE.events),
    ):
        plane.store.put({f"{bucket}/{path}63": record})
    plane.card(7)
    plane.add()
    with closing(plane):
        await eventually(lambda: plane.moves == [(7, 100)], "the worker is found")
        await eventually(lambda: plane.store.find(f"{SOURCES}/{SCOPE.events}64"), "the stream is announced")


@both_loops
async def test_records_of_a_killed_process_are_deleted_but_not_foreign_records(plane, caplog):
    plane.store.put(records(SCOPE, 5, 7, 1, HERE))
    plane.store.put(records(SCOPE, 6, 7, 1, "tcp://10.0.0.9:1"))
    plane.card(7)
    plane.add()
    with closing(plane):
        await plane.until((7, 6, "tcp://10.0.0.9:1"), (7, 100, HERE))
        said = "worker 7, rank 1 has another source of events at tcp://10.0.0.9:1: Dynamo's routers use neither source"
        await eventually(lambda: said in caplog.text, "a warning")


@both_loops
async def test_a_discovery_that_does_not_answer_is_logged_once_and_retried(plane, caplog, monkeypatch):
    caplog.set_level(logging.INFO)

    def fails(_prefix):
        raise OSError("no route")

    plane.card(7)
    with monkeypatch.context() as broken:
        broken.setattr(plane.store, "find", fails)
        plane.add()
        await eventually(lambda: "kvbus cannot reach Dynamo's discovery: no route" in caplog.text, "a warning")
    with closing(plane):
        await plane.until((7, 100, HERE))
        await eventually(lambda: "answers again" in caplog.text, "the end of it")
    assert caplog.text.count("kvbus cannot reach Dynamo's discovery") == 1
