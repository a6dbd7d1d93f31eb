"""Dynamo's discovery in etcd, over etcd's JSON gateway: the records are keys under a lease of this process."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

LEASE: Final = 10
"""Seconds after which etcd forgets the records of a process that does not speak any more."""

TIMEOUT: Final = 3.0
"""Seconds to wait for an answer."""


class EtcdStore:
    """The records in one etcd.

    Args:
        url: ``http://host:2379``.
        gone: called with the path of each record of ours that somebody else has taken away or replaced.
    """

    def __init__(self, url: str, gone: Callable[[str], None] = lambda _: None) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 2379)
        self._gone = gone
        self._lease: str | None = None
        self._held: dict[str, bytes] = {}
        """What is known to be there under the lease."""
        self._missing: set[str] = set()
        """What was not, when it was looked for: somebody else took it, if the lease still holds."""

    def put(self, records: Mapping[str, bytes]) -> None:
        """Write records, or show that they still hold.

        Raises:
            OSError: etcd does not answer, or refuses.
        """
        if self._lease is not None:
            kept = self._call("lease/keepalive", {"ID": self._lease}).get("result", {})
            if int(kept.get("TTL", 0)) <= 0:
                self._lease = None
        if self._lease is not None:
            for path in self._missing & self._held.keys():
                del self._held[path]
                self._gone(path)
        self._missing.clear()
        if self._lease is None:
            self._held.clear()
            granted = self._call("lease/grant", {"TTL": LEASE})
            if "ID" not in granted:
                raise OSError(f"etcd grants no lease: {granted!r:.200}")
            self._lease = str(granted["ID"])
        for path, body in records.items():
            if self._held.get(path) != body:
                self._call("kv/put", {"key": _coded(path.encode()), "value": _coded(body), "lease": self._lease})
                self._held[path] = body

    def delete(self, paths: Iterable[str]) -> None:
        """Take records away.

        Raises:
            OSError: as for :meth:`put`.
        """
        for path in paths:
            self._held.pop(path, None)
            self._call("kv/deleterange", {"key": _coded(path.encode())})

    def find(self, prefix: str) -> dict[str, bytes]:
        """The records whose path begins like this. One of ours that is not there as we put it, :meth:`put` puts again.

        Raises:
            OSError: as for :meth:`put`.
        """
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        asked = {"key": _coded(prefix.encode()), "range_end": _coded(end.encode())}
        found = self._call("kv/range", asked).get("kvs", [])
        paths = [base64.b64decode(each["key"]).decode() for each in found]
        leases = {path: str(each.get("lease", "0")) for path, each in zip(paths, found, strict=True)}
        records = {path: base64.b64decode(each.get("value", "")) for path, each in zip(paths, found, strict=True)}
        for path, body in self._held.items():
            if path.startswith(prefix):
                there = records.get(path) == body and leases[path] == self._lease
                (self._missing.discard if there else self._missing.add)(path)
        return records

    def close(self) -> None:
        """Let go of the lease."""
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
        except (ValueError, RecursionError):  # a proxy's page, say, or an answer that was cut off
            found = None
        if not isinstance(found, dict):
            raise OSError(f"etcd answers {method} with what is no JSON object: {body[:200]!r}")
        return found


def _coded(text: bytes) -> str:
    return base64.b64encode(text).decode()
