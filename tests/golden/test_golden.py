"""Tests that kvbus's outputs for captured engines and simulated worlds are the recorded ones.

`make golden` shows differences.
"""

import pytest

from tests.golden.cases import cases
from tests.golden.hashes import digest, recorded
from tests.golden.texts import DATA, texts

CASES = cases()
TEXTS = texts()


@pytest.mark.parametrize("name", CASES)
def test_the_output_streams_match_the_recorded_hashes(name):
    assert digest(CASES[name]()) == recorded().get(name), f"make golden ARGS='--print \"{name}\"' prints its streams"


def test_every_recorded_hash_has_a_golden_case():
    assert recorded().keys() == CASES.keys()


@pytest.mark.parametrize("name", TEXTS)
def test_the_texts_match_the_recorded_files(name):
    assert TEXTS[name]() == (DATA / name).read_text()
