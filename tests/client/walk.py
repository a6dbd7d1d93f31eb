"""Random worlds for tests of the client library: whatever the network does, its blocks must equal the publisher's.

``python -m tests.client.walk --steps 1000000`` runs them for a long time. Each world has its own seed. The program
prints the seeds of the worlds that fail, and then exits with code 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterable
from math import inf
from typing import Any

import msgspec

from kvbus.client.sequence import BufferLimits, Replace, Sequence, Timing
from kvbus.client.updates import Lost, Restarted, Snapshot, Synced
from kvbus.client.view import BlockView
from kvbus.core.sequencing.actions import Ask, AskSnapshot, Deliver, Stop
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.encoding import encode_batch
from kvbus.core.wire.frames import END_SEQ
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved, BlockStored
from tests.typed import well_formed

END = [b"", END_SEQ, b""]
TOKENS = msgspec.Raw(msgspec.msgpack.encode([1, 2]))


def stored(*hashes: int) -> BlockStored:
    return BlockStored(tuple(hashes), None, TOKENS, 2)


class Subscription:
    """A publisher that keeps its complete history, a bad network, and the client's sequencing state machine.

    The network cannot do what TCP cannot do: frames of a restarted publisher arrive only after the old connection broke
    and a new one is open. The client repeats its requests without a limit, so it must never report a loss.
    """

    def begin(self, mode: str, compacting: bool, ids: bool, held: int, journal: int, before: int) -> None:
        self.mode = mode
        self.compacting = compacting  # a replay from before the journal gets the state instead of the history
        self.journal = journal
        self.ids = ids or mode != "replay"
        self.life = 0
        self.log: list[bytes | None] = []  # None stands for a seq without a batch
        self.truth: set[int] = set()
        self.states: list[frozenset[int]] = []
        self.flying: list[tuple[int, bytes]] = []
        self.up = False
        self.asked: int | AskSnapshot | None = None
        self.answer: list[Any] = []
        self.now = 0.0
        self.view = BlockView()
        self.synced = False
        self.sequence = Sequence(
            replay=mode != "snapshot",
            snapshot=mode != "replay",
            timing=Timing(attempts=2, snapshot_s=1e9) if mode == "fresh" else Timing(attempts=10**9),
            limits=BufferLimits(held_batches=held, held_bytes=400),
        )
        self.follow(self.sequence.open(self.now))
        for seq in range(before):
            self.publish(("store" if seq % 7 < 5 else "remove", seq % 10), lost=True)

    # -- the publisher

    def publish(self, change: tuple[str, int], lost: bool) -> None:
        kind, block = change
        changes: dict[str, list[AnyEvent]] = {
            "store": [stored(block)],
            "remove": [BlockRemoved((block,))],
            "clear": [AllBlocksCleared()],
            "nothing": [],
        }
        events = changes[kind]
        if kind == "store":
            self.truth.add(block)
        elif kind == "remove":
            self.truth.discard(block)
        elif kind == "clear":
            self.truth.clear()
        payload = encode_batch(events, self.life * 1e6 + len(self.log), 0)
        self.log.append(payload)
        self.states.append(frozenset(self.truth))
        if self.up and not lost:
            self.flying.append((len(self.log) - 1, payload))

    def skip(self) -> None:
        self.log.append(None)
        self.states.append(frozenset(self.truth))

    def restart(self, stale: int) -> None:
        self.break_connection(stale)
        self.life += 1
        self.log = []
        self.truth = set()
        self.states = []

    def break_connection(self, stale: int, answer_lives: bool = False) -> None:
        self.up = self.synced = False
        self.asked = None
        if not (answer_lives and self.answer and self.answers_snapshot):
            self.answer = []  # the answer is lost, unless it is a snapshot that has already arrived
        flying, self.flying, frame = self.flying, [], self.frame
        self.follow(self.sequence.interrupted(self.now))
        for seq, payload in flying[:stale]:  # these messages are read after the client noticed the break
            self.follow(self.sequence.live([b"", frame(seq), payload], self.now))

    def connect(self) -> None:
        self.up = True
        self.follow(self.sequence.connected(self.now))

    # -- the network

    def arrive(self, index: int, again: bool) -> None:
        index = min(index, len(self.flying) - 1)
        seq, payload = self.flying[index] if again else self.flying.pop(index)
        self.follow(self.sequence.live([b"", self.frame(seq), payload], self.now))

    def serve(self, age: int = 0, available: bool = True, trimmed: int = 0) -> None:
        start, self.asked = self.asked, None
        assert start is not None
        self.first_of_answer = True
        self.answers_snapshot = isinstance(start, AskSnapshot)
        if isinstance(start, AskSnapshot):
            age, available = (age, available) if self.mode == "stale" else (0, True)
            self.answer = [
                self.snapshot(len(self.log) - 1 - age)
                if available
                else [(-2).to_bytes(8, "big", signed=True), bytes(16)]
            ]
            return
        start = max(start, trimmed) if self.mode == "fresh" else start
        answer = [(seq, payload) for seq, payload in enumerate(self.log) if payload is not None and seq >= start]
        if self.compacting and start < len(self.log) - self.journal:
            # The answer has the complete state first, in slices, and then empty batches up to the newest seq.
            state: list[AnyEvent] = [AllBlocksCleared(), *map(stored, self.truth)]
            numbers = range(start, len(self.log))
            cuts = [state[at : at + 2] for at in range(0, len(state), 2)]
            cuts[len(numbers) - 1 :] = [[event for cut in cuts[len(numbers) - 1 :] for event in cut]]
            cuts += [[]] * (len(numbers) - len(cuts))
            answer = [(seq, encode_batch(cut, -1.0, 0)) for seq, cut in zip(numbers, cuts, strict=True)]
        self.answer = [*([b"", self.frame(seq), payload] for seq, payload in answer), END]

    def answer_arrives(self, lost: bool) -> None:
        item = self.answer.pop(0)
        first, self.first_of_answer = self.first_of_answer, False
        if lost and not first:
            if self.compacting:
                self.answer = []  # kvbus breaks the answer off
            return  # the ROUTER of an older engine drops messages when its queue is full, but never the first
        take = self.sequence.snapshot if self.answers_snapshot else self.sequence.replayed
        self.follow(take(item, self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.follow(self.sequence.tick(self.now))

    # -- the subscriber

    def snapshot(self, seq: int) -> list[bytes]:
        if seq < 0:
            return [(-1).to_bytes(8, "big", signed=True), self.frame(0)[8:]]
        chunks: list[list[Any]] = [[AllBlocksCleared()], *([stored(block)] for block in self.states[seq])]
        return [seq.to_bytes(8, "big"), self.frame(0)[8:], *(encode_batch(chunk, -1.0, 0) for chunk in chunks)]

    def frame(self, seq: int) -> bytes:
        return seq.to_bytes(8, "big") + (bytes([self.life]) * 16 if self.ids else b"")

    def follow(self, outputs: Iterable[object]) -> None:
        for output in outputs:
            assert not isinstance(output, Lost), output
            if isinstance(output, Deliver):
                self.view.apply_batch(well_formed(output.payload))
            elif isinstance(output, Restarted):
                self.view.clear()
                self.synced = False
            elif isinstance(output, Replace):
                self.view.update(Snapshot(output.seq, tuple(well_formed(chunk) for chunk in output.chunks)))
            elif isinstance(output, Ask):
                assert self.mode != "snapshot"
                self.asked, self.answer = output.start, []
                self.sequence.sent(output.request, self.now)
            elif isinstance(output, AskSnapshot):
                assert self.mode != "replay"
                self.asked, self.answer = output, []
                self.sequence.sent(output.request, self.now)
            elif isinstance(output, Stop):
                self.asked, self.answer = None, []
            elif isinstance(output, Synced):
                self.synced = True

    def settle(self) -> None:
        for _ in range(1000):
            if self.asked is not None:
                self.serve()
            elif self.answer:
                self.answer_arrives(lost=False)
            elif self.flying:
                seq, payload = self.flying.pop(0)
                self.follow(self.sequence.live([b"", self.frame(seq), payload], self.now))
            elif self.exact and self.synced:
                return
            elif self.sequence.deadline < inf:
                self.now = max(self.now, self.sequence.deadline)
                self.follow(self.sequence.tick(self.now))
            else:
                return
        raise AssertionError("the subscriber never comes to rest")

    @property
    def exact(self) -> bool:
        """Whether the client has delivered the publisher's newest batch, and no received batch waits for a missing
        one.
        """
        newest = max((seq for seq, payload in enumerate(self.log) if payload is not None), default=-1)
        return (self.sequence.next_seq or 0) > newest and not self.sequence.held

    def in_step(self) -> None:
        """Check that a client with all batches has exactly the publisher's blocks.

        A client that waits for an answer or lacks a batch is not checked.
        """
        if self.up and self.synced and self.asked is None and not self.answer and self.exact:
            assert {block.hash for block in self.view} == self.truth

    def check(self) -> None:
        assert {block.hash for block in self.view} == self.truth
        assert self.exact

    def teardown(self) -> None:
        if not self.up:
            self.connect()
        self.settle()
        self.now += 10
        self.publish(("nothing", 0), lost=False)
        self.settle()
        assert self.synced
        self.check()
        # After the end of the walk, the client must still follow the live stream.
        self.publish(("store", 42), lost=False)
        self.settle()
        self.check()


LENGTH = 60

RULES = {
    "publish": 6,
    "skip": 1,
    "restart": 1,
    "break": 1,
    "connect": 2,
    "arrive": 6,
    "serve": 3,
    "answer": 8,
    "wait": 3,
}


class World(Subscription):
    """A world whose steps are chosen by a random generator."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.steps = 0
        self.begin(
            mode=chance.choice(["replay", "replay", "snapshot", "stale", "fresh"]),
            compacting=chance.random() < 0.6,
            ids=chance.random() < 0.3,
            held=chance.randint(1, 6),
            journal=chance.choice([1, 2, 5, 1000]),
            before=chance.choice([0, 0, 12, 30]),
        )

    def step(self, rule: str) -> None:
        """Do one step of this kind (``rule``), if the world's state permits it."""
        chance = self.chance
        if rule == "publish":
            kind = chance.choice(["store", "store", "store", "remove", "clear", "nothing"])
            self.publish((kind, chance.randint(0, 9)), chance.random() < 0.3)
        elif rule == "skip" and self.mode in ("snapshot", "fresh"):
            self.skip()
        elif rule == "restart" and self.up:
            self.restart(chance.randint(0, 2))
        elif rule == "break" and self.up:
            self.break_connection(chance.randint(0, 2), chance.random() < 0.5)
        elif rule == "connect" and not self.up:
            self.connect()
        elif rule == "arrive" and self.flying:
            self.arrive(chance.randint(0, 3), chance.random() < 0.3)
        elif rule == "serve" and self.asked is not None and self.up:
            self.serve(chance.randint(0, 3), chance.random() < 0.8, chance.randint(0, 6))
        elif rule == "answer" and self.answer:
            self.answer_arrives(chance.random() < 0.15)
        elif rule == "wait":
            self.wait(chance.choice([0.05, 0.5, 3.0]))
        else:
            return
        self.steps += 1

    def run(self) -> None:
        """Do random steps, and check the client's view after each step and at the end."""
        rules = self.chance.choices([*RULES], [*RULES.values()], k=self.chance.randint(5, LENGTH))
        for rule in rules:
            self.step(rule)
            self.in_step()
        self.teardown()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began, steps, seed, failed = time.process_time(), 0, options.seed, 0
    while steps < options.steps:
        world = World(seed)
        try:
            world.run()
        except Exception as error:  # noqa: BLE001 - whatever it is, it has a seed
            failed += 1
            sys.stdout.write(f"seed {seed}: {error!r:.200}\n")
        steps += world.steps
        seed += 1
    seconds = time.process_time() - began
    sys.stdout.write(f"{steps} steps in {seed - options.seed} worlds, {failed} failed, {seconds:.0f} s of CPU\n")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
