"""Clients of kvbus's HTTP port, as a process: a probe now and then, questions at a rate, or a crowd that never waits.

Started with a JSON :class:`Spec`; says ``ready``, begins when it is told ``run``, ends at ``stop``, and says what it got.
"""

from __future__ import annotations

import asyncio
import gc
import http.client
import itertools
import os
import sys
import threading
from array import array
from collections import Counter
from typing import Any, Final, Literal

import aiohttp
import msgspec

from tests.doubles.router import events_of

from .loads import load_named, monotonic

PROBES: Final = ("/livez", "/metrics")
CROWD: Final = ("/query", "/metrics", "/sources", "/livez", "/readyz")
PROBE_EVERY: Final = 0.25
SCRAPE_EVERY: Final = 60
"""Probes, of which one is a scrape: every 15 seconds, as the chart has it. Of a hundred sources it is 0.7 MB."""
BLOCKS: Final = 2048
"""Of the prompt, which a source of the bus holds."""


Kind = Literal["probe", "questions", "crowd"]
Form = Literal["json", "packed", "hashes", "integers", "unknown"]
"""Token ids as a list in JSON, as bytes in msgpack, the hashes of their blocks as texts in JSON, as integers in msgpack.

Or the hash of a block that nobody holds, which shows what of the time has to do with no look-up.
"""
_MSGPACK: Final = {"Content-Type": "application/msgpack"}


class Spec(msgspec.Struct):
    """Whom to ask, and how: ``rate`` is questions a second, ``clients`` how many make up the crowd."""

    http: str
    kind: Kind
    load: str
    rate: float = 50.0
    clients: int = 100
    nice: int = 0
    form: Form = "json"


class Asked(msgspec.Struct):
    """Answers by status (0: the connection broke), and the seconds that those of a path took which were answered."""

    statuses: dict[int, int]
    times: dict[str, list[float]]


def prompt(load: str, field: str) -> list[int]:
    """The longest prompt that a load stores: ``token_ids`` or ``block_hashes``."""
    chains: dict[Any, list[int]] = {}
    for event in itertools.chain.from_iterable(map(events_of, load_named(load).take(64))):
        chains[event["block_hashes"][-1]] = chains.pop(event["parent_block_hash"], []) + event[field]
    return max(chains.values(), key=len)


def question(load: str, form: Form) -> tuple[bytes, dict[str, str]]:
    """The body that asks for it, and what its headers say of that."""
    if form == "unknown":
        return b'{"hashes":["1"]}', {}
    if form in {"hashes", "integers"}:
        hashes = prompt(load, "block_hashes")
        if form == "integers":
            return msgspec.msgpack.encode({"hashes": hashes}), _MSGPACK
        return msgspec.json.encode({"hashes": list(map(str, hashes))}), {}
    tokens = prompt(load, "token_ids")
    if form == "packed":
        return msgspec.msgpack.encode({"tokens": array("I", tokens).tobytes()}), _MSGPACK
    return msgspec.json.encode({"tokens": tokens}), {}


class Asker:
    """Asks until it is cancelled."""

    def __init__(self, spec: Spec, session: aiohttp.ClientSession) -> None:
        self.spec = spec
        self.asked = Asked(Counter(), {})
        self._session = session
        self._body, self._headers = question(spec.load, spec.form)

    async def ask(self, path: str) -> bytes:
        """One request, waited for; what comes back, nothing if the connection broke."""
        began = monotonic()
        try:
            url = f"http://{self.spec.http}{path}"
            if path == "/query":
                asking = self._session.post(url, data=self._body, headers=self._headers)
            else:
                asking = self._session.get(url)
            async with asking as answer:
                body = await answer.read()
        except (aiohttp.ClientError, OSError):
            self.asked.statuses[0] += 1
            await asyncio.sleep(0.01)
            return b""
        self._count(path, answer.status, began)
        return body

    def _count(self, path: str, status: int, began: float) -> None:
        self.asked.statuses[status] += 1
        if status == 200:
            self.asked.times.setdefault(path, []).append(monotonic() - began)

    async def run(self) -> None:
        """Ask as it was said to."""
        if self.spec.kind == "questions":
            ended = threading.Event()
            asking = asyncio.create_task(asyncio.to_thread(self._ask_at_rate, ended))
            try:
                await asyncio.shield(asking)
            finally:
                ended.set()
                await asking
            return
        async with asyncio.TaskGroup() as group:
            if self.spec.kind == "crowd":
                for first in range(self.spec.clients):
                    group.create_task(self._one_of_many(first))
                return
            due = monotonic()
            for path in itertools.cycle([PROBES[at == 0] for at in range(SCRAPE_EVERY)]):
                group.create_task(self.ask(path))
                due += PROBE_EVERY
                await asyncio.sleep(max(0.0, due - monotonic()))

    def _ask_at_rate(self, ended: threading.Event) -> None:
        """On a connection that blocks, as a router in another language asks: aiohttp's client takes 0.4 ms itself."""
        connection = http.client.HTTPConnection(self.spec.http, timeout=30)
        due = monotonic()
        while not ended.wait(max(0.0, early := due - monotonic())):
            began = monotonic() if early > 0 else due  # behind the last one: that wait counts
            try:
                connection.request("POST", "/query", self._body, self._headers)
                answer = connection.getresponse()
                answer.read()
            except (http.client.HTTPException, OSError):
                self.asked.statuses[0] += 1
                connection.close()
            else:
                self._count("/query", answer.status, began)
            due += 1 / self.spec.rate
        connection.close()

    async def _one_of_many(self, first: int) -> None:
        for at in itertools.count(first):
            await self.ask(CROWD[at % len(CROWD)])


async def main(spec: Spec) -> None:
    """Do as is said on stdin."""
    loop = asyncio.get_running_loop()
    # a kubelet and a Prometheus that has been away come with a new connection, and from addresses of their own
    probe = spec.kind == "probe"
    connector = aiohttp.TCPConnector(limit=0, force_close=probe, local_addr=("127.0.0.2", 0) if probe else None)
    async with aiohttp.ClientSession(connector=connector) as session:
        asker = Asker(spec, session)
        if spec.kind != "probe":
            while 200 not in asker.asked.statuses:  # the first one has the tree built
                answer = await asker.ask("/query")
            matches = msgspec.json.decode(answer)["results"][0]["matches"]
            longest = max((match["blocks"] for match in matches), default=0)
            if longest != (0 if spec.form == "unknown" else BLOCKS):
                raise RuntimeError(f"{longest} blocks of the prompt are held")
            asker.asked = Asked(Counter(), {})
        gc.collect()
        gc.freeze()
        gc.disable()  # a pass of some milliseconds would count as time of an answer
        _say("ready")
        while (command := (await loop.run_in_executor(None, sys.stdin.readline)).strip()) == "run":
            asking = asyncio.create_task(asker.run())
            await loop.run_in_executor(None, sys.stdin.readline)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            _say(msgspec.to_builtins(asker.asked, str_keys=True))
            asker.asked = Asked(Counter(), {})
        if command:
            raise RuntimeError(f"told {command!r}")


def _say(what: Any) -> None:
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    told = msgspec.json.decode(sys.argv[1], type=Spec)
    os.nice(told.nice)
    asyncio.run(main(told))
