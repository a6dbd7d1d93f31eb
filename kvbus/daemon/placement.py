"""The slot of each worker. A worker is a source's name and rank, regardless of the source's position in the list.

A slot is a worker's number inside kvbus, and its rank on merged outputs. A worker keeps its slot when other workers are
added or removed. A removed worker keeps its slot too, so the seqs of its stream continue when it returns. A router that
was disconnected when the worker was removed then sees a gap, and gets the state without the old blocks. If there are
``limits.max_sources`` workers, a new worker gets the slot of the worker that was removed first.

An exception are outputs with a port for each source. With them, the slots follow the order of the configured sources,
because the routers' ports follow this order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple

import msgspec

from kvbus.common.errors import ConfigError, Problem
from kvbus.config import Config, SourceStream, topic_for
from kvbus.state.contract import MAX_SEQ
from kvbus.state.reservations import SeqReservations

log = logging.getLogger("kvbus.daemon.placement")

_VERSION: Final = "kvbus-slots-1"
_STATE_KEY: Final = "slots"
"""Name under which the placement is stored beside the seq reservations."""

_MOST_SLOTS: Final = 1 << 17
"""A stored slot of this number or higher shows that the stored data is damaged.

``limits.max_sources`` and ``sources[].slot`` cannot be so high.
"""


class Worker(NamedTuple):
    """One rank of an engine, identified by the name of its source and its rank."""

    source: str
    rank: int


class Placement(msgspec.Struct, frozen=True):
    """The slot of each worker. A slot is a worker's number inside kvbus, and its rank on merged outputs.

    Attributes:
        slots: the slot of each present worker, and of each removed worker that keeps its slot.
        gone: the removed workers that keep their slots, in the order of their removal.
        forgotten: a seq above all seqs of workers that have lost their slots, on any output. A worker that returns
            begins its stream at this seq or later.
    """

    slots: dict[Worker, int] = {}
    gone: tuple[Worker, ...] = ()
    forgotten: int = 0

    def streams(self, config: Config) -> dict[int, SourceStream]:
        """Return the stream that each source publishes, by the source's slot."""
        found = {}
        for stream in config.streams():
            slot = self.slots[worker_of(config, stream)]
            found[slot] = replace(stream, index=slot)
        return found

    @property
    def gone_slots(self) -> dict[int, Worker]:
        """The removed workers that keep their slots, by slot."""
        return {self.slots[worker]: worker for worker in self.gone}


def worker_of(config: Config, stream: SourceStream) -> Worker:
    """Return the worker (an engine's name and a rank) that publishes a stream."""
    return Worker(config.sources[stream.source_index].name, stream.rank)


def assign_slots(before: Placement, config: Config) -> Placement:
    """Return a placement that has a slot for every worker of a configuration.

    Args:
        before: the current placement. Its workers keep their slots if possible.
        config: the configuration with the workers.

    Raises:
        ConfigError: there are more workers than ``limits.max_sources``, or two workers would have the same topic.
    """
    most = config.limits.max_sources
    streams = {worker_of(config, stream): stream for stream in config.streams()}
    if len(streams) > most:
        wrong = f"there are {len(streams)} sources, counting every rank, but limits.max_sources allows {most}"
        raise ConfigError([Problem("sources", wrong, example=f"limits: {{max_sources: {len(streams)}}}")])
    by_list = any(output.layout == "per_source" for output in config.outputs)
    slots = {
        worker: stream.index
        for worker, stream in streams.items()
        if by_list or config.sources[stream.source_index].slot is not None
    }
    taken = set(slots.values())
    for worker, slot in before.slots.items():
        if worker in streams and worker not in slots and slot not in taken:
            slots[worker] = slot
            taken.add(slot)
    gone = _gone(before, config, streams, taken)
    kept = {before.slots[worker] for worker in gone}
    for worker, stream in streams.items():
        if worker in slots:
            continue
        if len(slots) + len(gone) >= most:
            slot = before.slots[gone.pop(0)]
        else:
            slot = stream.index
            used = taken | kept
            if slot in used:
                slot = next(each for each in range(len(used) + 1) if each not in used)
        kept.discard(slot)
        slots[worker] = slot
        taken.add(slot)
    del gone[: max(0, len(slots) + len(gone) - most)]
    return Placement({**{worker: before.slots[worker] for worker in gone}, **slots}, tuple(gone), before.forgotten)


