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


def test_it_lists_its_cases():
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
def test_what_is_asked_wrongly_is_said(arguments, said):
    result = CliRunner().invoke(main, ["conform", "router", *arguments])
    assert (result.exit_code, said in result.output) == (2, True), result.output


@pytest.mark.slow
def test_the_library_is_judged_and_printed_as_json():
    arguments = ["--client", "--case", "6.4", "--json"]
    result = CliRunner().invoke(main, ["conform", "router", *arguments])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["role"], report["subject"]) == ("router", "kvbus.client")
    assert {each["case"] for each in report["verdicts"]} == {"stores", "flow"}


@pytest.mark.slow
def test_a_router_that_cannot_be_asked_is_no_broken_one():
    result = CliRunner().invoke(main, ["conform", "router", "--driver", "/nowhere/router"])
    assert (result.exit_code, "No such file" in result.output) == (69, True)


@pytest.mark.slow
def test_ctrl_c_before_anything_was_tried_is_no_result():
    program = [sys.executable, "-m", "kvbus", "conform", "router", "--driver", "cat", "--case", "stores"]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        assert running.stderr.readline().startswith("kvbus: stores")
        running.send_signal(signal.SIGINT)
        said = running.stderr.read()
    assert (running.returncode, said) == (130, "")
