"""Processes for tests of `kvbus index` on free ports of loopback: an engine (`kvbus sim`), a bus and an index."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.doubles.kvbus_process import Program
from tests.ports import free_port, ports_in_a_row

PATIENCE = 100.0
"""Seconds after which a test fails if a condition does not become true."""


@contextlib.contextmanager
def running(*programs: Program) -> Iterator[None]:
    """Start programs, and end those that still run at the end of the block."""
    with contextlib.ExitStack() as stack:
        for program in programs:
            stack.enter_context(program)
        yield


def http(url: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """Send an HTTP request and return the status and the body. The status is 0 while no server listens."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    request = urllib.request.Request(url, body, named)  # noqa: S310 - http alone
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except (urllib.error.URLError, ConnectionError):
        return 0, b""


class Engine(Program):
    """A simulated engine (`kvbus sim`) whose workload ends, and the true set of its blocks."""

    def __init__(self, directory: Path, name: str, *more: str, seed: int = 0, ranks: int = 1) -> None:
        self.ranks = ranks
        self.endpoint, self.replay = (f"tcp://127.0.0.1:{ports_in_a_row(ranks)}" for _ in range(2))
        load = ["--seed", str(seed), "--ranks", str(ranks), "--requests", "40", "--rate", "500", "--blocks", "600"]
        self._load = [*load, "--tier", "CPU=500"]
        where = ["--endpoint", self.endpoint, "--replay-endpoint", self.replay, "--bind"]
        super().__init__(directory, "sim", *where, *self._load, *more, name=name)
        self._truth = directory / f"{name}.truth"

    def truth(self) -> Truth:
        """Run the same workload again without a subscriber, and return the live blocks at its end."""
        args = ["--endpoint", f"tcp://127.0.0.1:{ports_in_a_row(self.ranks)}", "--bind", *self._load]
        args += ["--exit-after", "0", "--truth-file", str(self._truth)]
        subprocess.run([sys.executable, "-m", "kvbus", "sim", *args], check=True, capture_output=True, timeout=PATIENCE)
        return Truth(json.loads(self._truth.read_text())["blocks"])


class Truth:
    """The live blocks of an engine, as its simulator reports them."""

    def __init__(self, blocks: list[dict[str, Any]]) -> None:
        self.blocks = blocks
        self._by_hash: dict[tuple[int, Any], dict[str, Any]] = {}
        self._media: dict[tuple[int, Any], set[str]] = defaultdict(set)
        for block in blocks:
            self._by_hash[block["rank"], block["hash"]] = block
            self._media[block["rank"], block["hash"]].add((block["medium"] or "GPU").upper())

    def chains(self) -> list[list[dict[str, Any]]]:
        """Return the engine's chains of blocks from a prompt's beginning.

        A chain that is the beginning of a longer one is left out.
        """
        parents = {(block["rank"], block["parent"]) for block in self.blocks}
        found = []
        for (rank, name), block in self._by_hash.items():
            if (rank, name) in parents:
                continue
            chain = [block]
            while chain[-1]["parent"] is not None and (rank, chain[-1]["parent"]) in self._by_hash:
                chain.append(self._by_hash[rank, chain[-1]["parent"]])
            if chain[-1]["parent"] is None:
                found.append(chain[::-1])
        return found

    def expected(self, chain: list[dict[str, Any]]) -> dict[int, tuple[int, dict[str, int]]]:
        """Return for each rank how many blocks of a chain it holds, in total and on each medium."""
        found = {}
        prefixes = [block["prefix"] for block in chain]
        for rank in {block["rank"] for block in self.blocks}:
            media_of: dict[str, set[str]] = defaultdict(set)
            for block in self.blocks:
                if block["rank"] == rank:
                    media_of[block["prefix"]] |= self._media[rank, block["hash"]]
            count, tiers = 0, dict[str, int]()
            for prefix in prefixes:
                if prefix not in media_of:
                    break
                count += 1
                for medium in media_of[prefix]:
                    tiers[medium] = tiers.get(medium, 0) + 1
            if count:
                found[rank] = count, tiers
        return found


def tokens_of(chain: list[dict[str, Any]]) -> list[int]:
    return [token for block in chain for token in block["tokens"]]


class Bus(Program):
    """A bus (`kvbus run`) that reads the engines of a test."""

    def __init__(self, directory: Path, name: str, *engines: Engine, output: str = "", more: str = "") -> None:
        self.out, self.out_replay = (f"tcp://127.0.0.1:{ports_in_a_row(4)}" for _ in range(2))
        self.http = f"http://127.0.0.1:{free_port()}"
        config = directory / f"{name}.yaml"
        sources = "".join(
            f"  - {{name: {each.log.stem}, endpoint: '{each.endpoint}', replay_endpoint: '{each.replay}',"
            f" data_parallel_size: {each.ranks}}}\n"
            for each in engines
        )
        replay = "" if "per_topic" in output else f", replay_endpoint: '{self.out_replay}'"
        config.write_text(
            f"worker: {name}\nmodel: m\nsources:\n{sources}"
            f"outputs: [{{name: out, endpoint: '{self.out}'{replay}{output}}}]\n"
            f"http: {self.http.removeprefix('http://')}\nstate_dir: {directory / name}\nprobe_interval: 0.2\n{more}"
        )
        super().__init__(directory, "run", "-c", str(config), name=name)

    def sources(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(http(f"{self.http}/sources")[1] or b"[]")
        return found

    def has(self, *truths: Truth) -> bool:
        """Return whether the bus knows every block of these engines."""
        known = sum(sum(each["blocks"].values()) for each in self.sources())
        return known == sum(len({(b["rank"], b["hash"], b["medium"]) for b in truth.blocks}) for truth in truths)


class Index(Program):
    """A process of `kvbus index`, which a test starts and queries over HTTP."""

    def __init__(self, directory: Path, *args: str, name: str = "index", host: str = "127.0.0.1") -> None:
        port = free_port()
        self.http = f"http://127.0.0.1:{port}"
        super().__init__(directory, "index", "--listen", f"{host}:{port}", *args, name=name)

    def ready(self) -> bool:
        return http(f"{self.http}/readyz")[0] == 200

    def complete(self, *names: str) -> bool:
        """Return whether the index follows these sources and has all of their blocks."""
        if not self.ready() or self.ask(tokens=[1])["incomplete"]:
            return False
        text = http(f"{self.http}/metrics")[1].decode()
        return all(f'kvbus_index_live{{rank="0",source="{name}"' in text for name in names)

    def post(self, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
        status, answer = http(f"{self.http}/query", body, **headers)
        return status, json.loads(answer)

    def ask(self, **question: Any) -> dict[str, Any]:
        status, answer = self.post(json.dumps(question).encode())
        assert status == 200, answer
        return answer

    def matches(self, **question: Any) -> list[dict[str, Any]]:
        """Send one query to the index, and return how many blocks of the prompt each source holds."""
        found: list[dict[str, Any]] = self.ask(**question)["results"][0]["matches"]
        return found
