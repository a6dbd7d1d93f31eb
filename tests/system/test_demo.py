"""Tests for ``kvbus demo`` as a user runs it: with a pipe, on a terminal, and with Ctrl-C."""

import contextlib
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.long import sample

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "kvbus", "demo"]
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


@contextlib.contextmanager
def demo(*args, **options):
    with subprocess.Popen([*DEMO, *args], stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def on_terminal(*args, until=None, command=None, **env):
    """Run a command on a pseudo-terminal, and press Ctrl-C as soon as it prints ``until``.

    Return exit code and output.
    """
    ours, theirs = pty.openpty()
    os.set_blocking(ours, True)
    whole = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30", **env}
    whole.pop("CI", None)
    # The process gets its own session with this terminal, so that Ctrl-C in the terminal reaches the demo as a signal.
    with subprocess.Popen(
        [sys.executable, "-c", TAKE_TERMINAL, *(command or [*DEMO, *args])],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=whole,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        said = b""
        typed = False
        try:
            while chunk := _read(ours):
                said += chunk
                if until is not None and not typed and until in said:
                    os.write(ours, b"\x03")
                    typed = True
            # At Ctrl-C, a terminal discards output that it has not shown, so the text may end in the middle of a character.
            return process.wait(30), said.decode(errors="replace")
        finally:
            process.kill()
            os.close(ours)


TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def _read(fd):
    try:
        return os.read(fd, 65536)
    except OSError:  # on Linux, this means that the other side is closed
        return b""


@pytest.fixture
def short_directory():
    """An empty directory whose path is short enough for ipc sockets."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as directory:
        yield Path(directory)


def test_the_demo_prints_plain_lines_to_a_pipe(short_directory):
    command = [*DEMO, "--seconds", "8"]
    env = {**os.environ, "TMPDIR": str(short_directory)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert not CONTROL.search(done.stdout)
    *story, end = re.split(r"\n(?=╭─  verdict)", done.stdout)
    assert all(re.match(r" *\d+\.\d  (scene|fault|kvbus|no kvbus) +\S", line) for line in story[0].splitlines()), story
    told = iter(story[0].splitlines())
    for part in (
        "scene     engines, kvbus and router-a run",
        "fault     the network loses 5 batches of sglang",
        "kvbus     saw the gap and fetched the lost batches: exact after ",
        "no kvbus  the router without kvbus has ",
        "scene     router-b starts late",
        "kvbus     router-b got all blocks: exact after ",
        "fault     vllm-a crashes and restarts",
        "kvbus     saw the restart and cleared the dead blocks: exact after ",
        "fault     kvbus itself is killed (SIGKILL)",
        "scene     kvbus runs again",
        "kvbus     caught up with the engines: exact after ",
        "kvbus     no router noticed the restart",
    ):
        assert any(part in line for line in told), (part, story)
    verdict = words(end)
    assert re.search(r"Without kvbus, a router has \d+ blocks missing and [1-9]\d* dead blocks\.", verdict)
    assert re.search(r"EXACT: router-a and router-b hold the [\d,]+ blocks of the engines' caches, and no", verdict)
    for step in ("kvbus init", "kvbus run kvbus.yaml", "kvbus doctor kvbus.yaml"):
        assert step in end
    check_no_remains(short_directory)


def words(panel):
    """Return the text of a drawn panel as one line."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", panel).split())


def check_no_remains(directory):
    """Check that the demo has left no file, and no process with the temporary directory in its command line."""
    assert list(directory.iterdir()) == []
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands.append(path.read_bytes())
    assert commands
    assert not [command for command in commands if str(directory).encode() in command]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_demo_immediately_with_a_verdict(number, short_directory):
    with demo(stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(short_directory)}) as process:
        for line in process.stdout:
            if "  no kvbus  " in line:
                break
        process.send_signal(number)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert "EXACT: router-a " in words(rest)
    check_no_remains(short_directory)


def test_a_ctrl_c_while_kvbus_is_down_ends_the_demo_without_a_verdict(short_directory):
    with demo("--seconds", "15", stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(short_directory)}) as process:
        for line in process.stdout:
            if "SIGKILL" in line:
                break
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")
    assert "No verdict: " in words(rest)
    assert "kvbus doctor" not in rest
    check_no_remains(short_directory)


def test_the_demo_ends_if_its_pipe_is_closed(short_directory):
    with demo(stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(short_directory)}) as process:
        assert process.stdout.readline().startswith("  0.0  scene ")
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
    check_no_remains(short_directory)