def _gone(before: Placement, config: Config, workers: Iterable[Worker], taken: set[int]) -> list[Worker]:
    """Return the removed workers that keep their slots, in the order of their removal.

    A removed worker loses its slot if a present worker now has its topic, because a topic has one stream.

    Args:
        before: the placement before the change.
        config: the configuration after the change.
        workers: the present workers.
        taken: the slots of the present workers.

    Raises:
        ConfigError: two present workers would have the same topic.
    """
    if all(output.layout == "per_source" for output in config.outputs):
        return []
    templates = {
        number: output.topic
        for number, output in enumerate(config.outputs)
        if output.layout == "per_topic" and output.topic is not None
    }
    topics: dict[tuple[int, bytes], Worker] = {}
    for worker in workers:
        for number, template in templates.items():
            topic = topic_for(template, config, *worker)
            other = topics.setdefault((number, topic), worker)
            if other is not worker:
                wrong = f"{_shown(worker)} and {_shown(other)} would both have the topic {topic.decode()!r}"
                raise ConfigError([Problem(f"outputs[{number}].topic", wrong, template, "topic: kv@{source}/{rank}")])
    known = set(workers)
    left: list[Worker] = []
    for worker in dict.fromkeys(each for each in (*before.gone, *before.slots) if each not in known):
        own = [(number, topic_for(template, config, *worker)) for number, template in templates.items()]
        # The new configuration may give two removed workers the same topic, although they had different topics before.
        # Then only the first of them keeps its slot.
        if before.slots[worker] not in taken and topics.keys().isdisjoint(own):
            topics |= dict.fromkeys(own, worker)
            left.append(worker)
    return left


def _shown(worker: Worker) -> str:
    return f"{worker.source} rank {worker.rank}"


class _File(msgspec.Struct):
    version: str
    slots: list[tuple[str, int, int]]
    gone: list[tuple[str, int]]
    forgotten: int


def _by_name(config: Config) -> bool:
    """Return whether an output identifies its sources by name.

    If none does, slots follow the order of the configuration.
    """
    return any(output.layout != "per_source" for output in config.outputs)


def read_placement(reservations: SeqReservations, config: Config) -> Placement:
    """Return the placement that an earlier process has stored; empty if there is no valid one.

    With an empty placement, slots follow the order of the configuration.
    """
    content = reservations.kept(_STATE_KEY) if _by_name(config) else None
    if content is None:
        return Placement()
    try:
        found = msgspec.json.decode(content, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("the stored slots are damaged (%s): sources are numbered in the order of the configuration", error)
        return Placement()
    slots = {Worker(name, rank): slot for name, rank, slot in found.slots}
    gone = tuple(worker for worker in (Worker(*each) for each in found.gone) if worker in slots)
    numbers = set(slots.values())
    sound = len(numbers) == len(slots) and all(0 <= at < _MOST_SLOTS for at in numbers)
    if found.version != _VERSION or not sound or not 0 <= found.forgotten < MAX_SEQ:
        return Placement()
    return Placement(slots, gone, found.forgotten)


def keep_placement(reservations: SeqReservations, config: Config, placement: Placement) -> None:
    """Store a placement (which worker has which slot) for the next process.

    Call this before a batch of a new worker is sent.
    """
    if _by_name(config):
        slots = [(*worker, slot) for worker, slot in placement.slots.items()]
        content = _File(_VERSION, slots, list(placement.gone), placement.forgotten)
        reservations.keep(_STATE_KEY, msgspec.json.encode(content))


def forget(placement: Placement, reached: Iterable[int]) -> Placement:
    """Return a placement that also records the seqs which workers reached before they lost their slots.

    Args:
        placement: the placement.
        reached: the next seq of each stream of these workers.
    """
    return msgspec.structs.replace(placement, forgotten=max([placement.forgotten, *reached]))
