"""Tests that `kvbus index` notices workers of one model that give the same prompts different hashes."""

from __future__ import annotations

import logging

import pytest

from kvbus.client import Worker
from kvbus.client.prefix_index import PrefixIndex
from kvbus.core.findings.engine import HASHES_DIFFER
from kvbus.core.wire.codec import decode
from kvbus.core.wire.schema import Batch
from kvbus.index.agreement import SAMPLE, Agreement, Named
from tests.doubles.bus import wait_for
from tests.doubles.payloads import payload, store
from tests.index.programs import Bus, Engine, Index, http, running

ONE, OTHER, THIRD = (Worker(name, None) for name in ("one", "other", "third"))
SAME = "one-model"


def hashes_by_worker(**hashes: list[int]) -> Named:
    """Return the block hashes of each worker, by a digest of the prompt up to the block's end.

    Each worker holds the first blocks of the same prompt. ``hashes`` has the hashes of these blocks, by worker.
    """
    index = PrefixIndex[Worker]()
    for name, blocks in hashes.items():
        batch = decode(payload(store(blocks, tokens=list(range(16 * len(blocks))))))
        assert isinstance(batch, Batch)
        for event in batch.events:
            index.apply(Worker(name, None), event)
    return {worker: index.names(worker, SAMPLE) for worker in index.workers}


def test_workers_with_the_same_hashes_are_not_reported(caplog):
    agreement = Agreement()
    agreement.compare(hashes_by_worker(one=[1, 2], other=[1, 2, 3]), lambda _: SAME)
    assert (agreement.shared[ONE], agreement.shared[OTHER]) == (2, 2)
    assert not agreement.differing.total()
    assert not caplog.records


def test_the_start_and_end_of_a_hash_difference_are_reported_once(caplog):
    caplog.set_level(logging.INFO)
    agreement = Agreement()
    for _ in range(2):
        agreement.compare(hashes_by_worker(one=[1, 2], other=[1, 7], third=[1, 2]), lambda _: SAME)
    assert (agreement.differing[OTHER], agreement.differing[THIRD], agreement.shared[THIRD]) == (1, 0, 2)
    (said,) = caplog.messages
    finding = HASHES_DIFFER(one="one", other="other")
    assert said == f"index: {finding}"
    assert "PYTHONHASHSEED is unset" in said
    agreement.compare(hashes_by_worker(one=[1, 2]), lambda _: SAME)
    assert len(caplog.messages) == 1, "nothing is compared now"
    agreement.compare(hashes_by_worker(one=[1, 2], other=[1, 2]), lambda _: SAME)
    (over,) = caplog.messages[1:]
    assert over.endswith(f"s: {finding.text}")
    assert over.startswith("index: ended after ")


def test_workers_of_different_models_and_other_prompts_are_not_compared():
    agreement = Agreement()
    agreement.compare(hashes_by_worker(one=[1, 2], other=[7, 8]), lambda worker: worker.name)
    assert not agreement.shared.total()


@pytest.mark.slow
def test_an_index_names_engines_with_different_hashes(tmp_path):
    engines = [Engine(tmp_path, f"engine-{n}", *more) for n, more in enumerate(([], [], ["--hashes", "bytes"]))]
    buses = [Bus(tmp_path, f"pod-{n}", engine) for n, engine in enumerate(engines)]
    index = Index(tmp_path, *(bus.http for bus in buses))
    with running(*engines, *buses, index):
        wait_for(lambda: "different hashes" in index.said, "the disagreement in the log")
        lines = [line for line in index.said.splitlines() if "different hashes" in line]
        assert all("engine-2" in line for line in lines), lines
        metrics = http(f"{index.http}/metrics")[1].decode()
    readings = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if "_blocks{" in line)
    differing = {key.partition('source="')[2].partition('"')[0]: float(value)
                 for key, value in readings.items() if "differing" in key}  # fmt: skip
    assert differing["engine-2"] == max(differing.values()) > 0
