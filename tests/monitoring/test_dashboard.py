"""Tests for the dashboards: their script generates them, Grafana's types accept them, and every panel shows data."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any, Final

import pytest

from kvbus.telemetry.table import OUTPUTS
from tests.monitoring.conftest import BusState
from tests.monitoring.faults import KVBUS
from tests.monitoring.prometheus import ROOT

FILES: Final = {file.stem: file for file in sorted((ROOT / "deploy" / "grafana").glob("*.json"))}
DASHBOARDS: Final[dict[str, dict[str, Any]]] = {name: json.loads(file.read_text()) for name, file in FILES.items()}
EVERY: Final[list[dict[str, Any]]] = [panel for each in DASHBOARDS.values() for panel in each["panels"]]
PANELS: Final[list[dict[str, Any]]] = [panel for panel in EVERY if panel["type"] != "row"]
VARIABLES: Final[dict[str, dict[str, Any]]] = {each["name"]: each for each in DASHBOARDS["kvbus"]["templating"]["list"]}
NOT_MADE: Final = {row.name for row in OUTPUTS if row.part in {"interpose", "dynamo"} or row.name.startswith("router_")}
"""Names of metrics of optional parts that no kvbus of the test uses. They are absent from its /metrics."""
OF_GRAFANA: Final = {"$__rate_interval": "8s", "$__range": "60s"}
"""Values for variables in queries that Grafana itself fills in."""


def filled_in(expression: str, chosen: dict[str, str]) -> str:
    """Return a dashboard's query as Grafana sends it.

    A variable is replaced by its chosen value, or by the value that matches everything.
    """
    values = OF_GRAFANA | {f"${name}": chosen.get(name, each.get("allValue", "")) for name, each in VARIABLES.items()}
    for name in sorted(values, key=len, reverse=True):
        expression = expression.replace(name, values[name])
    assert "$" not in expression, "a variable that the dashboard does not have"
    return expression


@pytest.mark.parametrize("name", FILES)
def test_each_dashboard_file_agrees_with_its_script(name: str) -> None:
    done = subprocess.run([sys.executable, "helm/dashboard.py", name], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.decode() == FILES[name].read_text(), f"python helm/dashboard.py {name} > {FILES[name]}"


@pytest.mark.parametrize("name", FILES)
def test_a_dashboard_is_unchanged_after_grafanas_types_read_it(name: str) -> None:
    """A dashboard is unchanged after it was read with Grafana's own types, which drop unknown keys.

    A difference would be a key that is misspelt or in the wrong place.
    """
    reason = "grafana-foundation-sdk is not installed (.ci/run installs it from .ci/tools.lock)"
    types = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason=reason)
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins", reason=reason)
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder", reason=reason)
    plugins.register_default_plugins()
    again = json.dumps(types.Dashboard.from_json(json.loads(FILES[name].read_text())), cls=encoder.JSONEncoder)
    assert json.loads(again) == DASHBOARDS[name]


def test_the_dashboards_have_their_rows_variables_and_units() -> None:
    rows = {
        name: [panel["title"] for panel in each["panels"] if panel["type"] == "row"]
        for name, each in DASHBOARDS.items()
    }
    assert rows == {
        "kvbus": ["Overview"],
        "kvbus-internals": ["Process"],
        "kvbus-sources-routers": ["Sources", "Outputs", "Replay"],
    }
    assert len(DASHBOARDS["kvbus"]["panels"]) == 1 + 12
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS)
    assert len({each["uid"] for each in DASHBOARDS.values()}) == 3
    assert list(VARIABLES) == ["datasource", "namespace", "job", "instance", "source", "output"]
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in PANELS)


@pytest.mark.parametrize("name", FILES)
def test_no_panel_of_a_dashboard_covers_another_panel(name: str) -> None:
    panels = DASHBOARDS[name]["panels"]
    cells: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert cells.setdefault((x, y), panel["title"]) == panel["title"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)


def test_a_dashboard_shows_every_metric_of_sources_outputs_and_replay() -> None:
    """The dashboard uses every metric of sources, outputs and replays, because operators look at it first.

    The test names each metric that the dashboard leaves out on purpose.
    """
    elsewhere = {
        "kvbus_source_epoch",  # the dashboard shows restarts instead; a variable uses this metric
        "kvbus_source_last_sequence",  # operators compare this number by hand in /sources
        "kvbus_output_sequence",
        "kvbus_source_bytes_total",
        "kvbus_source_missing_batches_total",  # the sum of three metrics that the dashboard shows
        "kvbus_source_held_overflow_total",
        "kvbus_source_timeouts_total",
        "kvbus_source_stale_replies_total",
        "kvbus_source_rebuilds_total",
        "kvbus_output_dropped_events_total",
        "kvbus_http_connections",  # connections are always few; the dashboard shows refused ones
        "kvbus_http_dumps",
        "kvbus_http_listeners",
    }
    rules = (ROOT / "deploy" / "prometheus" / "kvbus.rules.yml").read_text()
    shown = {name.removesuffix("_bucket") for name in re.findall(r"\bkvbus_\w+", json.dumps(PANELS) + rules)}
    bus = (ROOT / "docs" / "METRICS.md").read_text().partition("## The index")[0]
    documented = set(re.findall(r"^\| `(kvbus_\w+)`", bus, re.MULTILINE))
    assert documented - shown <= elsewhere
    assert not elsewhere & shown


@pytest.mark.timeout(600)
@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_every_query_of_every_panel_returns_data(observed: BusState, panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        result = observed.server.query(filled_in(target["expr"], {}), observed.at)
        if not result and any(f"kvbus_{name}" in target["expr"] for name in NOT_MADE):
            continue
        assert result, f"{target['refId']} is empty"
        names = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert names <= {label for labels, _ in result for label in labels}, "a legend without its label"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in VARIABLES if name not in {"datasource", "namespace"}])
def test_every_dashboard_variable_offers_its_values_and_filters_panels(observed: BusState, name: str) -> None:
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", VARIABLES[name]["query"])
    assert found is not None
    offered = observed.server.labels(found[2], filled_in(found[1], {}))
    expected = {
        "job": {"kvbus"},
        "instance": set(KVBUS),
        "source": {
            "engine",
            "steady",
            "flaky",
            "lossy",
            "restarting",
            "garbled",
            "mute",
            "silent",
            "untitled",
            "absent",
            "twofold",
            "calm",
            "quiet",
            "gone.engine.0",
        },
        "output": {"routers", "slow", "narrow", "locked", "log", "away"},
    }
    assert set(offered) == expected[name]
    chosen = {"job": "kvbus", "instance": "faulty", "source": "flaky", "output": "slow"}[name]
    narrowed = [t["expr"] for panel in PANELS for t in panel["targets"] if f'{name}=~"${name}"' in t["expr"]]
    assert narrowed
    for expression in narrowed:
        series = observed.server.query(filled_in(expression, {name: chosen}), observed.at)
        assert {labels[name] for labels, _ in series if name in labels} <= {chosen}
