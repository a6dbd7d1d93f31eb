"""Announce the endpoint of each stream in Dynamo's discovery, while the stream's worker has a model card there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

from kvbus.parts.outputs.dynamo import registry
from kvbus.parts.outputs.dynamo.registry import CARDS, CHANNELS, INSTANCES, SOURCES, Found, Scope

log = logging.getLogger("kvbus.outputs")

Asked = TypeVar("Asked")
Got = TypeVar("Got")

PACE: Final = 2.0
"""Time in seconds between two updates of kvbus's records in Dynamo's discovery.

Dynamo ignores a record that is not refreshed for ten seconds.
"""


class Store(Protocol):
    """The interface of a store that holds the records of Dynamo's discovery.

    Its methods block. They raise :class:`OSError` if they fail.
    """

    def put(self, records: Mapping[str, bytes]) -> None:
        """Write records. ``records`` has each record by its path. If a record is already there, refresh it."""

    def delete(self, paths: Iterable[str]) -> None:
        """Delete the records at these paths."""

    def find(self, prefix: str) -> dict[str, bytes]:
        """Return the records whose path begins with ``prefix``."""

    def close(self) -> None:
        """Release the store's resources."""


@dataclass(eq=False)
class Source:
    """One stream of kvbus, as kvbus announces it in Dynamo's discovery.

    Attributes:
        name: the worker's name in kvbus.
        rank: the data-parallel rank of the stream.
        endpoint: the endpoint at which routers get the stream.
        wanted: the worker's id in Dynamo, from the configuration; None if kvbus has to find the id.
        publisher: function that returns a new publisher id. kvbus uses another id after each change of the worker.
        moved: function that is called before the records are written, if the worker or the rank has changed. Its
            arguments are the worker's id or None, the new publisher id, and the rank.
    """

    name: str
    rank: int
    endpoint: str
    wanted: int | None
    publisher: Callable[[], int]
    moved: Callable[[int | None, int, int], None]
    worker: int | None = None
    said_rank: int = 0
    announced: tuple[str, ...] = ()
    number: int = 0
    trouble: str = ""


