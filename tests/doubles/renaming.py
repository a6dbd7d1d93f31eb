"""A comparison of two runs of the relay that may differ only by a consistent renaming of hashes, tokens and other
values.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvbus.core.commands import AnswerReplay, Command, Publish, RequestReplay
from kvbus.core.events import BatchReceived, ReplayReceived, SourceDown, SourceUp
from kvbus.core.findings.source import source_findings
from kvbus.core.stats import SourceStats
from kvbus.core.wire.frames import END_SEQ
from kvbus.tools.capture.format import Message
from tests.core.dsl import Script, asked, tick
from tests.doubles.answers import reading

STAYS: Final = frozenset({"type", "block_size", "medium", "group_idx", "kv_cache_spec_sliding_window"})
"""Names of the event fields whose values must be equal in the two runs."""

COUNTS: Final = "remaining_copy_counts"
"""Name of a field of BlockStored that is a list of numbers. The numbers must be equal in the two runs.

If an engine sends a value of another type in this field, the two runs may have different values.
"""


class Renaming:
    """A one-to-one mapping between the values of two runs, which grows while the two runs are compared."""

    def __init__(self) -> None:
        self.names: dict[tuple[type, Any], Any] = {}
        self._values: dict[tuple[type, Any], Any] = {}

    def pair(self, value: Any, name: Any) -> None:
        """Record that the second run has ``name`` where the first run has ``value``.

        Check that ``value`` and ``name`` were not paired with any other value before.
        """
        if isinstance(value, float):  # compare floats as text, because a NaN is not equal to itself
            value, name = value.hex(), name.hex()
        kind = type(value)
        assert type(name) is kind
        assert self.names.setdefault((kind, value), name) == name, f"{value!r} has two names"
        assert self._values.setdefault((kind, name), value) == value, f"{value!r} has the name of another"

    def _same_counts(self, value: Any, name: Any) -> None:
        if not isinstance(value, list):
            self.same(value, name)
            return
        assert isinstance(name, list)
        for inner, renamed in zip(value, name, strict=True):
            if isinstance(inner, int | float):
                assert inner == renamed
            else:
                self.same(inner, renamed)

    def same(self, value: Any, name: Any) -> None:
        """Check that a value of the first run and a value of the second run are equal except for renamed scalars.

        Both must have the same structure, and each scalar of the first run must always have the same name in the second
        run (:meth:`pair`).
        """
        assert type(value) is type(name), (value, name)
        if isinstance(value, dict):
            assert len(value) == len(name)
            for (key, inner), (other, renamed) in zip(value.items(), name.items(), strict=True):
                if key != other:
                    self.pair(key, other)
                if key == COUNTS:
                    self._same_counts(inner, renamed)
                elif key in STAYS:
                    assert inner == renamed
                elif key != "kv_cache_spec_kind" or inner != renamed:  # kinds that kvbus knows are not renamed
                    self.same(inner, renamed)
        elif isinstance(value, list | tuple):
            assert len(value) == len(name)
            for inner, renamed in zip(value, name, strict=True):
                self.same(inner, renamed)
        elif value is None or isinstance(value, bool):
            assert value == name
        else:
            self.pair(value, name)

    def same_batch(self, value: bytes, name: bytes) -> None:
        """Check that two batches of a relay are equal except for the renamed fields of the engines' events.

        ``value`` is the payload of the batch in the first run, and ``name`` its payload in the run with other names.
        """
        (ts, events, rank), (other, renamed, same_rank) = msgspec.msgpack.decode(value), msgspec.msgpack.decode(name)
        assert (ts, rank, len(value)) == (other, same_rank, len(name))
        self.same([_named(event) for event in events], [_named(event) for event in renamed])


def _named(event: Any) -> Any:
    """Convert an event that is an array of positional fields to a map.

    The comparison of two events needs the fields' names, because the fields in `STAYS` must not be renamed.
    """
    if isinstance(event, dict):
        return event
    fields = (
        "block_hashes",
        "parent",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "keys",
        "group_idx",
    )
    names = fields if event[0] == "BlockStored" else ("block_hashes", "medium", "group_idx")
    return {"type": event[0], **dict(zip(names, event[1:], strict=False))}


@dataclasses.dataclass
class Run:
    """The commands and replay answers of one relay, and the statistics that the relay reports."""

    commands: list[Command]
    replays: list[list[bytes]]
    facts: dict[str, Any]


def run(messages: Sequence[Message], *, lost: float = 0.0, seed: int = 0, replay: bool = True, **rules: Any) -> Run:
    """Feed an engine's messages to a relay, and return the relay's output.

    A share of ``lost`` of the messages is missing on the live stream. The engine's replay has all messages.
    """
    script = Script(replay=replay, profiles=("vllm", "dynamo", "aibrix"), journal_batches=5, **rules)
    rng = random.Random(seed)
    commands: list[Command] = []
    buffer: dict[int, bytes] = {}

    def handle(event: Any) -> None:
        for command in script.handle(event):
            commands.append(command)
            if isinstance(command, RequestReplay):
                for seq in sorted(seq for seq in buffer if seq >= command.start):
                    frames = [b"", seq.to_bytes(8, "big"), buffer[seq]]
                    handle(ReplayReceived(0, command.request, frames))
                handle(ReplayReceived(0, command.request, [b"", END_SEQ, b""]))

    handle(SourceUp(0))
    last = -1
    for message in messages:
        if message.seq < last:
            handle(SourceDown(0))
            buffer.clear()
            handle(SourceUp(0))
        last = message.seq
        buffer[message.seq] = message.payload
        if rng.random() >= lost:
            handle(BatchReceived(0, [message.topic, message.seq.to_bytes(8, "big"), message.payload]))
    for _ in range(5):
        script.now += 60
        handle(tick().make(script))
    replays: list[list[bytes]] = []
    for output in range(3):
        for command in script.handle(asked(0, output=output).make(script)):
            if isinstance(command, AnswerReplay):
                reader = reading(script.relay, command)
                while (part := reader.next_message()) is not None:
                    replays += [part] if part else []
    return Run(commands, replays, _facts(script))


def _facts(script: Script) -> dict[str, Any]:
    source = script.relay.sources[0]
    normalizer = source.normalizer
    return {
        "stats": msgspec.to_builtins({name: getattr(source.stats, name) for name in SourceStats.__struct_fields__}),
        "state": source.sequencer.state,
        "partial": source.sequencer.partial,
        "epoch": source.sequencer.epoch,
        "dialect": source.dialect.name,
        "said": [(each.id, each.key, each.text) for each in source_findings(source)],
        "examples": sorted(source.examples),
        "entries": normalizer.entries,
        "bytes": normalizer.index_bytes,
        "groups": normalizer.known_groups,
        "media": normalizer.dump()["media"],
        # without localities and owners, which the renaming may change
        "blocks": sorted((repr(key[:2]), len(table.blocks)) for key, table in normalizer.index.tables.items()),
    }


def same_but_for_names(value: Run, name: Run) -> Renaming:
    """Check that the outputs of two runs are equal except for one renaming, and return that renaming."""
    assert value.facts == name.facts
    renaming = Renaming()
    assert [type(command) for command in value.commands] == [type(command) for command in name.commands]
    for command, renamed in zip(value.commands, name.commands, strict=True):
        if isinstance(command, Publish):
            assert isinstance(renamed, Publish)
            facts = (command.output, command.stream, command.seq, command.events)
            assert facts == (renamed.output, renamed.stream, renamed.seq, renamed.events)
            renaming.pair(command.topic, renamed.topic)
            renaming.same_batch(command.payload, renamed.payload)
        elif isinstance(command, RequestReplay):
            assert command == renamed
    assert len(value.replays) == len(name.replays)
    for frames, others in zip(value.replays, name.replays, strict=True):
        assert list(map(len, frames)) == list(map(len, others))
        if frames[-2] != END_SEQ:
            renaming.same_batch(frames[-1], others[-1])
    return renaming
