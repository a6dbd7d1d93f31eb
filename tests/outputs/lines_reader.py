"""Readers for tests of the example output. Each reader opens the file that the output writes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvbus.config import OutputConfig
from kvbus.core.stats import OutputStats


class LinesReader:
    def __init__(self, path: str) -> None:
        self._file = Path(path).open("rb")  # noqa: SIM115 - `close` closes the file

    def take(self) -> list[tuple[bytes, int, bytes]]:
        batches = [json.loads(line) for line in self._file]
        return [(batch["topic"].encode(), batch["seq"], bytes.fromhex(batch["payload"])) for batch in batches]

    def ask(self, start: int) -> None:
        raise NotImplementedError

    def answers(self) -> list[Any]:
        raise NotImplementedError

    def close(self) -> None:
        self._file.close()


class LinesKind:
    asks = False
    loses = False
    seen = False
    sends_state = False

    def settings(self, directory: Path) -> dict[str, Any]:
        return {"endpoint": f"ipc://{directory}/blocks.jsonl"}

    def connect(self, config: OutputConfig, stream: int, *, slow: bool) -> LinesReader:
        return LinesReader(self.places(config, stream)[0])

    def joined(self, stats: OutputStats, readers: list[LinesReader]) -> bool:
        return True

    def payload(self, number: int, size: int) -> bytes:
        return (b"%d" % number).ljust(size, b"\0")

    def places(self, config: OutputConfig, stream: int) -> list[str]:
        return [config.stream_endpoints(stream).endpoint.removeprefix("ipc://")]

    @contextlib.contextmanager
    def occupied(self, place: str) -> Iterator[None]:
        Path(place).mkdir()
        yield
        Path(place).rmdir()
