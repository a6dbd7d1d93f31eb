"""The records of Dynamo's discovery, and two stores that can hold them: a directory and etcd."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote, urlsplit

import msgspec

SOURCES: Final = "v1/event_sources"
CHANNELS: Final = "v1/event_channels"
CARDS: Final = "v1/mdc"
INSTANCES: Final = "v1/instances"

TOPIC: Final = "kv-events"


class Scope(NamedTuple):
    """Dynamo's name for the endpoint that workers serve. It consists of a namespace, a component and an endpoint name.

    Dynamo groups the workers' model cards and events by this name.
    """

    namespace: str
    component: str
    endpoint: str

    @property
    def workers(self) -> str:
        """The path of the model cards and instances of this endpoint's workers in Dynamo's discovery store.

        The complete path of a record begins with :data:`CARDS` or :data:`INSTANCES`, and this path follows.
        """
        return f"{self.namespace}/{self.component}/{self.endpoint}/"

    @property
    def events(self) -> str:
        """The path in Dynamo's discovery store of the records of all event publishers of this endpoint's workers."""
        return f"namespace/{self.namespace}/component/{self.component}/endpoint/{self.endpoint}/topic/{TOPIC}/"


class Found(NamedTuple):
    """A worker that has a model card in Dynamo's discovery, and the host at which it serves requests."""

    worker: int
    host: str


class Other(NamedTuple):
    """A publisher other than this kvbus. A discovery record names it as the source of a rank's events."""

    publisher: int
    endpoint: str


def records(scope: Scope, publisher: int, worker: int, rank: int, endpoint: str) -> dict[str, bytes]:
    """Return the two records of one stream in Dynamo's discovery, by path.

    The first record (``EventSource``) names the worker and the rank. The second one (``EventChannel``) has the stream's
    endpoint. They are written in this order, because a router that finds the channel has to know the source already.

    Args:
        scope: the Dynamo endpoint that the worker serves.
        publisher: the publisher id of the stream.
        worker: the worker's id in Dynamo.
        rank: the data-parallel rank.
        endpoint: the ZeroMQ endpoint at which routers get the stream.
    """
    path = f"{scope.events}{publisher:x}"
    about_endpoint = {"namespace": scope.namespace, "component": scope.component, "name": scope.endpoint}
    about = {"scope": {"kind": "endpoint", "endpoint": about_endpoint}, "topic": TOPIC}
    source = {
        "type": "EventSource",
        **about,
        "publisher_id": publisher,
        "metadata": {
            "kv_state_endpoint": about_endpoint,
            "worker": {"worker_id": worker, "dp_rank": rank},
            "publisher_id": publisher,
        },
    }
    channel = {
        "type": "EventChannel",
        **about,
        "instance_id": publisher,
        "transport": {"kind": "Zmq", "config": {"endpoint": endpoint}},
    }
    encode = msgspec.json.encode
    return {f"{SOURCES}/{path}": encode(source), f"{CHANNELS}/{path}": encode(channel)}


def workers(cards: dict[str, bytes], instances: dict[str, bytes]) -> list[Found]:
    """Return the workers that have a model card, in ascending order of their ids.

    Args:
        cards: the records of model cards, by path.
        instances: the records of instances, by path. They have the workers' hosts.
    """
    hosts = {_number(each, "instance_id"): _host(each) for each in map(_decoded, instances.values())}
    known = {_number(each, "instance_id") for each in map(_decoded, cards.values())} - {0}
    return [Found(worker, hosts.get(worker, "")) for worker in sorted(known)]


def others(
    sources: dict[str, bytes], channels: dict[str, bytes], worker: int, rank: int, publisher: int
) -> list[Other]:
    """Return the sources of a rank that have another publisher id than ``publisher``, which is kvbus's own.

    If a rank has two sources, Dynamo's routers use neither of them.
    """
    found = []
    for path, body in sources.items():
        about = _part(_decoded(body), "metadata")
        number = _number(about, "publisher_id")
        if _part(about, "worker") == {"worker_id": worker, "dp_rank": rank} and number != publisher:
            channel = _decoded(channels.get(path.replace(SOURCES, CHANNELS, 1), b""))
            found.append(Other(number, str(_part(channel, "transport", "config", "endpoint") or "")))
    return found


def _host(instance: dict[str, Any]) -> str:
    return str(_part(instance, "transport", "tcp")).partition("/")[0].rpartition(":")[0]


def _part(record: Any, *names: str) -> Any:
    """Return the value under nested keys of a record; None if a key is missing.

    Any key may be missing, because another program may have written the record.
    """
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record


def _number(record: Any, name: str) -> int:
    """Return an integer from a record; 0 if the record does not have it."""
    found = _part(record, name)
    return found if isinstance(found, int) else 0


def _decoded(body: bytes) -> dict[str, Any]:
    """Decode the JSON of a record.

    Return an empty dict if the record is not valid, for example because another process is just writing it.
    """
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


OLD: Final = 10.0
"""Age in seconds from which on a record in a file is ignored, because its process does not refresh it any more."""


