"""Record how a router's program takes scripted conversations: ``python -m tests.interop.conversations NAME [PROGRAM]``.

NAME is go-zeromq or a key of `PROGRAMS`. PROGRAM replaces its command. It must read and print the same lines of JSON. The recordings
are the files of ``tests/doubles/data``, to which ``tests/doubles/test_conversations.py`` holds the doubles.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from tests.doubles.bus import eventually
from tests.doubles.child import Child
from tests.doubles.conversation import DATA, Line, Speaker, hexed, play_to_peer
from tests.ports import free_ports
from tests.transport.bare import listening

from .cache import BLOCK_SIZE, Block, Known, removed, stored
from .go_peers import HOME_ENV, GoSubscriber
from .kinds import KINDS, named_streams
from .routers import Kind, Program, Router, Stream

END: Final = b"\xff" * 8
FIRST: Final = 2**62
"""The hash of block 0. llm-d does not read hashes that msgpack encodes in less than eight bytes."""

BLOCKS: Final[Known] = {
    FIRST + n: Block(
        None if n < 10 else FIRST + n // 10, tuple(range(100_000 + 100 * n, 100_000 + 100 * n + BLOCK_SIZE))
    )
    for n in (*range(1, 10), 11, 12)
}
"""The blocks of the conversations, by hash. Block 11 and block 12 follow block 1."""

Steps = Sequence[tuple[Any, ...]]
Batch = tuple[int, str]
"""The seq of a batch and its events: ``+5`` stores block 5, ``-5`` removes it, and ``clear`` clears all blocks."""


def nothing(_start: int, _count: int) -> list[Batch]:
    """Answer every request with END alone."""
    return []


@dataclass(frozen=True)
class Script:
    """A conversation.

    Attributes:
        name: name of the conversation.
        steps: ("live", seq, events), ("cut",), ("pause", seconds) or ("held",).
        answer: returns the batches for a request, by its start and its number. The last batch may be None in place of
            END: then the answer breaks off.
        quiet: seconds without a request after which the router requests no more.
    """

    name: str
    steps: Steps
    answer: Callable[[int, int], list[Any]] = nothing
    quiet: float = 0.5


def live(*batches: Any) -> Steps:
    return [("live", seq, events) for seq, events in batches]


HELD: Final = [("held",)]
COOLDOWN: Final = [("pause", 31.0)]
HIGH: Final = 5_000_000


def dense(*events: str) -> Callable[[int, int], list[Any]]:
    """Return a function that answers with the batches of a complete stream."""
    return lambda start, _: list(enumerate(events))[start:]


SCRIPTS: Final = (
    Script("begins at a high seq", [*live((HIGH, "clear +1"), (HIGH + 1, "+2")), *HELD]),
    Script("begins at seq 0", [*live((0, "+1"), (1, "+2")), *HELD]),
    Script(
        "duplicates and gaps",
        [*live((3, "+4"), (3, "+9"), (2, "+9")), *HELD],
        dense("+1", "+2", "+3", "+4"),
    ),
    Script(
        "a gap that the replay fills",
        [*live((0, "+1"), (4, "+5"), (5, "+6")), *HELD],
        lambda start, _: [] if start == 0 else [(seq, f"+{seq + 1}") for seq in range(start, 5)],
    ),
    Script(
        "a gap and END alone",
        [*live((0, "+1"), (4, "+5"), (5, "+6")), *HELD, *COOLDOWN, *live((6, "+7"), (7, "clear +8")), *HELD],
    ),
    Script(
        "an answer that begins late",
        [*live((HIGH, "clear +1"), (HIGH + 1, "+2")), *HELD],
        lambda _, count: [] if count == 0 else [(HIGH, "clear +1")],
    ),
    Script(
        "an answer with a hole",
        [*live((4, "+5"), (5, "+6")), *HELD],
        lambda _start, count: [] if count == 0 else [(0, "+1"), (2, "+3"), (4, "+5")],
    ),
    Script(
        "an answer that breaks off",
        [*live((3, "+4"), (4, "+5")), *HELD],
        lambda start, _: (
            [(0, "+1"), (1, "+2"), None] if start == 0 else [(seq, f"+{seq + 1}") for seq in range(start, 4)]
        ),
        quiet=3.0,
    ),
    Script("no answer", [*live((3, "+4"), (4, "+5")), *HELD], lambda *_: [None], quiet=3.0),
    Script("the seq goes back", [*live((100, "clear +1"), (101, "+2"), (7, "+3"), (8, "+4"), (9, "+5")), *HELD]),
    Script("the seq goes back to 0", [*live((100, "clear +1"), (101, "+2"), (0, "+3"), (1, "+4")), *HELD]),
    Script(
        "a lost connection",
        [*live((100, "clear +1"), (101, "+2")), *HELD, ("cut",), *live((102, "+3"), (104, "+5")), *HELD],
        lambda start, _: [] if start == 0 else [(seq, f"+{seq - 99}") for seq in range(start, 105)],
    ),
    Script(
        "stores, removals and clears", [*live((0, "+1 +2 +11"), (1, "-2"), (2, "+12"), (3, "clear"), (4, "+3")), *HELD]
    ),
)


def of(word: str) -> int:
    """Return the hash of the block that a word such as ``+5`` names."""
    return FIRST + int(word[1:])


def _events(text: str) -> list[dict[str, Any]]:
    return [
        {"type": "AllBlocksCleared"}
        if word == "clear"
        else (stored(of(word), BLOCKS[of(word)]) if word[0] == "+" else removed(of(word)))
        for word in text.split()
    ]


def payload_of(text: str, *, arrays: bool) -> bytes:
    events: list[Any] = _events(text)
    return msgspec.msgpack.encode([1.0, [list(each.values()) for each in events] if arrays else events, 0])


class Recording:
    """A conversation with a program, while it is recorded."""

    def __init__(self, script: Script, speaker: Speaker, router: Router, topic: bytes, *, arrays: bool) -> None:
        self.lines: list[Line] = []
        self._script = script
        self._speaker = speaker
        self._router = router
        self._topic = topic
        self._arrays = arrays
        self._requests = 0

    async def run(self) -> None:
        await self._router.start([self._stream()])
        await self._speaker.subscribed()
        await self._listen()
        for what, *more in self._script.steps:
            if what == "live":
                seq, events = more
                frames = [self._topic, seq.to_bytes(8, "big"), payload_of(events, arrays=self._arrays)]
                self._speaker.send(frames)
                self.lines.append({"sent": hexed(frames)})
            elif what == "cut":
                self.lines.append({"cut": True})
                await self._speaker.cut()
            elif what == "pause":
                self.lines.append({"pause": more[0]})
                await asyncio.sleep(more[0])
            await self._listen()
            if what == "held":
                self.lines.append({"held": sorted(await self._router.held(BLOCKS))})

    def _stream(self) -> Stream:
        live, replay = map(urlsplit, (self._speaker.live, self._speaker.replay))
        assert live.hostname
        assert live.port
        assert replay.port
        return Stream(live.hostname, live.port, replay.port)

    async def _listen(self) -> None:
        """Answer the program's requests, until none has come for some time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._script.quiet
        while loop.time() < until:
            while self._speaker.listen():
                self._answer(self._speaker.requests[0][1:])
                until = loop.time() + self._script.quiet
            await asyncio.sleep(0.005)

    def _answer(self, asked: list[bytes]) -> None:
        batches = self._script.answer(int.from_bytes(asked[-1], "big"), self._requests)
        self._requests += 1
        messages = [
            [b"", self._topic, seq.to_bytes(8, "big"), payload_of(events, arrays=self._arrays)]
            for seq, events in filter(None, batches)
        ]
        if None not in batches:
            messages.append([b"", b"", END, b""])
        self.lines.append({"asked": hexed(asked), "answer": [hexed(each) for each in messages]})
        self._speaker.answer(messages)


