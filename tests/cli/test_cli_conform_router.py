"""Tests for the command ``kvbus conform router``."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.tools.conform.router.cases import CASES


def test_conform_router_lists_its_cases():
    out = CliRunner().invoke(main, ["conform", "router", "--list"]).output.splitlines()
    assert [line.split()[0] for line in out] == [case.name for case in CASES]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give exactly one of"),
        (["--client", "--view-url", "http://x"], "give exactly one of"),
        (["--client", "--case", "0.0"], "'0.0'"),
        (["--client", "--engine", "tcp://127.0.0.1:5557"], "LIVE,REPLAY"),
        (["--view-url", "http://x", "--reads", "a,b"], "--reads"),
        (["--client", "--reads", "a,b"], "--engine"),
    ],
)
def test_conform_router_refuses_wrong_options_with_a_message(arguments, said):
    result = CliRunner().invoke(main, ["conform", "router", *arguments])
    assert (result.exit_code, said in result.output) == (2, True), result.output


@pytest.mark.slow
def test_conform_router_judges_the_client_library_and_prints_json():
    arguments = ["--client", "--case", "6.4", "--json"]
    result = CliRunner().invoke(main, ["conform", "router", *arguments])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["role"], report["subject"]) == ("router", "kvbus.client")
    assert {each["case"] for each in report["verdicts"]} == {"stores", "flow"}


@pytest.mark.slow
def test_conform_router_exits_with_69_if_the_driver_does_not_exist():
    result = CliRunner().invoke(main, ["conform", "router", "--driver", "/nowhere/router"])
    assert (result.exit_code, "No such file" in result.output) == (69, True)


@pytest.mark.slow
def test_conform_router_prints_no_result_after_ctrl_c_before_the_first_case_ends():
    program = [sys.executable, "-m", "kvbus", "conform", "router", "--driver", "cat", "--case", "stores"]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        assert running.stderr.readline().startswith("kvbus: stores")
        running.send_signal(signal.SIGINT)
        said = running.stderr.read()
    assert (running.returncode, said) == (130, "")
