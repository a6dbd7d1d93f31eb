"""A reader in another language, without any code of kvbus, reads the vectors as they say."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.spec.vectors import DIRECTORY, VECTORS

GO: Final = shutil.which("go", path="/usr/local/go/bin") or shutil.which("go")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if GO is None:
        pytest.skip("Go is not installed")
    program = tmp_path_factory.mktemp("reader") / "reader"
    source = Path(__file__).parent / "readers" / "go"
    subprocess.run([GO, "build", "-trimpath", "-o", program, "."], cwd=source, check=True, timeout=300)
    return program


def run(program: Path, directory: Path) -> tuple[int, dict[str, str]]:
    found = subprocess.run([program, directory], capture_output=True, text=True, timeout=60, check=False)
    lines = [line.partition(": ") for line in found.stdout.splitlines()]
    return found.returncode, {name: wrong for name, _, wrong in lines}


@pytest.mark.slow
def test_a_reader_in_go_reads_every_vector(reader):
    assert run(reader, DIRECTORY) == (0, dict.fromkeys(VECTORS, ""))


@pytest.mark.slow
def test_it_says_which_vector_it_does_not_read_so(reader, tmp_path):
    vector = json.loads((DIRECTORY / "stores.json").read_text())
    vector["view"].pop()
    (tmp_path / "stores.json").write_text(json.dumps(vector))
    status, found = run(reader, tmp_path)
    assert (status, list(found)) == (1, ["stores"])
    assert "expected" in found["stores"]
