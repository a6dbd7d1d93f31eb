"""Tests for ``kvbus init``: its configuration is accepted by ``kvbus check`` and usable by ``kvbus doctor``."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvbus.cli import main
from kvbus.tools.starting import ENGINES, ROUTERS
from kvbus.transport.engine.publisher import EnginePublisher
from tests.ports import free_port
from tests.system.test_check import kvbus


def invoke(*args: str, answers: str = "") -> Result:
    return CliRunner().invoke(main, args, input=answers)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_init_writes_a_valid_configuration_for_every_engine_and_router(
    engine: str, router: str, tmp_path: Path
) -> None:
    path = tmp_path / "kvbus.yaml"
    done = invoke("init", "--engine", engine, "--router", router, "--host", "10.0.0.7", "-o", str(path))
    assert done.exit_code == 0, done.output
    assert f"kvbus doctor {path}" in done.stderr
    text = path.read_text()
    assert ENGINES[engine]["name"] in text
    assert ROUTERS[router]["name"] in text
    assert "POD" not in text
    assert "](" not in text, "a link to a document that an installation does not have"
    assert max(map(len, text.replace(str(path), "").splitlines())) <= 140
    checked = invoke("check", str(path))
    assert checked.exit_code == 0, checked.output
    assert "profile: " in checked.stdout


async def test_doctor_finds_the_engine_of_a_configuration_written_by_init(tmp_path: Path) -> None:
    path = tmp_path / "kvbus.yaml"
    assert invoke("init", "--engine", "vllm", "--router", "dynamo", "-o", str(path)).exit_code == 0
    places = {name: str(free_port()) for name in ("5557", "5558", "5657", "5658")}
    path.write_text(re.sub(r"\b5[56]5[78]\b", lambda found: places[found[0]], path.read_text()))
    arguments = ("doctor", str(path), "--set", "http=null")
    silent = await asyncio.to_thread(kvbus, *arguments)
    assert (silent.returncode, silent.stdout.partition(" at ")[0]) == (1, "nothing listens")
    live, replay = (f"tcp://127.0.0.1:{places[name]}" for name in ("5557", "5558"))
    async with EnginePublisher(live, replay, bind=True):
        done = await asyncio.to_thread(kvbus, *arguments)
    assert done.returncode == 0, done.stdout
    assert live in done.stdout


def test_init_asks_for_the_engine_and_the_router_if_no_option_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke("init", answers="vllm\nno such router\nllm-d\n")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "kvbus.yaml").read_text()
    assert "vLLM, kvbus and llm-d" in text
    assert "model: MODEL" in text, "nobody has named the model"


def test_init_writes_the_model_and_the_host_into_the_configuration() -> None:
    options = ("--engine", "vllm", "--router", "llm-d", "--model", "Qwen/Qwen3-32B", "--host", "10.0.0.7")
    done = invoke("init", *options, "-o", "-")
    assert "model: Qwen/Qwen3-32B " in done.stdout
    assert "worker: 10.0.0.7:8000 " in done.stdout
    assert "vllm serve Qwen/Qwen3-32B " in done.stdout


def test_init_does_not_overwrite_an_existing_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    done = invoke("init", "--engine", "vllm", "--router", "smg", "-o", str(path))
    assert done.exit_code == 2
    assert f"{path} exists; name another file with --output" in done.stderr
    assert path.read_text() == "mine"


def test_init_names_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "none" / "kvbus.yaml"
    done = invoke("init", "--engine", "vllm", "--router", "smg", "-o", str(path))
    assert done.exit_code == 2
    assert f"{path}: No such file or directory" in done.stderr
