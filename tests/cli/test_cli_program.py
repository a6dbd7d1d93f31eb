"""Tests for the program ``kvbus``: every error has a message and an exit code, and subcommands are imported on
first use.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.cli.program import Program, Subcommand
from kvbus.common.errors import EXIT_MEANINGS, BindError, ConfigError, ExitCode, KvbusError, Problem
from tests.typed import there

ROOT = Path(__file__).parents[2]


def _group(action) -> click.Group:
    @click.group(cls=Program)
    @click.option("--debug", is_flag=True)
    def group(debug): ...

    @group.command("go")
    def go():
        return action()

    return group


def _raise(error: BaseException):
    def action():
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError([Problem("http", "is wrong")]), 78, "http: is wrong"),
        (
            BindError("tcp://*:1", "Address already in use"),
            69,
            "kvbus: cannot listen on tcp://*:1: Address already in use",
        ),
        (BindError("x", "no", verb="connect to"), 69, "kvbus: cannot connect to x: no\n"),
        (KvbusError("the relay stopped"), 70, "kvbus: the relay stopped"),
        (
            ExceptionGroup("tasks", [ValueError("x"), ExceptionGroup("in", [BindError("a", "b")])]),
            69,
            "cannot listen on a",
        ),
        (ValueError("two\nlines"), 70, "kvbus: internal error: ValueError: two lines"),
        (ExceptionGroup("tasks", [ZeroDivisionError()]), 70, "kvbus: internal error: ZeroDivisionError\n"),
        (click.UsageError("no such thing"), 2, "Error: no such thing"),
        (click.exceptions.Exit(3), 3, ""),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_each_error_has_its_message_and_exit_code_without_a_traceback(error, code, message):
    done = CliRunner().invoke(_group(_raise(error)), ["go"])
    assert done.exit_code == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_kvbus_suggests_a_similar_subcommand_for_an_unknown_one():
    done = CliRunner().invoke(main, ["tial"])
    assert (done.exit_code, "Did you mean tail?" in done.stderr) == (2, True)
    done = CliRunner().invoke(main, ["qqqq"])
    assert (done.exit_code, "Did you mean" in done.stderr) == (2, False)


def test_the_operations_manual_and_the_help_page_list_every_exit_code():
    table = re.findall(r"^\| (\d+) \| (.+) \|$", (ROOT / "docs/OPERATIONS.md").read_text(), re.MULTILINE)
    assert [(ExitCode(int(code)), meaning) for code, meaning in table] == list(EXIT_MEANINGS.items())
    assert list(EXIT_MEANINGS) == list(ExitCode)
    help_page = CliRunner().invoke(main, ["--help"]).output
    assert all(f"{code.value} " in help_page and meaning in help_page for code, meaning in EXIT_MEANINGS.items())


def test_each_help_page_names_only_known_exit_codes():
    for name in main.list_commands(click.Context(main)):
        page = CliRunner().invoke(main, [name, "--help"]).output
        _, _, said = " ".join(page.split()).partition("Exit codes: ")
        codes = {int(each) for each in re.findall(r"(?:^|, )(\d+) ", said.partition(".")[0])}
        assert codes <= set(ExitCode), name


@pytest.mark.parametrize("name", main.list_commands(click.Context(main)))
def test_a_help_page_shows_examples_before_options(name):
    page = CliRunner().invoke(main, [name, "--help"]).output
    assert 0 < page.index("Examples:") < page.index("Options:")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_asks_kvbus(shell):
    script = CliRunner().invoke(main, ["completion", shell])
    assert (script.exit_code, f"_KVBUS_COMPLETE={shell}_complete" in script.stdout) == (0, True)


def test_bash_completes_with_the_script(tmp_path):
    (tmp_path / "kvbus").symlink_to(Path(sys.executable).with_name("kvbus"))
    asked = (
        'eval "$(kvbus completion bash)"; COMP_WORDS=(kvbus comp); COMP_CWORD=1; '
        '_kvbus_completion kvbus; echo "${COMPREPLY[@]}"'
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", asked], capture_output=True, text=True, timeout=60, check=True, env={**os.environ, "PATH": path}
    )
    assert done.stdout == "completion\n"


def test_a_shell_completes_subcommands_and_options():
    def completed(*words: str) -> str:
        given = {"_KVBUS_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        done = subprocess.run(
            [sys.executable, "-c", "from kvbus.cli import main; main(prog_name='kvbus')"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={**os.environ, **given},
        )
        return done.stdout

    assert completed("kvbus", "rec") == "plain,record\n"
    assert "plain,--replay-endpoint" in completed("kvbus", "tail", "--rep")


def test_a_bug_shows_a_hint_and_with_debug_its_traceback():
    group = _group(_raise(ValueError("x")))
    assert "KVBUS_TRACEBACK=1" in CliRunner().invoke(group, ["go"]).stderr
    done = CliRunner().invoke(group, ["--debug", "go"])
    assert done.exit_code == 70
    assert "Traceback (most recent call last)" in done.stderr
    assert "KVBUS_TRACEBACK" not in done.stderr


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (69, 69), ("text", 0)])
def test_a_command_may_return_its_exit_code(returned, code):
    assert CliRunner().invoke(_group(lambda: returned), ["go"]).exit_code == code


def test_a_subcommand_that_is_not_installed_does_not_break_other_subcommands(monkeypatch):
    module = types.ModuleType("kvbus.cli.fine")
    vars(module)["command"] = click.Command("fine", callback=lambda: click.echo("hello"))
    module.__spec__ = ModuleSpec("kvbus.cli.fine", None)
    monkeypatch.setitem(sys.modules, "kvbus.cli.fine", module)
    group = Program("group", subcommands=[Subcommand("absent", "Not there."), Subcommand("fine", "There.")])
    listing = CliRunner().invoke(group, ["--help"])
    assert "There." in listing.output
    assert "absent" not in listing.output
    assert CliRunner().invoke(group, ["fine"]).output == "hello\n"
    assert CliRunner().invoke(group, ["absent"]).exit_code == 2


def test_a_subcommand_that_fails_to_import_does_not_break_the_help_page(tmp_path, monkeypatch):
    (tmp_path / "broken_command.py").write_text("raise RuntimeError('half written')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Subcommand, "module", property(lambda self: self.name))
    group = Program("group", subcommands=[Subcommand("broken_command", "Broken.")])
    assert CliRunner().invoke(group, ["--help"]).exit_code == 0
    done = CliRunner().invoke(group, ["broken_command"])
    assert done.exit_code == 70
    assert "RuntimeError: half written" in done.stderr


def test_help_imports_no_subcommand():
    code = textwrap.dedent("""
        import sys
        from kvbus.cli import main
        try:
            main(["--help"], prog_name="kvbus")
        except SystemExit:
            pass
        loaded = sorted(m for m in sys.modules if m.split(".")[0] in {"zmq", "aiohttp", "pydantic", "rich"})
        assert not loaded, loaded
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Commands:" in done.stdout


def test_ctrl_c_is_quiet():
    code = textwrap.dedent("""
        import click, signal
        from kvbus.cli.program import Program

        group = Program("group")

        @group.command()
        def wait():
            print("ready", flush=True)
            signal.pause()

        group.main(["wait"], prog_name="kvbus")
    """)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert there(process.stdout).readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == ""


def test_kvbus_has_the_declared_subcommands():
    names = [
        "run",
        "init",
        "demo",
        "check",
        "doctor",
        "top",
        "index",
        "query",
        "tail",
        "dump",
        "record",
        "anonymize",
        "play",
        "sim",
        "conform",
        "state",
        "keygen",
        "token",
        "completion",
    ]
    assert list(main.subcommands) == names
