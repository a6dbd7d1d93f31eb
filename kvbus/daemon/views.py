"""The views of all outputs. Each output is a view, and each different set of rights of its keys is a further view.

Routers whose keys have the same rights read the same view. The outputs themselves have the first numbers, in the order
of the configuration, and show all blocks.

A router whose rights change while kvbus runs has seen seqs of its former view. Therefore it gets a new view, whose seqs
no router has seen, even if a view with the same rights exists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

from kvbus.common.errors import ConfigError, Problem
from kvbus.config import Config, OutputConfig, topic_for
from kvbus.core.wire.profiles import PROFILES
from kvbus.daemon.keys import Keys, output_domain
from kvbus.daemon.placement import Worker, worker_of
from kvbus.transport.grants import EVERYTHING, Grant

_DIGITS: Final = 16


@dataclass(frozen=True, slots=True)
class AccessScope:
    """The rights that some keys of an output have.

    Attributes:
        output: the position of the output in the configuration.
        grant: the rights.
        since: number of the key change that created the view; 0 if the view has existed since the start of kvbus.
        closed: whether no key reads the view any more.
    """

    output: int
    grant: Grant = EVERYTHING
    since: int = 0
    closed: bool = False

    def name(self, config: Config) -> str:
        """Return the name of the view's streams, which is the same after a restart.

        It consists of the output's name, a digest of the rights if they are limited, and the number of the key change
        that created the view, if there was one.
        """
        name = config.outputs[self.output].name
        if self.grant != EVERYTHING:
            salts = None if self.grant.salts is None else sorted(self.grant.salts)
            name += f"#{_digest(repr((replace(self.grant, salts=None), salts)))}"
        return f"{name}+{self.since}" if self.since else name

    def sees(self, config: Config, worker: Worker) -> bool:
        """Return whether the rights of the view include any events of a worker."""
        if self.closed:
            return False
        topic = topic_of(config, config.outputs[self.output], worker)
        label = f"{worker.source}/{worker.rank}"
        return self.grant.reads_source(worker.source, label, config.model, None if topic is None else topic.decode())


class AccessScopes:
    """All views of all outputs, in the order of their numbers. A view is what keys with the same rights may read.

    Args:
        config: the configuration.
        keys: the keys of each output, with their rights.

    Raises:
        ConfigError: the keys need more views than ``limits.max_views``.
    """

    def __init__(self, config: Config, keys: Keys) -> None:
        self.all = [AccessScope(output) for output in range(len(config.outputs))]
        self._outputs = len(config.outputs)
        self._changes = 0
        self._of_key: dict[tuple[int, bytes], AccessScope] = {}
        """The view that a router reads, or has read last, by the number of the output and the router's key."""
        self.change(config, keys)

    def change(self, config: Config, keys: Keys) -> list[int]:
        """Create and close views so that there is one view for each set of rights of the new keys.

        Returns:
            The numbers of the views that were created, closed or replaced.

        Raises:
            ConfigError: the keys need more views than ``limits.max_views``. Nothing has changed.
        """
        wanted = self.wanted(config, keys)
        changed = self._arrange(dict.fromkeys([*self.all[: self._outputs], *wanted.values()]))
        self._of_key |= wanted
        self._changes += 1
        return changed

    def wanted(self, config: Config, keys: Keys) -> dict[tuple[int, bytes], AccessScope]:
        """Return the view that each key will read, by the number of the output and the key.

        Raises:
            ConfigError: the keys need more views than ``limits.max_views``.
        """
        wanted: dict[tuple[int, bytes], AccessScope] = {}
        for output, at in enumerate(config.outputs):
            curve = keys.get(output_domain(at.name))
            for key, client in ({} if curve is None else curve.clients).items():
                wanted[output, key] = self._view(output, key, client.grant)
        count, limit = len(set(wanted.values()) - set(self.all[: self._outputs])), config.limits.max_views
        if count > limit:
            wrong = f"the key lists have {count} different sets of rights, but limits.max_views allows {limit}"
            raise ConfigError([Problem("limits.max_views", wrong, str(limit), f"max_views: {count}")])
        return wanted

    def _view(self, output: int, key: bytes, grant: Grant) -> AccessScope:
        last = self._of_key.get((output, key))
        current = [view for view in self.all if not view.closed and (view.output, view.grant) == (output, grant)]
        if last is not None:
            return last if last in current else AccessScope(output, grant, since=self._changes)
        return current[0] if current else AccessScope(output, grant, since=self._changes)

    def _arrange(self, named: Collection[AccessScope]) -> list[int]:
        """Give a number to each new view in ``named``, and close all views that are not in ``named``.

        Returns:
            The numbers of the views that were created, closed or replaced.
        """
        changed = set()
        for number, view in enumerate(self.all):
            if not view.closed and view not in named:
                self.all[number] = replace(view, closed=True)
                changed.add(number)
        free = [number for number, view in enumerate(self.all) if view.closed]
        for view in [view for view in named if view not in self.all]:
            if free:
                number = free.pop(0)
                self.all[number] = view
            else:
                number = len(self.all)
                self.all.append(view)
            changed.add(number)
        return sorted(changed)

    def of_output(self, output: int) -> dict[int, AccessScope]:
        """Return the views with limited rights of one output, by number."""
        found = enumerate(self.all[self._outputs :], self._outputs)
        return {number: view for number, view in found if view.output == output and not view.closed}

    def by_key(self, output: int, keys: Iterable[bytes]) -> dict[bytes, int]:
        """Return the number of the view that each of an output's keys reads.

        A key without limited rights is not in the result.
        """
        numbers = {view: number for number, view in self.of_output(output).items()}
        found = {key: numbers.get(self._of_key[output, key]) for key in keys}
        return {key: number for key, number in found.items() if number is not None}

    def identity(self, config: Config, keys: Keys) -> list[str]:
        """Return names for all views and their keys.

        A state on disk is loaded only if these names are the same as when it was written.

        The list is empty if no key has limited rights.
        """
        names = ["" if view.closed else view.name(config) for view in self.all[self._outputs :]]
        readers = [
            sorted(self.by_key(output, curve.clients).items())
            for output, at in enumerate(config.outputs)
            if (curve := keys.get(output_domain(at.name))) is not None
        ]
        return [*names, _digest(repr(readers))] if names else []

    def hidden(self, config: Config, output: int) -> dict[int, frozenset[int]]:
        """For each source, by its slot: return the numbers of the views that show no events of the source."""
        views = self.of_output(output)
        workers = {stream.index: worker_of(config, stream) for stream in config.streams()}
        return {
            slot: frozenset(number for number, view in views.items() if not view.sees(config, worker))
            for slot, worker in workers.items()
        }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def topic_of(config: Config, output: OutputConfig, worker: Worker) -> bytes | None:
    """Return the topic of a worker's outgoing stream; None if it is the topic under which the engine publishes."""
    if (only := PROFILES[output.profile].only_topic) is not None:
        return only.encode()
    if output.topic is None:
        return None
    return topic_for(output.topic, config, *worker)
