"""The model of a fleet finds the costs that are there and says where it is wrong; the documents have what was written last."""

from __future__ import annotations

import json
from typing import Any

import pytest
import zmq

from tests.doubles.payloads import payload, removed, store

from . import region_tables
from .many_routers import difference, holds
from .region_model import RECOVERIES, WINDOWS, Fitted, Quantity, compare, fit, windows
from .topic_reader import TopicReader

CPU = Quantity("CPU", "ms/s", ("one", "engines", "batches"))
CLEARED = {"type": "AllBlocksCleared"}


def point(engines: int, rate: float, base: float = 20.0) -> dict[str, float]:
    batches = engines * rate
    return {"one": 1.0, "engines": engines, "batches": batches, "CPU": base + 3 * engines + 0.5 * batches}


def fleet(engines: int, blocks: int, rates: tuple[float, ...], *, slower: float = 1.0) -> dict[str, Any]:
    """A run as it is written down, whose costs are known: 5 ms of an aggregator's CPU for each engine."""

    def window(rate: float, split: tuple[int, int]) -> dict[str, Any]:
        batches = engines * rate
        size = batches * blocks
        journal = 1e3 * engines * blocks + 50 * size
        cpu = {"leaf": [0.004 + 0.001 * rate], "broker": [0.1 + 0.002 * batches], "router": [0.016 * batches]}
        spent = [slower * (0.02 + 0.005 * engines + 1e-4 * batches * each) for each in split]
        return {
            "rate": rate, "split": split, "seconds": 10.0, "load": 1.0, "others": 0.1, "batches": batches, "bytes": size,
            "sent bytes": 100 * size, "heard": batches, "heard bytes": 500.0 * batches, "written": batches,
            "journal": [journal] * 2,
            "cpu": {**cpu, "aggregator": spent},
            "rss": {"leaf": [70 + blocks / 1e3], "broker": [200.0 + engines], "aggregator": [60 + journal / 1e6] * 2,
                    "router": [16 * (40 + engines * blocks / 1e4)]},
            "hops": {"engine": size, "log": size / 2 + 9 * engines, "aggregator": size, "router 0": 8 * size,
                     "router 1": 8 * size},
        }  # fmt: skip

    took = [{"seconds": slower * (2 + 0.3 * engines), "load": 1.0, "journal": 1e3 * engines * blocks}]
    took[0] |= {"cpu aggregator": 2 + 0.2 * engines, "cpu router": 0.1 * engines}
    return {
        "engines": engines,
        "blocks": blocks,
        "rates": rates,
        "filled bytes": 0,
        "windows": [window(rate, split) for rate in rates for split in ((8, 8), (16, 0))],
        "recoveries": dict.fromkeys(("router", "aggregator", "region"), took),
    }


SMALLER = [fleet(engines, blocks, (1.0, 4.0)) for engines in (10, 30) for blocks in (1000, 4000)]


def test_the_costs_that_are_there_are_found():
    fitted = fit(CPU, [point(engines, rate) for engines in (10, 30) for rate in (1.0, 4.0)])
    assert fitted.coefficients == pytest.approx((20, 3, 0.5))
    assert fitted.worst < 1e-6
    assert fitted(point(100, 2.0)) == pytest.approx(20 + 300 + 100)


def test_no_cost_is_below_zero():
    fitted = fit(CPU, [point(engines, rate, base=-10) for engines in (10, 30) for rate in (1.0, 4.0)])
    assert fitted.coefficients[0] == 0
    assert min(fitted.coefficients) == 0
    assert fitted.worst > 0.01


def test_costs_that_nothing_tells_apart_are_one():
    fitted = fit(CPU, [point(engines, 2.0) for engines in (10, 20, 30)])
    assert fitted(point(100, 2.0)) == pytest.approx(20 + 300 + 100)
    assert fitted.coefficients.count(0) == 1


def test_records_that_come_in_one_turn_are_taken_together():
    quantity = CPU._replace(features=("one", "turns", "batches"))

    def busy(batches: float) -> dict[str, float]:
        return {"one": 1.0, "batches": batches, "CPU": 20 + batches / (1 + 0.005 * batches) + 0.1 * batches}

    fitted = fit(quantity, [busy(batches) for batches in (10, 30, 100, 200)])
    assert (fitted.turn, fitted.coefficients) == (0.005, pytest.approx((20, 1, 0.1)))
    assert fitted(busy(10_000)) == pytest.approx(busy(10_000)["CPU"])