def test_the_demo_ignores_the_configuration_of_kvbus(tmp_path):
    long = tmp_path / ("x" * 100)  # too long for the path of an ipc socket
    long.mkdir()
    env = os.environ | {"KVBUS_HTTP": "nonsense", "KVBUS_NO_SUCH_KEY": "1", "TMPDIR": str(long)}
    done = subprocess.run([*DEMO, "--seconds", "1"], capture_output=True, text=True, timeout=60, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_demo_draws_on_a_terminal_and_leaves_its_verdict():
    code, said = on_terminal(until=b"exact after")
    assert code == 0, said
    screen, _, after = said.rpartition("wrong blocks over time")
    assert "running" in screen
    assert "engines, kvbus and router-a run" in screen  # this line is above the drawing
    assert "EXACT: router-a holds" in after
    assert "\x1b[?25h" in said  # the demo has shown the cursor again


@pytest.mark.parametrize("env", sample([{"NO_COLOR": "1"}, {"TERM": "dumb"}], 2))
def test_the_demo_respects_no_color_and_a_dumb_terminal(env):
    code, said = on_terminal("--seconds", "1", **env)
    assert code == 0, said
    if "NO_COLOR" in env:
        assert not re.search(r"\x1b\[[0-9;]*\b(3[0-7]|9[0-7]|38;5;\d+)m", said)
        assert "wrong blocks over time" in said
    else:
        assert "\x1b" not in said
        assert "wrong blocks over time" not in said
        assert "EXACT: " in said


@pytest.mark.parametrize("args", [["--seconds", "0"], ["--seconds", "soon"], ["--seed", "1"]])
def test_wrong_options_of_the_demo_are_usage_errors(args):
    done = subprocess.run([*DEMO, *args], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


STAND_IN = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
"-m venv"*) mkdir -p {venv}/bin; cp "$0" {venv}/bin/python ;;
"-m pip"*) {pip} ;;
"-m kvbus"*) {demo} ;;
esac
"""


def made(tmp_path, demo='exec {python} "$@"', pip=":"):
    """Prepare `.ci/demo.sh` with a Python that installs nothing. Return its environment, and the log of its calls."""
    log, python = tmp_path / "log", tmp_path / "python"
    text = STAND_IN.format(log=log, venv=tmp_path / "demo", pip=pip, demo=demo.format(python=sys.executable))
    python.write_text(text)
    python.chmod(0o755)
    return os.environ | {"PYTHON": str(python)}, log


def demo_of(tmp_path, env, *args):
    """Run `.ci/demo.sh` to its end, and return its exit code and output."""
    return subprocess.run(
        [ROOT / ".ci" / "demo.sh", tmp_path / "demo", *args], capture_output=True, text=True, timeout=60, env=env, check=False
    )  # fmt: skip


def test_make_demo_installs_only_necessary_packages_and_only_once(tmp_path):
    env, log = made(tmp_path, demo="echo the demo")
    for _ in range(2):
        done = demo_of(tmp_path, env, "--seconds", "1")
        assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (0, "the demo", "")
    asked = log.read_text().splitlines()
    assert [line.split()[-1] for line in asked if " install " in line] == ["-rrequirements-build.lock", "."]
    assert "--no-build-isolation" in asked[-3]
    assert asked[-2:] == ["-m kvbus demo --seconds 1"] * 2  # the second run installs nothing before the demo


def test_make_demo_runs_in_the_environment_of_make_setup(tmp_path):
    env, log = made(tmp_path, demo="echo the demo")
    (tmp_path / "bin").mkdir()
    shutil.copy(env["PYTHON"], tmp_path / "bin" / "python")
    (tmp_path / ".installed").touch()
    assert demo_of(tmp_path, env).stdout == "the demo\n"
    assert log.read_text() == "-m kvbus demo\n"


def test_a_ctrl_c_ends_make_demo_with_the_verdict_without_an_error(tmp_path):
    env, _ = made(tmp_path)
    arguments = ["make", "--silent", f"VENV={tmp_path}", f"PYTHON={env['PYTHON']}", "-C", str(ROOT), "demo", "ARGS="]
    code, said = on_terminal(until=b"exact after", command=arguments)
    assert code == 0, said
    assert "EXACT: router-a " in said
    assert "make:" not in said


def test_a_ctrl_c_during_an_installation_leaves_no_installed_mark(tmp_path):
    env, log = made(tmp_path, pip="echo Collecting it; exec sleep 60")
    arguments = ["make", "--silent", f"VENV={tmp_path}", f"PYTHON={env['PYTHON']}", "-C", str(ROOT), "demo", "ARGS="]
    code, said = on_terminal(until=b"1 of ", command=arguments)
    assert code == 2  # make's own exit code; its command ended with 130
    assert "Traceback" not in said
    assert "kvbus" not in log.read_text()
    assert not (tmp_path / "demo" / ".installed").exists()


def test_make_demo_ends_if_an_installation_fails(tmp_path):
    env, log = made(tmp_path, pip="echo no network >&2; exit 1")
    done = demo_of(tmp_path, env)
    assert (done.returncode, done.stderr) == (1, "no network\n")
    assert log.read_text().count(" install ") == 1
    assert not (tmp_path / "demo" / ".installed").exists()


def test_make_demo_shows_the_error_of_the_demo(tmp_path):
    env, _ = made(tmp_path, demo="echo no ports >&2; exit 69")
    done = demo_of(tmp_path, env)
    assert (done.returncode, done.stderr) == (69, "no ports\n")
