"""Tests for how kvbus reports that a log's server refuses it.

kvbus derives the reason from the error of the client library. The module also tests the time limit of requests.
"""

import pytest

from kvbus.parts.log.contract import UnavailableError
from kvbus.parts.log.location import causes, insisted, refusal
from kvbus.transport.tls_files import TlsFileError


def test_causes_lists_each_error_of_a_cyclic_context_once():
    first, second = OSError("first"), OSError("second")
    first.__context__, second.__context__ = second, first
    assert list(causes(first)) == [first, second]


def test_causes_leaves_out_a_suppressed_context():
    first, second = OSError("first"), OSError("second")
    first.__context__ = second
    assert list(causes(first)) == [first, second]
    first.__suppress_context__ = True
    assert list(causes(first)) == [first]
    first.__cause__ = second
    assert list(causes(first)) == [first, second]


def test_a_refusal_names_the_file_with_its_section():
    found = refusal(TlsFileError("password_file", "is empty"), "nats")
    assert found is not None
    assert (str(found), found.reason) == ("nats.password_file is empty", "key_file")
    assert refusal(OSError("other"), "nats") is None


async def test_an_attempt_is_repeated_without_an_answer_but_not_after_a_refusal():
    asked = []

    async def attempt(left):
        asked.append(left)
        if len(asked) < 3:
            raise UnavailableError("nothing was heard")
        if len(asked) == 3:
            return "answer"
        raise UnavailableError("no", "denied")

    assert await insisted(attempt) == "answer"
    assert 10 >= asked[0] > asked[1] > asked[2] > 0
    with pytest.raises(UnavailableError, match="no"):
        await insisted(attempt)
    assert len(asked) == 4
