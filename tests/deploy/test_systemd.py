"""Tests for the systemd unit: systemd's own tools check it, and the commands of the unit run."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final

import pytest

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
UNIT: Final = DEPLOY / "systemd" / "kvbus.service"
KVBUS: Final = "/opt/kvbus/bin/kvbus"
EXPOSURE: Final = 15
"""Maximum exposure of the service that `systemd-analyze security` may report, in tenths: 0 is safe, 100 is exposed."""


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


def test_systemd_accepts_the_unit_of_kvbus(analyze: str, tmp_path: Path) -> None:
    """`systemd-analyze verify` accepts the unit.

    The test puts a program at kvbus's path, because a missing one is an error.
    """
    kvbus = tmp_path / "kvbus"
    kvbus.symlink_to(shutil.which("true") or "/bin/true")
    unit = tmp_path / "kvbus.service"
    unit.write_text(UNIT.read_text().replace(KVBUS, str(kvbus)))
    done = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_of_kvbus_is_hardened(analyze: str) -> None:
    command = [analyze, "security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_the_unit_checks_the_configuration_before_each_start() -> None:
    unit = service()
    check, run = shlex.split(unit["ExecStartPre"]), shlex.split(unit["ExecStart"])
    assert check == [KVBUS, "check", "/etc/kvbus/kvbus.yaml"]
    assert run == [KVBUS, "run", "/etc/kvbus/kvbus.yaml"]
    assert unit["RestartPreventExitStatus"].split() == ["2", "78"]
    example = [sys.executable, "-m", "kvbus", "check", str(DEPLOY / "kvbus.yaml")]
    assert subprocess.run(example, capture_output=True, check=False).returncode == 0


def test_systemd_does_not_restart_kvbus_after_a_configuration_error(tmp_path: Path) -> None:
    wrong = tmp_path / "kvbus.yaml"
    wrong.write_text("sources: none\n")
    done = subprocess.run([sys.executable, "-m", "kvbus", "check", str(wrong)], capture_output=True, check=False)
    assert str(done.returncode) in service()["RestartPreventExitStatus"].split()


def test_the_unit_has_the_directories_of_the_operations_manual() -> None:
    unit = service()
    assert unit["StateDirectory"] == "kvbus"
    assert unit["ConfigurationDirectory"] == "kvbus"
    operations = (DEPLOY.parent / "docs" / "OPERATIONS.md").read_text()
    assert re.search(r"StateDirectory=kvbus", operations)
    assert re.search(r"^\| `\$STATE_DIRECTORY` ", operations, re.MULTILINE)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Run install.sh with a Python that creates an environment without the network.

    Return the root of the installation.
    """
    python = tmp_path / "python"
    python.write_text(
        textwrap.dedent(f"""\
            #!/bin/sh
            [ "$1 $2" = "-m venv" ] || exit 9
            mkdir -p "$3/bin"
            printf '#!/bin/sh\\necho "$@" >> {tmp_path}/pip\\n' > "$3/bin/python"
            printf '#!/bin/sh\\nexec {sys.executable} -m kvbus "$@"\\n' > "$3/bin/kvbus"
            chmod +x "$3/bin/python" "$3/bin/kvbus"
        """)
    )
    python.chmod(0o755)
    root = tmp_path / "root"
    env = os.environ | {"PYTHON": str(python), "ROOT": str(root), "PYTHONPATH": str(DEPLOY.parent)}
    for _ in range(2):  # the second installation finds the files of the first
        subprocess.run([DEPLOY / "systemd" / "install.sh"], env=env, check=True, timeout=60, capture_output=True)
    return root


def test_the_install_script_installs_matching_units_of_kvbus_and_the_engine(installed: Path) -> None:
    config = installed / "etc" / "kvbus" / "kvbus.yaml"
    check = [sys.executable, "-m", "kvbus", "check", str(config)]
    assert subprocess.run(check, capture_output=True, check=False).returncode == 0
    units = installed / "etc" / "systemd" / "system"
    assert sorted(path.name for path in units.iterdir()) == ["kvbus-sim.service", "kvbus.service"]
    engine = (units / "kvbus-sim.service").read_text()
    ports = re.findall(r"^ExecStart=.* --endpoint (\S+) --replay-endpoint (\S+)$", engine, re.MULTILINE)
    assert ports == [tuple(re.findall(r"endpoint: (tcp://127\.0\.0\.1:\d+)", config.read_text()))]
    asked = (installed.parent / "pip").read_text().splitlines()
    assert "--require-hashes" in asked[0]
    assert asked[1].endswith("--no-deps --no-build-isolation .")


def test_systemd_accepts_the_unit_of_the_simulated_engine(analyze: str, tmp_path: Path) -> None:
    unit = tmp_path / "kvbus-sim.service"
    unit.write_text((UNIT.parent / unit.name).read_text().replace(KVBUS, shutil.which("true") or "/bin/true"))
    done = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
