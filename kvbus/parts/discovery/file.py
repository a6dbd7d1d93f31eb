"""A discoverer that reads a list of engines from a YAML or JSON file at a fixed interval.

It compares the file's content, not the modification time or the inode. So it notices every kind of change: a file that
is replaced by a rename, a file that is rewritten within one tick of the file system's clock, and a ConfigMap, in which
Kubernetes changes a symbolic link.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from kvbus.common.errors import Problem
from kvbus.config.paths import show
from kvbus.config.problems import from_pydantic, plain
from kvbus.config.values import ApiUrl, Endpoint, Int, Seconds, Section, Text, key
from kvbus.parts.discovery.contract import (
    DiscoveryError,
    Engine,
    EntryError,
    Services,
    fitting_name,
    publishers,
)

MAX_BYTES: Final = 4 * 1024 * 1024
"""Maximum size in bytes of the file that lists engines. A larger file is refused."""


class FileSettings(Section):
    """The configuration keys of ``discover: {file: …}``."""

    path: Path = key(
        ...,
        "A YAML or JSON file with a list of engines: `name` and `endpoint`, and optionally `replay_endpoint`, "
        "`data_parallel_size`, `topic` and `api`. An empty list means that there are no engines. A missing file is an"
        " error.",
        example="/etc/kvbus/engines.yaml",
    )
    interval: Seconds = key(1.0, "Interval at which kvbus reads the file.", example=1.0, unit="s", gt=0)


class Listed(Section):
    """The configuration keys that describe one engine in the file."""

    name: Text = key(..., "Name of the engine, which identifies it.", example="pod-a")
    endpoint: Endpoint = key(..., "Endpoint of rank 0's live stream.", example="tcp://10.0.0.3:5557")
    replay_endpoint: Endpoint | None = key(
        None, "Endpoint of rank 0's replay. null: no replay.", example="tcp://10.0.0.3:5558"
    )
    data_parallel_size: Int | None = key(
        None, "Number of ranks. null: that of the `sources` entry.", example=1, ge=1, le=4096
    )
    topic: Text | None = key(None, "Topic under which the engine publishes.", example="kv@pod-a@m")
    api: ApiUrl | None = key(None, "Base URL of the engine's HTTP API.", example="http://10.0.0.3:8000")


class FileDiscoverer:
    """A discoverer that reads engines from a file; see :class:`~kvbus.parts.discovery.contract.Discoverer`."""

    Settings = FileSettings

    def __init__(self, settings: FileSettings, services: Services) -> None:
        self._settings = settings
        self._services = services

    async def watch(self) -> AsyncGenerator[tuple[Engine, ...], None]:
        """Yield the engines that the file lists: first when watching begins, then after each change of the file."""
        seen = None
        while True:
            text = await asyncio.to_thread(_read, self._settings.path)
            if text != seen:
                yield self._engines(text)
                seen = text
            await asyncio.sleep(self._settings.interval)

    def _engines(self, text: bytes) -> tuple[Engine, ...]:
        path = self._settings.path
        try:
            items = YAML(typ="safe", pure=True).load(text.decode())
        except (YAMLError, ValueError, RecursionError) as error:
            raise DiscoveryError(f"{path} is neither YAML nor JSON: {' '.join(str(error).split())}") from error
        if not isinstance(items, list):
            raise DiscoveryError(f"{path} has no list of engines; write [] for an empty list")
        where, found, faults = f"file {path}", dict[str, Engine](), dict[int, Problem]()
        for number, item in enumerate(items):
            try:
                engine = self._engine(number, item, where)
            except EntryError as error:
                faults[number] = error.problem
                continue
            if engine.name in found:
                wrong = "another entry of the list has this name"
                faults[number] = Problem(f"[{number}].name", wrong, engine.name, f"{engine.name}-2")
            else:
                found[engine.name] = engine
        for number, fault in faults.items():
            # An invalid entry has the name of its engine, so that an engine that was found before stays a source.
            name = items[number].get("name") if isinstance(items[number], dict) else None
            name = fitting_name(name) if isinstance(name, str) else f"[{number}]"
            name = f"[{number}]" if name in found else name
            found[name] = Engine(name, (), where, faults=(fault,))
        return tuple(found.values())

    def _engine(self, number: int, item: Any, where: str) -> Engine:
        """Return the engine that one entry of the list describes.

        Args:
            number: the position of the entry in the list, from 0.
            item: the entry.
            where: a description of the file, for :attr:`Engine.where`.

        Raises:
            EntryError: the entry has an invalid value.
        """
        try:
            each = Listed.model_validate(item)
        except ValidationError as error:
            raise EntryError(_problem(number, error)) from error
        ranks = each.data_parallel_size or self._services.data_parallel_size
        try:
            found = publishers(each.endpoint, each.replay_endpoint, ranks)
        except EntryError as error:
            raise EntryError(replace(error.problem, key=f"[{number}].{error.problem.key}")) from error
        return Engine(fitting_name(each.name), found, where, each.topic, each.api)


def _problem(number: int, error: ValidationError) -> Problem:
    """Return the first problem of the entry at position ``number`` of the list, with an example of the key."""
    first = error.errors()[0]
    problem = replace(from_pydantic(Listed, first, {}), key=show((number, *first["loc"])))
    field = Listed.model_fields.get(str(first["loc"][0])) if first["loc"] else None
    if field is None:
        return replace(problem, example="{name: pod-a, endpoint: tcp://10.0.0.3:5557}")
    return replace(problem, example=plain(field.examples[0])) if field.examples else problem


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise DiscoveryError(f"{path}: {error.strerror or error}") from error
    if len(text) > MAX_BYTES:
        raise DiscoveryError(f"{path} is larger than {MAX_BYTES} bytes")
    return text