class FileStore:
    """A store that keeps the records of Dynamo's discovery as files.

    Args:
        directory: the directory of the files. Dynamo's frontend and workers have it in ``$DYN_FILE_KV``.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, records: Mapping[str, bytes]) -> None:
        """Write records as files. ``records`` has each record by its path.

        If a file already has the record, only refresh its modification time.
        """
        for path, body in records.items():
            file = self._file(path)
            try:
                if file.read_bytes() == body:
                    os.utime(file)
                    continue
            except OSError:
                file.parent.mkdir(parents=True, exist_ok=True)
            # Write the file in the parent directory first, and then move it. Watchers read every file in the bucket's
            # directory, and must not find a file that is only half written.
            half = self._directory / f".{os.getpid()}-{file.name[-64:]}"
            half.write_bytes(body)
            half.replace(file)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete the records at these paths."""
        for path in paths:
            self._file(path).unlink(missing_ok=True)

    def find(self, prefix: str) -> dict[str, bytes]:
        """Return the records whose path begins with ``prefix``. Expired records are left out."""
        version, bucket, path = prefix.split("/", 2)
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for file in sorted((self._directory / version / bucket).iterdir()):
                if not (name := unquote(file.name)).startswith(path):
                    continue
                with contextlib.suppress(OSError):  # another process may just have deleted the file
                    if time.time() - file.stat().st_mtime < OLD:
                        found[f"{version}/{bucket}/{name}"] = file.read_bytes()
        return found

    def close(self) -> None:
        """Do nothing, because no file stays open."""

    def _file(self, path: str) -> Path:
        version, bucket, name = path.split("/", 2)
        quoted = quote(name, safe="").replace("-", "%2D").replace("_", "%5F").replace(".", "%2E").replace("~", "%7E")
        return self._directory / version / bucket / quoted


LEASE: Final = 10
"""Time in seconds without a renewal of its lease after which etcd deletes the records of a process."""

TIMEOUT: Final = 3.0
"""Timeout of a request to etcd, in seconds."""


class EtcdStore:
    """A store that keeps the records of Dynamo's discovery in etcd.

    Args:
        url: the address of etcd, such as ``http://host:2379``.
        gone: function that is called with the path of each record of this process that another process has deleted or
            replaced.
    """

    def __init__(self, url: str, gone: Callable[[str], None] = lambda _: None) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 2379)
        self._gone = gone
        self._lease: str | None = None
        self._written: dict[str, bytes] = {}
        """Records of this process that were written to etcd under the present lease, by path."""
        self._missing: set[str] = set()
        """Paths of records that this process has written, and that were missing or changed at the last :meth:`find`.

        If the lease is valid, another process has deleted or replaced these records.
        """

    def put(self, records: Mapping[str, bytes]) -> None:
        """Write records to etcd. ``records`` has each record by its path.

        Also renew the lease, so that etcd keeps the records that are already there.

        Raises:
            OSError: etcd does not answer, or refuses the request.
        """
        if self._lease is not None:
            kept = self._call("lease/keepalive", {"ID": self._lease}).get("result", {})
            if int(kept.get("TTL", 0)) <= 0:
                self._lease = None
        if self._lease is not None:
            for path in self._missing & self._written.keys():
                del self._written[path]
                self._gone(path)
        self._missing.clear()
        if self._lease is None:
            self._written.clear()
            granted = self._call("lease/grant", {"TTL": LEASE})
            if "ID" not in granted:
                raise OSError(f"etcd grants no lease: {granted!r:.200}")
            self._lease = str(granted["ID"])
        for path, body in records.items():
            if self._written.get(path) != body:
                self._call("kv/put", {"key": _coded(path.encode()), "value": _coded(body), "lease": self._lease})
                self._written[path] = body

    def delete(self, paths: Iterable[str]) -> None:
        """Delete the records at these paths.

        Raises:
            OSError: etcd does not answer, or refuses the request.
        """
        for path in paths:
            self._written.pop(path, None)
            self._call("kv/deleterange", {"key": _coded(path.encode())})

    def find(self, prefix: str) -> dict[str, bytes]:
        """Return the records whose path begins with ``prefix``.

        If a record that this process has written is missing or changed, the next :meth:`put` writes it again.

        Raises:
            OSError: etcd does not answer, or refuses the request.
        """
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        asked = {"key": _coded(prefix.encode()), "range_end": _coded(end.encode())}
        found = self._call("kv/range", asked).get("kvs", [])
        paths = [base64.b64decode(each["key"]).decode() for each in found]
        leases = {path: str(each.get("lease", "0")) for path, each in zip(paths, found, strict=True)}
        records = {path: base64.b64decode(each.get("value", "")) for path, each in zip(paths, found, strict=True)}
        for path, body in self._written.items():
            if path.startswith(prefix):
                exists = records.get(path) == body and leases[path] == self._lease
                (self._missing.discard if exists else self._missing.add)(path)
        return records

    def close(self) -> None:
        """End the lease, so that etcd deletes the records."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._call("lease/revoke", {"ID": lease})

    def _call(self, method: str, asked: dict[str, Any]) -> dict[str, Any]:
        connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT)
        try:
            connection.request("POST", f"/v3/{method}", json.dumps(asked))
            answer = connection.getresponse()
            body = answer.read()
        except http.client.HTTPException as error:
            raise OSError(f"etcd does not speak HTTP: {error!r}") from error
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise OSError(f"etcd answers {answer.status} to {method}: {body[:200]!r}")
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):  # for example a proxy's error page, or a truncated answer
            found = None
        if not isinstance(found, dict):
            raise OSError(f"etcd's answer to {method} is not a JSON object: {body[:200]!r}")
        return found


def _coded(text: bytes) -> str:
    return base64.b64encode(text).decode()
