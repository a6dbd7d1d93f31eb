"""Tests that give the specification's test vectors to the published decoders of vLLM and SGLang.

The known errors of these decoders are listed in docs/spec/results.
"""

from __future__ import annotations

import json

import pytest

from kvbus.tools.conform.vectors import VECTORS
from tests.conform.judged import CAPTURES, DECODERS, decoded, home_of, lacking


@pytest.mark.parametrize("engine", CAPTURES)
def test_a_published_decoder_has_the_filed_result_for_each_vector(engine: str) -> None:
    if home_of(engine) is None:
        pytest.skip(lacking(engine))
    filed = json.loads(DECODERS.read_text())[engine]
    assert decoded(engine) == filed
    assert filed.keys() == VECTORS.keys()