def test_too_few_points_are_no_fit():
    with pytest.raises(ValueError, match="2 points for 3 coefficients"):
        fit(CPU, [point(10, 1.0), point(30, 1.0)])


def test_a_larger_fleet_is_predicted_from_the_smaller_ones_alone():
    others = fleet(60, 3000, (2.0,), slower=9.0)
    compared = compare([*SMALLER, others, fleet(100, 2000, (1.0,))], 100)
    assert {each.fitted.quantity.name for each in compared} >= {quantity.name for quantity in WINDOWS}
    assert max(abs(each.deviation) for each in compared) < 0.1


def test_what_is_off_by_more_than_a_fifth_stands_out():
    compared = compare([*SMALLER, fleet(100, 2000, (1.0,), slower=1.5)], 100)
    off = {row.split(" | ")[0].removeprefix("| ") for row in region_tables.model_table(compared) if "**-33 %**" in row}
    recoveries = {f"{quantity.name}, s" for quantity in RECOVERIES if "until" in quantity.name}
    assert off == {"CPU of an aggregator, ms/s", *recoveries}


def test_an_aggregator_without_routers_is_a_point_of_its_own():
    found = [each["sent"] for each in windows(fleet(10, 1000, (1.0,)))]
    assert found == [80, 80, 160, 0]


def test_one_aggregator_is_enough_until_its_core_is_full():
    compared = compare([*SMALLER, fleet(100, 2000, (1.0,))], 100)
    rows = [region_tables.sized(compared, load) for load in region_tables.LOADS]
    # 20 a process, 5 an engine, 0.1 a batch to one of 8 routers: 6,600 and 13,000 for all engines
    assert [row[4].split(",")[0] for row in rows[:2]] == ["2 x 10", "2 x 20"]


def test_the_documents_have_what_was_written_last():
    found = json.loads(region_tables.RESULTS.read_text())
    texts = region_tables.report(found), region_tables.sizes(found)
    for path, text in zip((region_tables.DOCUMENT, region_tables.SIZING), texts, strict=True):
        assert f"{region_tables.BEGIN}\n\n{text.rstrip()}\n\n{region_tables.END}" in path.read_text(), path.name


@pytest.mark.parametrize(("engines", "off"), [(60, set()), (100, {"aggregator, its CPU"})])
def test_what_the_document_says_is_off_is_what_is_off(engines, off):
    runs = json.loads(region_tables.RESULTS.read_text())["kafka"]["runs"]
    compared = compare(runs, engines)
    assert {each.fitted.quantity.name for each in compared if abs(each.deviation) > 20} == off


@pytest.fixture
def told(tmp_path):
    """A reader, and what tells it something under a number."""
    endpoint = f"ipc://{tmp_path}/aggregator"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.bind(endpoint)
    reader = TopicReader(endpoint)
    assert publisher.recv() == b"\x01"

    def tell(seq: int, *events: dict[str, Any]) -> TopicReader:
        before = reader.messages
        publisher.send_multipart([b"t", seq.to_bytes(8, "big"), payload(*events)])
        while reader.messages == before:
            reader.read()
        return reader

    yield tell
    reader.close()
    context.destroy(0)


def test_a_reader_drops_what_it_had_and_says_what_is_missing(told):
    told(5, CLEARED, store([1, 2]))
    told(6, removed([1]))
    reader = told(5, CLEARED, store([1, 2]))
    assert (reader.again, reader.violations) == (1, [])
    assert holds(reader, {b"t": {2}})
    assert told(9, CLEARED, store([3])).violations == []
    assert told(11, store([4])).violations == ["b't': 11 instead of 10, and no state"]


def test_a_block_that_is_not_there_and_one_that_is_not_known_are_told(told):
    reader = told(0, CLEARED, store([1, 2]))
    assert not holds(reader, {b"t": {1, 3}})
    assert not holds(reader, {b"t": {1, 2}, b"other": {1}})
    assert not holds(reader, {})
    assert "1 blocks are not there, 1 are not known" in difference(0, reader, {b"t": {1, 3}})


def test_a_fit_is_a_sum():
    assert Fitted(CPU, (1.0, 2.0, 3.0), 0.0)({"one": 1, "engines": 10, "batches": 100}) == 321
