"""Dynamo's discovery in files: a directory for each kind of record, and the name of a file is the record's path.

A file that was not touched for ten seconds is a worker that is gone.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

OLD: Final = 10.0
"""Seconds after which a record that nobody touches counts no more."""


class FileStore:
    """The records below one directory; ``$DYN_FILE_KV`` of the frontend and the workers.

    Args:
        directory: where they are.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, records: Mapping[str, bytes]) -> None:
        """Write records, or show that they still hold."""
        for path, body in records.items():
            file = self._file(path)
            try:
                if file.read_bytes() == body:
                    os.utime(file)
                    continue
            except OSError:
                file.parent.mkdir(parents=True, exist_ok=True)
            # those who watch the directory read any file in it, so a half-written one is written beside it
            half = self._directory / f".{os.getpid()}-{file.name[-64:]}"
            half.write_bytes(body)
            half.replace(file)

    def delete(self, paths: Iterable[str]) -> None:
        """Take records away."""
        for path in paths:
            self._file(path).unlink(missing_ok=True)

    def find(self, prefix: str) -> dict[str, bytes]:
        """The records whose path begins like this, but for old ones."""
        version, bucket, path = prefix.split("/", 2)
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for file in sorted((self._directory / version / bucket).iterdir()):
                if not (name := unquote(file.name)).startswith(path):
                    continue
                with contextlib.suppress(OSError):  # gone meanwhile
                    if time.time() - file.stat().st_mtime < OLD:
                        found[f"{version}/{bucket}/{name}"] = file.read_bytes()
        return found

    def close(self) -> None:
        """Nothing is open."""

    def _file(self, path: str) -> Path:
        version, bucket, name = path.split("/", 2)
        quoted = quote(name, safe="").replace("-", "%2D").replace("_", "%5F").replace(".", "%2E").replace("~", "%7E")
        return self._directory / version / bucket / quoted
