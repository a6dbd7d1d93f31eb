"""Commands are all that a shell has to carry out: the relay gives each of them, and nothing else."""

from typing import get_args

from kvbus.core.commands import AnswerReplay, Command
from kvbus.core.events import AnswerPulled, SnapshotAsked, Subscribed
from tests.core.dsl import Happens, Script, asked, live, replay_end, up
from tests.doubles.payloads import store


def test_every_command_is_given_by_a_conversation():
    snapshot_asked = Happens("router asks for a snapshot", lambda _: SnapshotAsked(0, 0, [b"id", b"", b"snapshot"]))
    subscribed = Happens("a router subscribes", lambda _: Subscribed(0, 0, (1,)))
    given = Script(replay=True).after(up(), replay_end(), live(0, store([1])), asked(0), snapshot_asked, subscribed)
    script = Script(replay=True, settings={"snapshot": True})
    (begun,) = [command for command in given if isinstance(command, AnswerReplay)]
    given += script.after(up(), Happens("a router takes more", lambda _: AnswerPulled(0, 0, begun.answer)))
    assert {type(command) for command in given} == set(get_args(Command))
