"""Test of the conformance workflow that other repositories call: run its steps against an engine that they start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_forge import FOR_OTHERS, jobs, read
from tests.ports import ports_in_a_row


def test_each_input_of_the_workflow_reaches_the_shell_as_a_variable():
    inputs = set(read(FOR_OTHERS)["on"]["workflow_call"]["inputs"])
    said = str(jobs(FOR_OTHERS)["conform"])
    assert {name for name in inputs if f"inputs.{name} " not in said} == set()


def run(directory: Path, **given: str) -> tuple[int, list[dict[str, str]]]:
    """Run the last command of the workflow ``conform.yml``, and return its exit code and the verdicts that it wrote."""
    (directory / "kvbus" / "bin").mkdir(parents=True)
    program = directory / "kvbus" / "bin" / "kvbus"
    program.write_text(f"#!{sys.executable}\nfrom kvbus.cli import main\nmain()\n")
    program.chmod(0o755)
    names = dict.fromkeys(("START", "ROUTER", "ENDPOINT", "REPLAY", "API", "STRICT"), "")
    env = {**os.environ, **names, "SECONDS_TO_WATCH": "0.5", "WAIT": "150", "RUNNER_TEMP": str(directory), **given}
    (*_, script) = (step["run"] for step in jobs(FOR_OTHERS)["conform"]["steps"] if "run" in step)
    done = subprocess.run(["bash", "-e", "-c", script], cwd=directory, env=env, timeout=200, check=False)
    verdicts: list[dict[str, str]] = json.loads((directory / "conform.json").read_text())["verdicts"]
    return done.returncode, verdicts


@pytest.mark.slow
def test_the_workflows_last_command_starts_and_judges_an_engine(tmp_path: Path):
    port = ports_in_a_row(2)
    endpoints = [f"tcp://127.0.0.1:{each}" for each in (port, port + 1)]
    start = (
        f"kvbus/bin/kvbus sim --bind --endpoint {endpoints[0]} --replay-endpoint {endpoints[1]} --seconds 60 "
        "> sim.log 2>&1 & echo $! > pid"
    )
    try:
        status, verdicts = run(tmp_path, START=start, ENDPOINT=endpoints[0], REPLAY=endpoints[1])
    finally:
        os.kill(int((tmp_path / "pid").read_text()), 15)
    assert status in {0, 1}
    assert len(verdicts) > 40


@pytest.mark.slow
def test_the_workflows_last_command_judges_a_router_with_quoted_options(tmp_path: Path):
    status, verdicts = run(tmp_path, ROUTER="--client --case stores --topic 'two words'")
    assert (status, [(each["clause"], each["case"]) for each in verdicts]) == (0, [("6.4", "stores")])
