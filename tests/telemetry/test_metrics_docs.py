"""docs/METRICS.md says what `/metrics` has: every name, type, label and label value, and nothing else."""

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvbus.transport.zmtp.reasons import DISCONNECTS, REFUSALS, Reason
from tests.system.bus import running_bus
from tests.typed import there

TEXT = (Path(__file__).parents[2] / "docs" / "METRICS.md").read_text()
ROW = re.compile(r"^\| `(kvbus_\w+)` \| (\w+) \|([^|]*)\| ([^|]+) \|$", re.MULTILINE)
NAMED_BY_THE_CONFIGURATION = {"source", "output", "stream", "version", "medium", "le"}


def documented():
    found = ROW.findall(TEXT)
    assert len({name for name, *_ in found}) == len(found), "a metric is in the tables twice"
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in found}


@pytest.fixture(scope="module")
def families():
    async def scrape():
        async with running_bus() as bus, aiohttp.ClientSession() as session:
            host, port = there(bus.daemon.http_address)
            async with session.get(f"http://{host}:{port}/metrics") as answer:
                return await answer.text()

    text = asyncio.run(scrape())
    return [family for family in text_string_to_metric_families(text) if family.name.startswith("kvbus_")]


def live(families):
    found = {}
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, frozenset(labels))
    return found


def test_every_metric_is_documented_and_every_documented_one_is_there(families):
    assert documented() == live(families)


def test_every_line_of_a_table_is_read():
    """A row this test cannot read would not be compared."""
    assert len(re.findall(r"^\| `kvbus_", TEXT, re.MULTILINE)) == len(documented())


def test_every_value_of_a_bounded_label_is_documented(families):
    values = {
        value
        for family in families
        for sample in family.samples
        for label, value in sample.labels.items()
        if label not in NAMED_BY_THE_CONFIGURATION | {"type"}
    }
    assert values
    in_prose = set(re.findall(r"`(\w+)`", TEXT))
    assert values <= in_prose, "values of a label that nobody is told of"


@pytest.mark.parametrize("name", ["kvbus_events_rejected", "kvbus_events_filtered"])
def test_the_reasons_listed_are_the_reasons_there_are(families, name):
    word = name.rpartition("_")[2]
    lists = re.findall(r"`reason` of a (rejection|filter):\n(.*?)\n\n", TEXT, re.DOTALL)
    told = {
        ("rejected" if kind == "rejection" else "filtered"): set(re.findall(r"`(\w+)`", body)) for kind, body in lists
    }
    (family,) = [family for family in families if family.name == name]
    assert told[word] == {sample.labels["reason"] for sample in family.samples}


def test_every_reason_of_a_router_that_is_refused_or_leaves_is_shown_from_the_start():
    assert {*REFUSALS, *DISCONNECTS} == set(Reason)


def test_names_follow_the_rules(families):
    for family in families:
        assert family.documentation
        assert not family.name.endswith(("_count", "_sum", "_bucket", "_created"))
        assert "created" not in {sample.name.rpartition("_")[2] for sample in family.samples}
