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
def test_the_streams_are_those_that_were_recorded(name):
    assert digest(CASES[name]()) == recorded().get(name), f"make golden ARGS='--print \"{name}\"' prints its streams"


def test_no_case_was_taken_away():
    assert recorded().keys() == CASES.keys()


@pytest.mark.parametrize("name", TEXTS)
def test_the_texts_are_those_that_were_recorded(name):
    assert TEXTS[name]() == (DATA / name).read_text()
