"""Tests for ``kvbus check`` as a process: its standard output, its standard error, and its exit code."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from kvbus.config import load
from tests.security.keys import Keyring

EXAMPLE = Path(__file__).parents[2] / "deploy" / "kvbus.yaml"


def kvbus(*args: str, env: dict[str, str] | None = None, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KVBUS_")}
    return subprocess.run(
        [sys.executable, "-m", "kvbus", *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**clean, **(env or {})},
        **kwargs,
    )


def test_check_accepts_and_prints_the_example_configuration(tmp_path):
    done = kvbus("check", str(EXAMPLE))
    assert (done.returncode, [line for line in done.stderr.splitlines() if not line.startswith("access: ")]) == (0, [])
    printed = tmp_path / "printed.yaml"
    printed.write_text(done.stdout)
    assert load(printed, env={}, overrides={}) == load(EXAMPLE, env={}, overrides={})


@pytest.mark.parametrize("command", ["run", "check", "doctor"])
def test_the_configuration_file_may_be_named_only_once(command, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("bogus: 1\n")
    for way in ([str(bad)], ["-c", str(bad)]):
        done = kvbus(command, *way, env={"KVBUS_CONFIG": str(EXAMPLE)})
        assert (done.returncode, "bogus = 1" in done.stderr) == (78, True), way
    done = kvbus(command, str(bad), "-c", str(bad))
    assert (done.returncode, "name the configuration once" in done.stderr) == (2, True)


def test_check_prints_the_configuration_as_json(tmp_path):
    done = kvbus("check", str(EXAMPLE), "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == load(EXAMPLE, env={}, overrides={}).to_dict()


def test_check_reports_all_errors_together(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("bogus: 1\nsources: [{endpoint: nowhere}]\noutputs: [{layout: diagonal}]\nhttp: 9\n")
    done = kvbus("check", str(path), env={"KVBUS_BOGUS": "1", "KVBUS_ON_LOST": "panic"})
    assert (done.returncode, done.stdout) == (78, "")
    head, *lines = done.stderr.splitlines()
    assert head == "kvbus: the configuration has 6 problems:"
    keys = ("bogus", "sources[0].endpoint", "outputs[0].layout", "http", "KVBUS_BOGUS", "on_lost")
    for key in keys:
        assert [line for line in lines if line.startswith(f"  {key} = ")], key


def without_aiokafka(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a process in which the extra ``kafka`` is not installed."""
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "aiokafka.py").write_text("raise ImportError(\"No module named 'aiokafka'\")\n")
    return {"PYTHONPATH": str(tmp_path / "without")}


LOG = "sources: [{}]\noutputs: [{type: kafka, endpoint: 'tcp://127.0.0.1:9092'}]\n"


@pytest.mark.parametrize("command", ["check", "run", "doctor"])
def test_a_missing_package_is_reported_together_with_other_errors(command, tmp_path):
    path = tmp_path / "kvbus.yaml"
    path.write_text(f"{LOG}bogus: 1\n")
    done = kvbus(command, "-c", str(path), env=without_aiokafka(tmp_path))
    assert (done.returncode, done.stdout) == (78, "")
    assert "outputs[0].type = 'kafka': kafka needs a package that is not installed" in done.stderr
    assert "pip install 'kvbus[kafka]'" in done.stderr
    assert "bogus" in done.stderr


def below_a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "state"


def a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


@pytest.mark.parametrize("place", [a_file, below_a_file], ids=["a file", "below a file"])
@pytest.mark.parametrize("more", ["", "bogus: 1\n"], ids=["alone", "with another error"])
def test_a_state_dir_that_cannot_be_created_is_an_error(place, more, tmp_path):
    path = tmp_path / "kvbus.yaml"
    path.write_text(f"sources: [{{}}]\noutputs: [{{}}]\nstate_dir: {place(tmp_path)}\n{more}")
    done = kvbus("check", str(path))
    assert (done.returncode, done.stdout) == (78, "")
    assert f"state_dir = {place(tmp_path)}: " in done.stderr
    assert "it is not a directory" in done.stderr
    assert ("bogus" in done.stderr) == bool(more)
    assert kvbus("check", str(path), "--without-keys").returncode == (78 if more else 0)


