"""Tests for the script helpers in ``dsl.py``: a script fails at a command that the test does not expect, and the
failure names the command.
"""

import pytest

from tests.core.dsl import Script, ask, live, publish, up
from tests.core.sequencing.script import SequencerScript
from tests.doubles.payloads import store


def test_a_different_command_fails_with_the_conversation():
    script = Script() >> live(0, store([1]))
    with pytest.raises(AssertionError, match=r"(?s)>> live 0.*expected publish 0: store \[2\].*got  publish 0"):
        script << publish(0, store([2]))


def test_a_missing_command_fails_the_script():
    script = Script() >> live(0)
    with pytest.raises(AssertionError, match="but got  nothing"):
        script << publish(0, store([2]))


@pytest.mark.parametrize("envelope", [{"rank": 1}, {"ts": 2.0}, {"topic": b"x"}])
def test_the_script_compares_rank_ts_and_topic_if_they_are_given(envelope):
    script = Script() >> live(0, store([1]), ts=1.0, rank=0)
    with pytest.raises(AssertionError, match="but got  publish 0"):
        script << publish(0, store([1]), **envelope)


def test_a_different_action_fails_with_the_conversation():
    script = SequencerScript() >> up()
    with pytest.raises(
        AssertionError, match=r"(?s)>> up 0.*expected ask source 0 from 7.*got  Ask\(request=1, start=0\)"
    ):
        script << ask(7)