def _llmd_main(streams: Sequence[Stream]) -> dict[str, Any]:
    """Return the first line of the input of a program that is built with llm-d-router's subscriber."""
    first = named_streams(streams)
    for number, stream in enumerate(first["streams"]):
        stream["source"] = f"10.0.0.{number}:8000"
    return first


def _kind(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


def _built(command: str, directory: Path, name: str) -> Router:
    return Program([command], directory, name, _llmd_main)


PROGRAMS: Final = {
    "llm-d-router": replace(
        _kind("llm-d with replay (double)"), name="llm-d-router ebab687 (August 2026), built from its source"
    ),
    "llm-d-kv-cache": _kind("llm-d-kv-cache 0.9.0"),
    "aibrix": _kind("AIBrix 0.7.0"),
    "dynamo": _kind("Dynamo 1.6.1, indexer"),
    "smg": _kind("SMG relay 0.14.1"),
    "vllm-router": _kind("vLLM router 0.1.17"),
}
"""The programs that can be recorded, by the names of their files. The first one needs a command."""


async def record(name: str, command: str = "") -> None:
    kind = PROGRAMS[name]
    make = partial(_built, command) if command else kind.make
    lines: list[Line] = []
    for number, script in enumerate(SCRIPTS):
        with tempfile.TemporaryDirectory() as directory, Speaker(*kind.listens()) as speaker:
            router = make(Path(directory), f"router{number}")
            recording = Recording(script, speaker, router, kind.topic.encode(), arrays=kind.by_position)
            try:
                await recording.run()
            finally:
                await router.stop()
        held = [line["held"] for line in recording.lines if "held" in line]
        asked = [int(line["asked"][-1], 16) for line in recording.lines if "asked" in line]
        text = f"{script.name}: requests {asked}, blocks {[[block - FIRST for block in each] for each in held]}"
        print(text, flush=True)  # noqa: T201 - a command
        lines += [{"conversation": script.name, "program": kind.name}, *recording.lines]
    DATA.joinpath(f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


async def record_pings() -> None:
    """Record how a subscriber on go-zeromq takes a PING between two batches."""
    port, replay = free_ports(2)
    sent = [[b"", seq.to_bytes(8, "big"), payload_of(f"+{seq + 1}", arrays=False)] for seq in range(2)]
    lines: list[Line] = [{"sent": hexed(sent[0])}, {"ping": True}, {"sent": hexed(sent[1])}]
    with tempfile.TemporaryDirectory() as directory:
        async with listening(port, b"PUB") as peers:
            command = [
                str(Path(os.environ[HOME_ENV]) / "subscriber"),
                *(f"tcp://127.0.0.1:{at}" for at in (port, replay)),
            ]
            child = Child("subscriber", command, Path(directory), piped=True)
            await child.start()
            program = GoSubscriber(child)
            await eventually(lambda: peers and peers[0].messages, "a subscription")
            play_to_peer(lines, peers[0])
            await asyncio.sleep(1)
            blocks = sorted(block for *_, block in program.live.blocks if isinstance(block, int))
            commands = [name.decode() for name in peers[0].commands]
            lines.append({"held": blocks, "odd": len(program.odd), "commands": commands})
            await program.close()
            await child.close()
    lines.insert(0, {"conversation": "a PING between two batches", "program": "go-zeromq 0.17.0"})
    DATA.joinpath("go-zeromq.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


if __name__ == "__main__":
    asyncio.run(record_pings() if sys.argv[1] == "go-zeromq" else record(*sys.argv[1:]))
