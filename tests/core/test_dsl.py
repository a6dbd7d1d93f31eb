"""The script itself: it must fail where the relay does something else, and say what."""

import pytest

from tests.core.dsl import Script, live, publish
from tests.doubles.payloads import removed, store


def test_a_conversation_that_goes_as_written():
    script = Script()
    assert script >> live(0, store([1])) << publish(0, store([1])) >> live(1, removed([1])) << publish(1, removed([1]))
    assert script.router.blocks == {}


def test_a_different_command_fails_with_the_conversation():
    script = Script() >> live(0, store([1]))
    with pytest.raises(AssertionError, match=r"(?s)>> live 0.*expected publish 0: store \[2\].*got  publish 0"):
        script << publish(0, store([2]))


def test_a_command_that_was_not_expected_fails():
    script = Script() >> live(0, store([1]))
    with pytest.raises(AssertionError, match="expected nothing"):
        bool(script)


def test_a_command_that_does_not_come_fails():
    script = Script() >> live(0)
    with pytest.raises(AssertionError, match="but got  nothing"):
        script << publish(0, store([2]))


@pytest.mark.parametrize("envelope", [{"rank": 1}, {"ts": 2.0}, {"topic": b"x"}])
def test_the_envelope_is_compared_where_given(envelope):
    script = Script() >> live(0, store([1]), ts=1.0, rank=0)
    with pytest.raises(AssertionError, match="but got  publish 0"):
        script << publish(0, store([1]), **envelope)
