"""The vectors at the published decoders of vLLM and SGLang: what each refuses is a row of docs/spec/matrix.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

from kvbus.conform.vectors import VECTORS
from tests.conform.publishers import MODULES
from tests.conform.test_publishers import CASES
from tests.spec.vectors import DIRECTORY

_TEXT: Final = (DIRECTORY.parent / "matrix.md").read_text()
SECTION: Final = _TEXT.partition("## The vectors at published decoders")[2].partition("\n## ")[0]
ROWS: Final = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", SECTION, re.MULTILINE)


def refused(engine: str) -> dict[str, str]:
    """What the table says that this engine's decoder says, for each vector that it refuses."""
    said = {name: vllm if engine == "vllm" or other == "the same" else other for name, vllm, other, _ in ROWS}
    return {name: text for name, text in said.items() if text != "decoded"}


def test_the_table_names_vectors_with_their_clauses_and_counts_the_others() -> None:
    assert {name: clauses.split(", ") for name, _, _, clauses in ROWS} == {
        name: VECTORS[name].clauses for name, *_ in ROWS
    }
    decoded = [len(VECTORS) - len(refused(engine)) for engine in MODULES]
    assert re.findall(r"(\d+) of the (\d+)", SECTION) == [(str(count), str(len(VECTORS))) for count in decoded]


@pytest.mark.parametrize("engine", MODULES)
def test_what_the_decoder_makes_of_them(engine: str) -> None:
    variable = CASES[engine][0]
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no Python with {engine}")
    program: list[str | Path] = [python, Path(__file__).with_name("decoders.py"), MODULES[engine], DIRECTORY]
    done = subprocess.run(program, stdout=subprocess.PIPE, timeout=600, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(VECTORS, "") | refused(engine)
