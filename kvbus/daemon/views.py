"""The views: one for each output, and another for each set of rights that keys of the output have.

Views are by rights, not by keys: routers with the same rights read the same streams. The outputs themselves have the
first numbers, in the order of the configuration, and show everything.

A router whose rights change while kvbus runs has seen numbers of its former view. So it gets a new view, which begins
with numbers that no router has seen, even if another view with these rights exists.
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
class View:
    """The rights of some keys of an output.

    Attributes:
        output: the output's position in the configuration.
        grant: the rights.
        since: number of the key change that created the view; 0 if it exists since the start of kvbus.
        closed: whether the view has no more readers.
    """

    output: int
    grant: Grant = EVERYTHING
    since: int = 0
    closed: bool = False

    def name(self, config: Config) -> str:
        """Return the name of the view's streams, which is the same after a restart.

        It consists of the output's name, a digest of the rights, and the key change.
        """
        name = config.outputs[self.output].name
        if self.grant != EVERYTHING:
            salts = None if self.grant.salts is None else sorted(self.grant.salts)
            name += f"#{_digest(repr((replace(self.grant, salts=None), salts)))}"
        return f"{name}+{self.since}" if self.since else name

    def sees(self, config: Config, worker: Worker) -> bool:
        """Return whether the view shows anything of a source."""
        if self.closed:
            return False
        topic = topic_of(config, config.outputs[self.output], worker)
        label = f"{worker.source}/{worker.rank}"
        return self.grant.reads_source(worker.source, label, config.model, None if topic is None else topic.decode())


class Views:
    """All views by number.

    Args:
        config: the configuration.
        keys: the keys that may connect to each output, with their rights.

    Raises:
        ConfigError: there are more views than ``limits.max_views``.
    """

    def __init__(self, config: Config, keys: Keys) -> None:
        self.all = [View(output) for output in range(len(config.outputs))]
        self._outputs = len(config.outputs)
        self._changes = 0
        self._of_key: dict[tuple[int, bytes], View] = {}
        """The view that a router reads, or has read last, by output and key."""
        self.change(config, keys)

    def change(self, config: Config, keys: Keys) -> list[int]:
        """Update the views to new keys. Return the numbers of the views that are new or have lost their last reader.

        Raises:
            ConfigError: there are more views than ``limits.max_views``; nothing has changed.
        """
        wanted = self.wanted(config, keys)
        changed = self._arrange(dict.fromkeys([*self.all[: self._outputs], *wanted.values()]))
        self._of_key |= wanted
        self._changes += 1
        return changed

    def wanted(self, config: Config, keys: Keys) -> dict[tuple[int, bytes], View]:
        """Return the view that each key is to read, by output and key.

        Raises:
            ConfigError: there are more views than ``limits.max_views``.
        """
        wanted: dict[tuple[int, bytes], View] = {}
        for output, at in enumerate(config.outputs):
            curve = keys.get(output_domain(at.name))
            for key, client in ({} if curve is None else curve.clients).items():
                wanted[output, key] = self._view(output, key, client.grant)
        count, limit = len(set(wanted.values()) - set(self.all[: self._outputs])), config.limits.max_views
        if count > limit:
            wrong = f"{count} different rights on the lists, and limits.max_views allows {limit}"
            raise ConfigError([Problem("limits.max_views", wrong, str(limit), f"max_views: {count}")])
        return wanted

    def _view(self, output: int, key: bytes, grant: Grant) -> View:
        last = self._of_key.get((output, key))
        there = [view for view in self.all if not view.closed and (view.output, view.grant) == (output, grant)]
        if last is not None:
            return last if last in there else View(output, grant, since=self._changes)
        return there[0] if there else View(output, grant, since=self._changes)

    def _arrange(self, named: Collection[View]) -> list[int]:
        """Assign numbers to the named views. Return the numbers whose view was closed or replaced."""
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

    def of_output(self, output: int) -> dict[int, View]:
        """Return the views of one output except the output itself, by number."""
        found = enumerate(self.all[self._outputs :], self._outputs)
        return {number: view for number, view in found if view.output == output and not view.closed}

    def by_key(self, output: int, keys: Iterable[bytes]) -> dict[bytes, int]:
        """Return the number of the view of each of an output's keys. A missing key reads the output itself."""
        numbers = {view: number for number, view in self.of_output(output).items()}
        found = {key: numbers.get(self._of_key[output, key]) for key in keys}
        return {key: number for key, number in found.items() if number is not None}

    def identity(self, config: Config, keys: Keys) -> list[str]:
        """Return what a state on disk depends on: the views by number, and the view of each key.

        It is empty without views.
        """
        names = ["" if view.closed else view.name(config) for view in self.all[self._outputs :]]
        readers = [
            sorted(self.by_key(output, curve.clients).items())
            for output, at in enumerate(config.outputs)
            if (curve := keys.get(output_domain(at.name))) is not None
        ]
        return [*names, _digest(repr(readers))] if names else []

    def hidden(self, config: Config, output: int) -> dict[int, frozenset[int]]:
        """Return by slot the views of an output that show nothing of the source in that slot."""
        views = self.of_output(output)
        workers = {stream.index: worker_of(config, stream) for stream in config.streams()}
        return {
            slot: frozenset(number for number, view in views.items() if not view.sees(config, worker))
            for slot, worker in workers.items()
        }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def topic_of(config: Config, output: OutputConfig, worker: Worker) -> bytes | None:
    """Return the topic of a worker's stream; None if it is the source's own topic."""
    if (only := PROFILES[output.profile].only_topic) is not None:
        return only.encode()
    if output.topic is None:
        return None
    return topic_for(output.topic, config, *worker)