@pytest.mark.parametrize("made", [True, False], ids=["there", "to be made"])
def test_a_state_dir_without_free_space_is_an_error(made, tmp_path):
    """A limit on the size of files stands for a full disk: kvbus can create a file in the directory, but not write
    to it.
    """
    if made:
        (tmp_path / "state").mkdir()
    path = tmp_path / "kvbus.yaml"
    path.write_text(f"sources: [{{}}]\noutputs: [{{}}]\nstate_dir: {tmp_path / 'state'}\n")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))  # noqa: E731
    done = kvbus("check", str(path), preexec_fn=limit)
    assert (done.returncode, done.stdout) == (78, "")
    assert "state_dir = " in done.stderr
    assert "file too large" in done.stderr
    assert (tmp_path / "state").exists() == made
    assert kvbus("check", str(path)).returncode == 0


def test_a_missing_configuration_file_is_an_error():
    done = kvbus("check", "/nonexistent/kvbus.yaml")
    assert done.returncode == 78
    assert "/nonexistent/kvbus.yaml: cannot be read: No such file or directory" in done.stderr


def test_check_without_a_configuration_names_the_required_keys():
    done = kvbus("check")
    assert done.returncode == 78
    assert "sources: at least one is needed; for example" in done.stderr
    assert "outputs: at least one is needed; for example" in done.stderr


def test_check_reads_sources_and_outputs_from_options():
    done = kvbus(
        "check",
        "--json",
        "--source", "tcp://10.0.0.1:5557,tcp://10.0.0.1:5558",
        "--source", "tcp://10.0.0.2:5557",
        "--output", "tcp://*:5657,tcp://*:5757",
        "--output", "ipc:///run/kv",
        "--http", "null",
        "--model", "org/m",
        "--log-level", "warning",
        "--log-format", "json",
        "--set", "outputs[1].layout=merged",
        "--set", "limits.max_frames=9",
        env={"KVBUS_MODEL": "other", "KVBUS_LIMITS__MAX_FRAMES": "8"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    config = json.loads(done.stdout)
    assert [(s["name"], s["endpoint"], s["replay_endpoint"]) for s in config["sources"]] == [
        ("engine-0", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"),
        ("engine-1", "tcp://10.0.0.2:5557", None),
    ]
    assert [(o["name"], o["endpoint"], o["replay_endpoint"], o["layout"]) for o in config["outputs"]] == [
        ("routers-0", "tcp://*:5657", "tcp://*:5757", "per_source"),
        ("routers-1", "ipc:///run/kv", None, "merged"),
    ]
    assert (config["http"], config["model"], config["limits"]["max_frames"]) == (None, "org/m", 9)
    assert (config["log_level"], config["log_format"]) == ("warning", "json")


def test_a_source_option_replaces_the_list_of_the_file():
    done = kvbus("check", str(EXAMPLE), "--json", "--source", "ipc:///run/e")
    (source,) = json.loads(done.stdout)["sources"]
    assert (source["name"], source["endpoint"], source["replay_endpoint"]) == ("engine", "ipc:///run/e", None)


def test_check_reads_the_file_that_the_environment_names():
    done = kvbus("check", "--json", env={"KVBUS_CONFIG": str(EXAMPLE)})
    (source,) = json.loads(done.stdout)["sources"]
    assert source["name"] == "engine"


@pytest.mark.parametrize(
    "args",
    [
        ("check", "--bogus"),
        ("check", "--set", "http"),
        ("check", "--set", "=1"),
        ("check", "--source", "a,b,c"),
        ("check", "--output", ","),
        ("bogus",),
    ],
)
def test_wrong_options_print_the_usage(args):
    done = kvbus(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: kvbus" in done.stderr


def test_the_version_option_prints_the_version():
    done = kvbus("--version")
    assert done.returncode == 0
    assert done.stdout == f"kvbus {version('kvbus')}\n"


def test_check_ends_quietly_if_its_pipe_is_closed():
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvbus", "check", str(EXAMPLE)],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, [line for line in done.stderr.splitlines() if not line.startswith("access: ")]) == (0, [])


def test_check_prints_the_rights_of_keys_without_salts(tmp_path):
    keys = Keyring(tmp_path)
    keys.allowed.write_text(f"{keys.router.public.decode()} team-a salts=hunter2 loras=sql-*\n")
    path = tmp_path / "kvbus.yaml"
    path.write_text(json.dumps({"sources": [{}], "outputs": [{"endpoint": "tcp://*:6000", **keys.output}]}))
    done = kvbus("check", str(path))
    assert done.returncode == 0
    assert "note: output routers: team-a reads loras sql-*; one salt" in done.stderr.splitlines()
    assert "hunter2" not in done.stdout + done.stderr
    keys.allowed.write_text(f"{keys.router.public.decode()} team-a salts=hunter2 hunter2\n")
    done = kvbus("check", str(path))
    assert done.returncode == 78
    assert "line 1: a key has one name" in done.stderr
    assert "hunter2" not in done.stderr + done.stdout
