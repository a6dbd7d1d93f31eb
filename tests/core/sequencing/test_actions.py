"""Every action is carried out by the relay: none is left over, and each leaves what it asks for."""

from typing import get_args

import pytest

from kvbus.core.commands import CancelReplay, Publish, RequestReplay, RequestSnapshot
from kvbus.core.sequencing.actions import Action, Ask, AskSnapshot, Deliver, Lost, NewEpoch, Stop, Synced
from tests.core.dsl import Script, live, tick
from tests.doubles.payloads import cleared, payload, store, unpack

DONE = [
    (Deliver(1, payload(store([2], 1)), 0), [Publish]),
    (NewEpoch(), [Publish]),
    (Lost(3), [Publish]),
    (Synced(), []),
    (Ask(9, 1), [RequestReplay]),
    (AskSnapshot(9), [RequestSnapshot]),
    (Stop(9), [CancelReplay]),
]


def test_every_action_is_here():
    assert {type(action) for action, _ in DONE} == set(get_args(Action))


@pytest.mark.parametrize(("action", "commands"), DONE, ids=lambda value: type(value).__name__)
def test_the_relay_carries_it_out(action, commands):
    script = Script() >> live(0, store([1]))
    script.whatever()
    script.source.sequencer.actions.append(action)
    script >> tick()
    made = script.whatever()
    assert [type(command) for command in made] == commands
    assert not script.source.sequencer.actions
    if isinstance(action, NewEpoch | Lost):
        assert unpack(made[0].payload)[1] == [cleared()]
    if isinstance(action, Ask | AskSnapshot | Stop):
        assert made[0].request == action.request
