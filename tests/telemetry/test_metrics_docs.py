"""Tests that docs/METRICS.md has every name, type, label and label value of `/metrics`, and no other."""

import ast
import asyncio
import re
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvbus.core.stats import OutputStats, SourceStats
from kvbus.core.types import Refused
from kvbus.telemetry.table import OUTPUTS
from kvbus.transport.zmtp.reasons import DISCONNECTS, REFUSALS, Reason
from tests.doubles.bus import running_bus
from tests.typed import there

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "METRICS.md").read_text()
PROTOCOL = (ROOT / "docs" / "PROTOCOL.md").read_text()
BUS = TEXT.partition("## The index")[0]
EVERY_PART = frozenset({row.part for row in OUTPUTS} - {""})
ROW = re.compile(r"^\| `(kvbus_\w+)` \| (\w+) \|([^|]*)\| ([^|]+) \|$", re.MULTILINE)
NAMED_BY_THE_CONFIGURATION = {"source", "output", "discovery", "stream", "version", "medium", "router", "le"}


def documented():
    found = ROW.findall(BUS)
    assert len({name for name, *_ in found}) == len(found), "a metric is in the tables twice"
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in found}


@pytest.fixture(scope="module")
def families():
    async def scrape():
        found = {"name": "workers", "discover": {"file": {"path": "/nonexistent"}}}
        front = {"listen": "127.0.0.1:0", "engine": "http://127.0.0.1:1", "source": "engine"}
        grpc = {**front, "engine": "127.0.0.1:1"}
        everything = running_bus(more_sources=[found], output={"layout": "merged"}, front=front, front_grpc=grpc)
        async with everything as bus, aiohttp.ClientSession() as session:
            bus.daemon.output_stats[0].parts = EVERY_PART
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


def test_the_documented_metrics_are_exactly_the_existing_metrics(families):
    written, shown = documented(), live(families)
    silent = {f"{each.name}_total" if each.type == "counter" else each.name for each in families if not each.samples}
    assert "kvbus_router_queue_batches" in silent, "no router with a name is connected"
    assert {name: value for name, value in written.items() if name not in silent} == {
        name: value for name, value in shown.items() if name not in silent
    }
    assert silent <= written.keys()


def test_every_row_of_the_metrics_tables_is_compared():
    """This module reads every row of the tables. A row that it could not read would not be compared."""
    assert len(re.findall(r"^\| `kvbus_", BUS, re.MULTILINE)) == len(documented())


def test_every_value_of_a_bounded_label_is_documented(families):
    values = {
        value
        for family in families
        for sample in family.samples
        for label, value in sample.labels.items()
        if label not in NAMED_BY_THE_CONFIGURATION | {"type"}
    }
    assert values
    in_prose = set(re.findall(r"`(\w+)`", TEXT + PROTOCOL))
    assert values <= in_prose, "values of a label that nobody is told of"


@pytest.mark.parametrize(("peer", "reasons"), [("an engine", Refused), ("a router", REFUSALS)])
def test_the_table_of_failed_handshakes_has_exactly_the_reasons_of_the_code(peer, reasons):
    _, _, rest = BUS.partition(f"| `reason` of a failed handshake with {peer} |")
    table, _, _ = rest.partition("\n\n")
    first = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert sorted(re.findall(r"`(\w+)`", "".join(first))) == sorted(map(str, reasons))


def test_metrics_have_every_refusal_and_disconnect_reason_from_the_start():
    assert {*REFUSALS, *DISCONNECTS} == set(Reason)


OPTIONAL = ROOT / "kvbus" / "parts" / "outputs" / "dynamo"
"""Directory of an optional output type. Its reasons appear in metrics only for outputs of this type."""


def counted_by_name(paths):
    """Return every reason that kvbus's code counts under a literal name, each with its counter."""
    counters = {*SourceStats.__struct_fields__, *OutputStats.__struct_fields__}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
                name, keys = node.value.attr, [node.slice]
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "_drop"
                and "outputs" in path.parts  # only the method of output drivers drops events
            ):
                name, keys = "dropped_events", node.args
            else:
                continue
            for key in keys if name in counters else ():
                for each in ast.walk(key):
                    if isinstance(each, ast.Constant) and isinstance(each.value, str):
                        yield name, each.value


def test_every_counted_reason_is_documented_and_in_the_first_scrape(families):
    shown = {
        (family.name.removeprefix("kvbus_").removeprefix("output_"), value)
        for family in families
        for sample in family.samples
        for value in sample.labels.values()
    }
    modules = set((ROOT / "kvbus").rglob("*.py"))
    optional = set(OPTIONAL.rglob("*.py"))
    counted = set(counted_by_name(modules - optional))
    assert {("dropped_events", "slow_router"), ("dropped_events", "other_group")} < counted
    assert counted <= shown
    for name, reason in counted | set(counted_by_name(optional)):
        assert f"`{reason}`" in TEXT, name


def test_metric_names_follow_the_openmetrics_rules(families):
    for family in families:
        assert family.documentation
        assert not family.name.endswith(("_count", "_sum", "_bucket", "_created"))
        assert "created" not in {sample.name.rpartition("_")[2] for sample in family.samples}
