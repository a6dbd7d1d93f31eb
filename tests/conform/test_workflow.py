"""The workflow for other repositories: its steps, run here against an engine that it starts itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.docs.test_forge import FOR_OTHERS, jobs, read
from tests.ports import ports_in_a_row


def test_each_input_reaches_the_shell_as_a_variable():
    inputs = set(read(FOR_OTHERS)["on"]["workflow_call"]["inputs"])
    said = str(jobs(FOR_OTHERS)["engine"])
    assert {name for name in inputs if f"inputs.{name} " not in said} == set()


@pytest.mark.slow
def test_its_last_command_starts_an_engine_waits_for_it_and_judges_it(tmp_path: Path):
    (tmp_path / "kvbus" / "bin").mkdir(parents=True)
    program = tmp_path / "kvbus" / "bin" / "kvbus"
    program.write_text(f"#!{sys.executable}\nfrom kvbus.cli import main\nmain()\n")
    program.chmod(0o755)
    port = ports_in_a_row(2)
    endpoints = [f"tcp://127.0.0.1:{each}" for each in (port, port + 1)]
    start = (
        f"{program} sim --bind --endpoint {endpoints[0]} --replay-endpoint {endpoints[1]} --seconds 60 & echo $! > pid"
    )
    names = {"START": start, "ENDPOINT": endpoints[0], "REPLAY": endpoints[1], "API": "", "STRICT": ""}
    env = {**os.environ, **names, "SECONDS_TO_WATCH": "0.5", "WAIT": "150", "RUNNER_TEMP": str(tmp_path)}
    (*_, script) = (step["run"] for step in jobs(FOR_OTHERS)["engine"]["steps"] if "run" in step)
    try:
        done = subprocess.run(
            ["bash", "-e", "-c", script], cwd=tmp_path, env=env, stdout=subprocess.PIPE, timeout=200, check=False
        )
    finally:
        os.kill(int((tmp_path / "pid").read_text()), 15)
    assert done.returncode in {0, 1}, done.stdout
    suite = ET.parse(tmp_path / "conform.xml").getroot()[0]  # noqa: S314 - our own
    assert len(suite) > 40
