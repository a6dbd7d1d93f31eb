"""Tests that run the fuzz targets without a fuzzer.

Their inputs are the committed corpus, and every input that once broke a target.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("name", TARGETS)
def test_no_file_of_the_corpus_fails_its_fuzz_target(name: str) -> None:
    files = sorted((CORPUS / name).iterdir())
    assert len(files) >= 20
    for file in files:
        try:
            TARGETS[name](file.read_bytes())
        except Exception as error:
            raise AssertionError(f"{file.relative_to(CORPUS)}: {error}") from error
