"""Many routers as one process: each reads all workers on one connection to an aggregator.

Says ``ready``, then does what JSON lines on stdin say, to the ``routers`` that they number: ``begin`` one that knows
nothing, ``go`` to another ``endpoint``, ``end``; ``await`` until each holds what ``truth`` says, block by block, which
is answered with a :class:`Exact` for each; ``count`` is answered with a :class:`Heard` for each.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path

import msgspec

from .many_engines import lines, say
from .topic_reader import TopicReader

LOOK: float = 0.02
"""Seconds between two looks at the sockets."""


class Command(msgspec.Struct):
    """What is to be done."""

    do: str
    routers: list[int] = []
    endpoint: str = ""
    truth: str = ""
    topics: list[str] = []
    """Of the engines in `truth`, in its order."""
    patience: float = 0.0


class Heard(msgspec.Struct):
    """What one router has received since it began, and when that was (monotonic)."""

    at: float
    router: int
    messages: int
    size: int
    again: int
    blocks: int
    violations: list[str]


class Exact(msgspec.Struct):
    """When a router held the truth (monotonic), and what it had received by then."""

    router: int
    at: float
    messages: int
    size: int


class Routers:
    """All of them, in one thread."""

    def __init__(self) -> None:
        self.of: dict[int, TopicReader] = {}

    def read(self) -> bool:
        """Take in whatever has arrived; whether that was anything."""
        before = sum(each.messages for each in self.of.values())
        for each in self.of.values():
            each.read()
        return sum(each.messages for each in self.of.values()) > before

    def do(self, command: Command) -> None:
        """One command, but ``await`` and ``count``."""
        for number in command.routers:
            if command.do == "begin":
                self.of[number] = TopicReader(command.endpoint)
            elif command.do == "go":
                self.of[number].go_to(command.endpoint)
            else:
                self.of.pop(number).close()

    def wait(self, command: Command) -> list[Exact]:
        """Read until each router holds the truth.

        Raises:
            TimeoutError: one does not.
        """
        told = msgspec.msgpack.decode(Path(command.truth).read_bytes())
        truth = {topic.encode(): set(blocks) for topic, blocks in zip(command.topics, told, strict=True)}
        left, exact = set(command.routers), list[Exact]()
        seen = dict.fromkeys(left, -1)
        until = time.monotonic() + command.patience
        while left:
            self.read()
            for number in sorted(left):
                router = self.of[number]
                if router.messages != seen[number] and holds(router, truth):
                    exact.append(Exact(number, time.monotonic(), router.messages, router.size))
                    left.discard(number)
                seen[number] = router.messages
            if time.monotonic() > until:
                raise TimeoutError("\n".join(difference(number, self.of[number], truth) for number in sorted(left)))
            time.sleep(LOOK / 4)
        return exact

    def count(self) -> list[Heard]:
        """What each one has received."""
        now = time.monotonic()
        return [
            Heard(
                now, number, each.messages, each.size, each.again, sum(map(len, each.built.values())), each.violations
            )
            for number, each in self.of.items()
        ]


def holds(router: TopicReader, truth: dict[bytes, set[int]]) -> bool:
    """Whether it has every block of every engine, and no other one."""
    sizes = {topic: len(view) for topic, view in router.built.items() if len(view)}
    if sizes != {topic: len(blocks) for topic, blocks in truth.items() if blocks}:
        return False
    return all({block.hash for block in router.built[topic]} == truth[topic] for topic in sizes)


def difference(number: int, router: TopicReader, truth: dict[bytes, set[int]]) -> str:
    """What a router has too many and too few, and what it did not expect."""
    held = {topic: {block.hash for block in view} for topic, view in router.built.items()}
    dead = sum(len(blocks - truth.get(topic, set())) for topic, blocks in held.items())
    missing = sum(len(blocks - held.get(topic, set())) for topic, blocks in truth.items())
    return f"router {number}: {dead} blocks are not there, {missing} are not known; {router.violations[:3]}"


def main() -> None:
    """Serve stdin."""
    gc.disable()  # blocks make no cycles, and a fleet of views is long to walk
    routers = Routers()
    say("ready")
    while (told := lines(0.0 if routers.read() else LOOK)) is not None:
        for line in told:
            command = msgspec.convert(line, Command)
            if command.do == "await":
                say(routers.wait(command))
            elif command.do == "count":
                say(routers.count())
            else:
                routers.do(command)
                say("done")


if __name__ == "__main__":
    main()
