"""Tests for the alert rules: they are valid, promtool's unit tests pass, and each alert has a section in the
runbook.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from kvbus.cli import main
from tests.docs import runbook
from tests.docs.test_docs import anchors, section
from tests.monitoring.prometheus import ROOT, RULES, alerts, rules

CASES: Final = Path(__file__).parent / "rules.test.yml"
FLEET: Final = RULES.with_name("kvbus-fleet.rules.yml")
FLEET_CASES: Final = Path(__file__).parent / "fleet.test.yml"
BOTH: Final = [(CASES, RULES), (FLEET_CASES, FLEET)]
RUNBOOK: Final = ROOT / "docs" / "RUNBOOK.md"
SEVERITIES: Final = {"critical", "warning", "info"}


def runbooks() -> dict[str, str]:
    """Return the sections of docs/RUNBOOK.md about alerts, by the alert's name."""
    whole = RUNBOOK.read_text()
    text = section(whole, "## Alerts") + section(whole, "## Alerts on a fleet")
    names = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    return {name: section(text, f"### {name}") for name in names}


@pytest.mark.parametrize(
    "arguments", [("check", "rules", str(RULES), str(FLEET)), ("test", "rules", str(CASES), str(FLEET_CASES))]
)
def test_promtool_accepts_the_rules_and_their_unit_tests_pass(promtool: str, arguments: tuple[str, ...]) -> None:
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("cases_of", "rules_of"), BOTH, ids=["bus", "fleet"])
def test_every_alert_fires_in_a_unit_test(cases_of: Path, rules_of: Path) -> None:
    cases: list[dict[str, Any]] = YAML(typ="safe", pure=True).load(cases_of.read_text())["tests"]
    tests = [test for case in cases for test in case["promql_expr_test"]]
    fires = {
        name for test in tests for s in test.get("exp_samples", ()) for name in re.findall(r'"(Kvbus\w+)"', s["labels"])
    }
    assert fires == set(alerts(rules_of))


@pytest.mark.parametrize("cases_of", [CASES, FLEET_CASES], ids=["bus", "fleet"])
def test_every_unit_test_of_the_rules_has_a_time_without_an_alert(cases_of: Path) -> None:
    for case in YAML(typ="safe", pure=True).load(cases_of.read_text())["tests"]:
        quiet = [
            t for t in case["promql_expr_test"] if t["expr"] == 'ALERTS{alertstate="firing"}' and "exp_samples" not in t
        ]
        assert quiet, case["name"]


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert set(runbooks()) == {*alerts(), *alerts(FLEET)}


def test_every_alert_links_to_its_runbook() -> None:
    for name, rule in {**alerts(), **alerts(FLEET)}.items():
        document, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert anchor == name.lower()
        assert anchor in anchors(ROOT / document)
        assert rule["labels"]["severity"] in SEVERITIES
        assert rule["annotations"].keys() == {"summary", "description", "runbook", "finding"}, (
            "only a URL is a runbook_url"
        )


def test_every_runbook_has_the_parts_means_look_and_do() -> None:
    for name, text in runbooks().items():
        for word in ("**Means.**", "**Look.**", "**Do.**"):
            assert word in text, f"{name} has no {word}"


def test_rules_and_runbooks_name_only_documented_metrics() -> None:
    documented = set(re.findall(r"^\| `(kvbus_\w+)`", (ROOT / "docs" / "METRICS.md").read_text(), re.MULTILINE))
    named = {name for rule in [*rules(), *rules(FLEET)] for name in re.findall(r"\bkvbus_\w+", rule["expr"])}
    assert {name.removesuffix("_bucket") for name in named} <= documented
    assert set(re.findall(r"\bkvbus_\w+", RUNBOOK.read_text())) <= documented


def test_commands_in_the_runbook_have_valid_options() -> None:
    """Every `kvbus COMMAND …` in code format in docs/RUNBOOK.md has only options that the command's help lists."""
    text = RUNBOOK.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    code = [line for line in (*"\n".join(blocks).splitlines(), *inline) if line.startswith("kvbus ")]
    given = [(line.split()[1], set(re.findall(r"(?<= )--?[a-z][\w-]*", line.split("#")[0]))) for line in code]
    assert len(given) > 10
    for command, options in given:
        shown = CliRunner().invoke(main, [command, "--help"])
        assert shown.exit_code == 0, command
        assert options <= set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", shown.output)), command


@pytest.mark.parametrize("alert", [*alerts(RULES).values(), *alerts(FLEET).values()], ids=lambda alert: alert["alert"])
def test_an_alert_names_its_findings_and_has_their_description(alert: dict[str, Any]) -> None:
    notes = alert["annotations"]
    if notes["finding"] == "none":
        return
    catalogue = {row.id: row for row in runbook.rows()}
    named = notes["finding"].split()
    assert named
    assert set(named) <= catalogue.keys()
    if len(named) == 1:
        assert notes["description"].startswith(catalogue[named[0]].means)
