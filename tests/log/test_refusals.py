"""Tests for how kvbus reports that a log's server refuses it.

kvbus derives the reason from the error of the client library. The module also tests the time limit of requests.
"""

import pytest

from kvbus.parts.log.contract import UnavailableError
from kvbus.parts.log.location import causes, insisted, refusal
from kvbus.transport.tls_files import TlsFileError


def test_an_error_that_is_in_its_own_context_is_walked_once():
    first, second = OSError("first"), OSError("second")
    first.__context__, second.__context__ = second, first
    assert list(causes(first)) == [first, second]


def test_a_context_that_is_suppressed_is_no_cause():
    first, second = OSError("first"), OSError("second")
    first.__context__ = second
    assert list(causes(first)) == [first, second]
    first.__suppress_context__ = True
    assert list(causes(first)) == [first]
    first.__cause__ = second
    assert list(causes(first)) == [first, second]


def test_a_file_is_named_with_its_section():
    found = refusal(TlsFileError("password_file", "is empty"), "nats")
    assert found is not None
    assert (str(found), found.reason) == ("nats.password_file is empty", "key_file")
    assert refusal(OSError("other"), "nats") is None


async def test_who_is_refused_does_not_insist_and_who_hears_nothing_does():
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
