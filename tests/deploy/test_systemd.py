"""The systemd unit, as systemd itself reads it; the commands it runs, run."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
UNIT: Final = DEPLOY / "systemd" / "kvbus.service"
KVBUS: Final = "/opt/kvbus/bin/kvbus"
EXPOSURE: Final = 15
"""Tenths, as `systemd-analyze security` counts from 0 (safe) to 100."""


def service() -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser["Service"]


@pytest.fixture(scope="module")
def analyze() -> str:
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("no systemd-analyze (package systemd)")
    return found


def test_systemd_accepts_it(analyze: str, tmp_path: Path) -> None:
    """With a kvbus that is there: what is not is reported as an error."""
    kvbus = tmp_path / "kvbus"
    kvbus.symlink_to(shutil.which("true") or "/bin/true")
    unit = tmp_path / "kvbus.service"
    unit.write_text(UNIT.read_text().replace(KVBUS, str(kvbus)))
    done = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_is_hardened(analyze: str) -> None:
    command = [analyze, "security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_the_configuration_is_checked_before_each_start() -> None:
    unit = service()
    check, run = shlex.split(unit["ExecStartPre"]), shlex.split(unit["ExecStart"])
    assert check == [KVBUS, "check", "/etc/kvbus/kvbus.yaml"]
    assert run == [KVBUS, "run", "/etc/kvbus/kvbus.yaml"]
    assert unit["RestartPreventExitStatus"].split() == ["2", "78"]
    example = [sys.executable, "-m", "kvbus", "check", str(DEPLOY / "kvbus.yaml")]
    assert subprocess.run(example, capture_output=True, check=False).returncode == 0


def test_a_wrong_configuration_is_one_of_the_exit_codes_that_prevent_a_restart(tmp_path: Path) -> None:
    wrong = tmp_path / "kvbus.yaml"
    wrong.write_text("sources: none\n")
    done = subprocess.run([sys.executable, "-m", "kvbus", "check", str(wrong)], capture_output=True, check=False)
    assert str(done.returncode) in service()["RestartPreventExitStatus"].split()


def test_state_and_configuration_are_where_the_docs_say() -> None:
    unit = service()
    assert unit["StateDirectory"] == "kvbus"
    assert unit["ConfigurationDirectory"] == "kvbus"
    operations = (DEPLOY.parent / "docs" / "OPERATIONS.md").read_text()
    assert re.search(r"StateDirectory=kvbus", operations)
    assert re.search(r"^\| `\$STATE_DIRECTORY` ", operations, re.MULTILINE)
