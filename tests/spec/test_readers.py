"""Tests that readers in other languages, which use no code of kvbus, read the specification's test vectors
correctly.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from kvbus.tools.conform.vectors import VECTORS
from tests.log import vectors as log
from tests.spec.vectors import DIRECTORY

GO: Final = shutil.which("go", path="/usr/local/go/bin") or shutil.which("go")
PEERS_ENV: Final = "TEST_ZMTP_PEERS_HOME"


def in_go(directory: Path) -> Path:
    if GO is None:
        pytest.skip("Go is not installed")
    source = Path(__file__).parent / "readers" / "go"
    subprocess.run([GO, "build", "-trimpath", "-o", directory / "reader", "."], cwd=source, check=True, timeout=300)
    return directory / "reader"


def in_rust(_directory: Path) -> Path:
    program = Path(os.environ.get(PEERS_ENV, "/nowhere"), "spec-reader", "reader")
    if not program.exists():
        pytest.skip(f"{PEERS_ENV} has no spec-reader, as .ci/zmtp-peers.sh DIR builds it; .ci/run does that")
    return program


@pytest.fixture(scope="module", params=[in_go, in_rust], ids=["go", "rust"])
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("reader"))


def run(program: Path, *arguments: Path | str) -> tuple[int, dict[str, str]]:
    found = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)
    lines = [line.partition(": ") for line in found.stdout.splitlines()]
    return found.returncode, {name: wrong for name, _, wrong in lines}


@pytest.mark.slow
def test_a_reader_reads_every_vector(reader):
    assert run(reader, DIRECTORY) == (0, dict.fromkeys(VECTORS, ""))


@pytest.mark.slow
def test_a_reader_names_the_vector_with_a_different_result(reader, tmp_path):
    vector = json.loads((DIRECTORY / "stores.json").read_text())
    vector["view"].pop()
    (tmp_path / "stores.json").write_text(json.dumps(vector))
    status, found = run(reader, tmp_path)
    assert (status, list(found)) == (1, ["stores"])
    assert "expected" in found["stores"]


@pytest.mark.slow
def test_a_reader_follows_every_log_and_reads_every_key(reader):
    assert run(reader, "log", log.DIRECTORY) == (0, dict.fromkeys(log.files(), ""))


WRONG: Final = {
    "at": 29.0,
    "record": "93",
    "fields": None,
    "counted": {"double": 1},
    "holds": "part",
    "epoch": 2,
    "next": 9,
    "view": [{"group": None, "medium": "GPU", "hash": 5}],
}


@pytest.mark.slow
def test_a_reader_names_the_log_step_or_key_with_a_different_result(reader, tmp_path):
    vector = json.loads((log.DIRECTORY / "clock-set-back.json").read_text())
    for name, wrong in WRONG.items():
        steps = [*vector["steps"][:2], vector["steps"][2] | {name: wrong}, *vector["steps"][3:]]
        (tmp_path / f"{name}.json").write_text(json.dumps({"steps": steps}))
    keys = json.loads((log.DIRECTORY / "keys.json").read_text())["keys"]
    (tmp_path / "none.json").write_text(json.dumps({"keys": [keys[0] | {"stream": None}]}))
    (tmp_path / "some.json").write_text(json.dumps({"keys": [keys[-1] | {"stream": keys[0]["stream"]}]}))
    (tmp_path / "nothing.json").write_text("{}")
    status, found = run(reader, "log", tmp_path)
    assert (status, set(found)) == (1, {*WRONG, "none", "some", "nothing"})
    assert [name for name, wrong in found.items() if "expected" not in wrong] == ["nothing"]
    assert found["nothing"]