class Announcer:
    """A task that writes the discovery records of all streams of one output to Dynamo's discovery.

    Args:
        output: the output's name, for log lines.
        scope: the Dynamo endpoint that the workers serve.
        store: the store that holds the records.
        host: the host at which routers reach this process. If Dynamo has several workers, kvbus assumes that its
            streams are those of the worker on this host.
    """

    def __init__(self, output: str, scope: Scope, store: Store, host: str) -> None:
        self._output = output
        self._scope = scope
        self._store = store
        self._host = host
        self._sources: dict[int, Source] = {}
        self._task: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._unreachable = False

    def add(self, stream: int, source: Source) -> None:
        """Start announcing a stream in Dynamo's discovery."""
        self._sources[stream] = source
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def set_rank(self, stream: int, rank: int) -> None:
        """Announce a stream with another rank, because the engine's batches have this rank."""
        self._sources[stream].rank = rank

    def remove(self, stream: int) -> None:
        """Stop announcing a stream, and delete its records.

        A thread deletes them, so that kvbus does not wait for a store that does not answer.
        """
        source = self._sources.pop(stream, None)
        last = not self._sources
        if last and self._task is not None:
            self._task.cancel()
            self._task = None
        if source is not None and source.announced:
            threading.Thread(target=self._withdraw, args=(source.announced, last)).start()

    def _withdraw(self, paths: tuple[str, ...], last: bool) -> None:
        with self._lock, contextlib.suppress(OSError):  # ignore an error, because the records expire after ten seconds
            self._store.delete(paths)
            if last:
                self._store.close()

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
                if self._unreachable:
                    log.info("output %s: Dynamo's discovery answers again", self._output)
                self._unreachable = False
            except OSError as error:
                if not self._unreachable:
                    log.warning("output %s: kvbus cannot reach Dynamo's discovery: %s", self._output, error)
                self._unreachable = True
            await asyncio.sleep(PACE)

    async def _look(self) -> None:
        cards, instances = await self._find(f"{CARDS}/{self._scope.workers}", f"{INSTANCES}/{self._scope.workers}")
        found = registry.workers(cards, instances)
        sources, channels = await self._find(f"{SOURCES}/{self._scope.events}", f"{CHANNELS}/{self._scope.events}")
        for source in list(self._sources.values()):
            worker = self._worker(source, found)
            if worker != source.worker or (worker is not None and source.rank != source.said_rank):
                await self._move(source, worker)
            if worker is None:
                continue
            await self._clear_up(source, worker, sources, channels)
            about = registry.records(self._scope, source.number, worker, source.said_rank, source.endpoint)
            source.announced = tuple(about)
            await self._call(partial(self._put, source), about)

    def _put(self, source: Source, about: Mapping[str, bytes]) -> None:
        if source in self._sources.values():  # the source may have been removed before this thread began
            self._store.put(about)

    async def _move(self, source: Source, worker: int | None) -> None:
        """Assign a stream to another worker of Dynamo, or to no worker. Delete the records of the former worker."""
        if source.announced:
            announced, source.announced = source.announced, ()
            await self._call(self._store.delete, announced)
        source.worker, source.said_rank, source.number = worker, source.rank, source.publisher()
        source.moved(worker, source.number, source.rank)
        fields = {"output": self._output, "worker": source.name}
        if worker is None:
            log.info("output %s: worker %s has no model card in Dynamo", self._output, source.name, extra=fields)
        else:
            text = "output %s: worker %s, rank %d is worker %d in Dynamo"
            log.info(text, self._output, source.name, source.said_rank, worker, extra=fields)

    def _worker(self, source: Source, found: list[Found]) -> int | None:
        """Return the id that the worker of a stream has in Dynamo; None if kvbus cannot find the worker's model card.

        ``found`` has the workers with a model card.
        """
        if source.wanted is not None:
            known = [each.worker for each in found if each.worker == source.wanted]
        elif len(found) == 1:
            known = [found[0].worker]
        else:
            known = [each.worker for each in found if each.host == self._host]
        if len(known) == 1:
            source.trouble = ""
            return known[0]
        if found and source.trouble != "unknown":
            source.trouble = "unknown"
            log.warning(
                "output %s: kvbus cannot find worker %s among Dynamo's workers %s (kvbus is at the host %s); "
                "set the worker's id in `dynamo.workers`",
                self._output,
                source.name,
                [each.worker for each in found],
                self._host,
            )
        return None

    async def _clear_up(
        self, source: Source, worker: int, sources: dict[str, bytes], channels: dict[str, bytes]
    ) -> None:
        """Delete the records that an earlier process of this kvbus has left for the rank of ``source``.

        If another program also has records of a source for this rank, log a warning, because Dynamo's routers then use
        neither that source nor kvbus's.

        Args:
            source: the stream that kvbus announces.
            worker: the worker's id in Dynamo.
            sources: all records of sources, by path.
            channels: all records of channels, by path.
        """
        strangers = []
        for other in registry.others(sources, channels, worker, source.said_rank, source.number):
            if other.endpoint == source.endpoint:
                path = f"{self._scope.events}{other.publisher:x}"
                await self._call(self._store.delete, (f"{CHANNELS}/{path}", f"{SOURCES}/{path}"))
            else:
                strangers.append(other.endpoint or f"publisher {other.publisher:x}")
        if strangers and source.trouble != "ambiguous":
            log.warning(
                "output %s: worker %d, rank %d has another source of events at %s: Dynamo's routers use neither source",
                self._output,
                worker,
                source.said_rank,
                ", ".join(strangers),
            )
            source.trouble = "ambiguous"
        elif not strangers and source.trouble == "ambiguous":
            source.trouble = ""

    async def _find(self, *prefixes: str) -> list[dict[str, bytes]]:
        return [await self._call(self._store.find, prefix) for prefix in prefixes]

    async def _call(self, what: Callable[[Asked], Got], asked: Asked) -> Got:
        def locked() -> Got:
            with self._lock:
                return what(asked)

        return await asyncio.to_thread(locked)
