"""Run Dynamo's real standalone KV indexer as a subprocess, and return the blocks of its index as sets.

The tests import nothing of Dynamo. The indexer has its own virtual environment, which ``TEST_DYNAMO_PYTHON`` names, and
the tests use only its HTTP interface.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from tests.doubles.bus import wait_for
from tests.ports import free_port

from .support import stop_process

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

PYTHON_ENV: Final = "TEST_DYNAMO_PYTHON"
MASK: Final = 2**64 - 1
"""Mask that makes a hash an unsigned 64-bit number. Dynamo stores every hash unsigned; SGLang sends hashes signed."""


class Held(NamedTuple):
    """One block of the indexer's index. The fields have the names in its answer to ``GET /dump``."""

    tier: str
    hash: int
    parent: int | None
    tokens_hash: int
    rank: int


class DynamoIndexer:
    """The process ``python -m dynamo.indexer`` at a free loopback port. It ends when the ``with`` block ends.

    The number of threads is the indexer's default (4), so that the tests measure what a user gets.
    """

    def __init__(self, log: Path) -> None:
        self._log_path = log
        self._port = free_port()
        self._workers: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._log = self._log_path.open("ab")
        self._process = subprocess.Popen(
            [os.environ[PYTHON_ENV], "-m", "dynamo.indexer", "--port", str(self._port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        try:
            wait_for(self._answers, f"the Dynamo indexer answers (log: {self._log_path})")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop_process(self._process)
        self._log.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def metrics(self) -> str:
        """Return the indexer's counters in Prometheus's text format."""
        return self._call("GET", "/metrics")[1]

    def register(self, model: str, endpoint: str, replay_endpoint: str | None, block_size: int, rank: int = 0) -> None:
        """Let the indexer read one stream for `model`. The stream is one rank of a worker of this model."""
        body: dict[str, Any] = {
            "instance_id": self._workers.setdefault(model, len(self._workers) + 1),
            "endpoint": endpoint,
            "model_name": model,
            "block_size": block_size,
            "dp_rank": rank,
        }
        if replay_endpoint is not None:
            body["replay_endpoint"] = replay_endpoint
        status, answer = self._call("POST", "/register", body)
        assert status == 201, answer

    def blocks(self, model: str) -> frozenset[Held]:
        """Return every block in the index of `model`, from the edges of its radix tree."""
        status, answer = self._call("GET", "/dump")
        assert status == 200, answer
        held = []
        for entry in json.loads(answer).get(f"{model}:default", {}).get("events", []):
            stored = entry["event"]["data"]["stored"]
            parent = stored["parent_hash"]
            for block in stored["blocks"]:
                held.append(
                    Held(
                        entry["storage_tier"],
                        block["block_hash"],
                        parent,
                        block["tokens_hash"],
                        entry["event"]["dp_rank"],
                    )
                )
                parent = block["block_hash"]
        return frozenset(held)

    def matched(self, model: str, tokens: list[int]) -> int:
        """Return the number of leading tokens of a prompt that the index of `model` has, in any tier."""
        status, answer = self._call("POST", "/query", {"model_name": model, "token_ids": tokens})
        assert status == 200, answer
        return json.loads(answer)["scores"].get(str(self._workers[model]), {}).get("0", 0)

    def wait_until_finds(self, model: str, tokens: list[int], timeout: float = 60) -> None:
        """Wait until the index of `model` has all these tokens, and so has applied all batches before them."""
        wait_for(
            lambda: self.matched(model, tokens) == len(tokens),
            f"index {model!r} finds {tokens[:1]}… (log: {self._log_path})",
            timeout,
        )

    def _answers(self) -> bool:
        assert self._process.poll() is None, f"the Dynamo indexer ended at start, see {self._log_path}"
        try:
            return self._call("GET", "/health")[0] == 200
        except OSError:
            return False

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()
