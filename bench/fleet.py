"""Simulate workers and a KV-aware router: a generated load, caches that evict, and a routing policy.

The router chooses the worker with the longest cached prefix in its view, minus a term for the worker's running
requests. The policy is the same in every arm (variant of the simulation), and only the view differs. Events arrive
immediately, so that a view is wrong only if the router cannot know better. A run depends only on its seed.
"""

from __future__ import annotations

import heapq
import random
import struct
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final, NamedTuple

from kvbus.tools.sim.cache import Block, PrefixCache, Removed, Request, Stored, make_block
from kvbus.tools.sim.dialects import DIALECTS, BatchEncoder

DIALECT: Final = DIALECTS["vllm-0.33"]
LOAD_TERM: Final = 8
"""Number of cached blocks of a prefix that balance one running request when the router compares two workers."""

PREFILL_RATE: Final = 8000
DECODE_RATE: Final = 40
"""Tokens that a worker generates for a request per second."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Sizes and times of a run. Sessions arrive as a Poisson process.

    Tokens and turns are drawn uniformly from ranges.
    """

    workers: int = 8
    blocks: int = 1000
    """Number of blocks in each worker's cache."""
    block: int = 64
    """Number of tokens in a block."""
    seconds: float = 700.0
    fault_at: float = 400.0
    window: float = 300.0
    """Seconds after the fault in which computed tokens are counted."""
    sessions: float = 0.5
    """New sessions per second."""
    shared: int = 1024
    """Number of tokens in the system prompt, with which every session begins."""
    opening: tuple[int, int] = (256, 2048)
    """Minimum and maximum tokens of a session's first question, without the system prompt."""
    question: tuple[int, int] = (32, 384)
    answer: tuple[int, int] = (64, 256)
    turns: tuple[int, int] = (2, 8)
    think: float = 40.0
    """Mean seconds between an answer and the next question."""
    buffered: float = 200.0
    """Seconds covered by an engine's replay buffer: vLLM's 10,000 batches at 50 per second."""
    away: float = 10.0
    """Seconds until a killed kvbus runs again."""


View = Container[int | bytes]


class Arrival(NamedTuple):
    """A request: its time, all of its tokens, the number of prompt tokens, and the hashes of the prompt's blocks."""

    at: float
    tokens: tuple[int, ...]
    prompt: int
    hashes: tuple[int | bytes, ...]


def arrivals(seed: int, load: Load) -> list[Arrival]:
    """Return the requests of a run, ordered by time."""
    rng = random.Random(f"kvbus/worth/{seed}")
    system = _tokens(rng, load.shared)
    found: list[Arrival] = []
    began = rng.expovariate(load.sessions)
    while began < load.seconds:
        found += _session(rng, load, began, system)
        began += rng.expovariate(load.sessions)
    return sorted(found, key=lambda arrival: arrival.at)


def _session(rng: random.Random, load: Load, began: float, system: tuple[int, ...]) -> Iterator[Arrival]:
    tokens, chain = system, list[Block]()
    at = began
    for turn in range(rng.randint(*load.turns)):
        tokens += _tokens(rng, rng.randint(*(load.question if turn else load.opening)))
        prompt = len(tokens)
        while (end := (len(chain) + 1) * load.block) < prompt:
            chain.append(make_block(chain[-1] if chain else None, tokens[end - load.block : end]))
        tokens += _tokens(rng, rng.randint(*load.answer))
        if at < load.seconds:
            yield Arrival(at, tokens, prompt, tuple(DIALECT.hash_of(block) for block in chain))
        at += (len(tokens) - prompt) / DECODE_RATE + rng.expovariate(1 / load.think)


def _tokens(rng: random.Random, number: int) -> tuple[int, ...]:
    return struct.unpack(f"<{number}H", rng.randbytes(2 * number))


class Worker:
    """An engine: its cache, its batches and its replay buffer."""

    def __init__(self, load: Load, feed: Feed, number: int) -> None:
        self._load, self._feed, self.number = load, feed, number
        self._encoder = BatchEncoder(DIALECT)
        self.epoch = -1
        self.begin()

    def begin(self) -> None:
        """Start a new epoch of the engine with an empty cache."""
        self.epoch += 1
        self.cache = PrefixCache(self._load.blocks, self._load.block, copies=DIALECT.copies)
        self.seq = 0
        self.running = 0
        self.live: Counter[int | bytes] = Counter()
        """Number of copies of each cached block, by its hash."""
        self._buffer: deque[tuple[float, int, bytes]] = deque()

    def publish(self, now: float) -> None:
        """Publish the cache's changes since the last call as a batch."""
        events = self.cache.take_events()
        for event in events:
            if isinstance(event, Stored):
                self.live.update(map(DIALECT.hash_of, event.blocks))
            elif isinstance(event, Removed):
                self.live -= Counter(map(DIALECT.hash_of, event.blocks))
        for payload in self._encoder.encode(events, now):
            self._buffer.append((now, self.seq, payload))
            self.seq += 1
            self._feed.batch(self, self.seq - 1, payload, now)

    def replay(self, start: int, now: float) -> list[tuple[int, bytes]]:
        """Return the batches from a seq on that are still in the replay buffer."""
        while self._buffer and self._buffer[0][0] < now - self._load.buffered:
            self._buffer.popleft()
        return [(seq, payload) for _, seq, payload in self._buffer if seq >= start]


class Feed:
    """The router's source of information on the workers' caches, which differs between the arms of the simulation.

    This class provides no information, so the router uses the workers in turn.
    """

    aware = False
    """Whether the router considers cached prefixes."""

    def connect(self, workers: Sequence[Worker]) -> None:
        """Connect to the workers, whose caches are empty."""
        self.workers = workers

    def views(self) -> Sequence[View]:
        """Return the router's view of each worker's blocks."""
        return ()

    def batch(self, worker: Worker, seq: int, payload: bytes, now: float) -> None:
        """Receive a batch that a worker publishes."""

    def tick(self, now: float) -> None:
        """Do the work of each simulated second."""

    def crashed(self, worker: Worker, now: float) -> None:
        """Handle a worker's crash. The worker has already restarted in a new epoch."""

    def router_restarts(self, now: float) -> None:
        """Restart the router without its views."""

    def kvbus_killed(self) -> None:
        """Kill kvbus, if the router of this arm subscribes to kvbus."""

    def kvbus_back(self, now: float, *, state: bool) -> None:
        """Restart kvbus, with or without its state."""

    @property
    def promises(self) -> bool:
        """Return whether every block of the router's view must now be in the worker's cache."""
        return False

    def check(self) -> None:
        """Check the router's views at the end of the run, after every batch has arrived."""


class Oracle(Feed):
    """A feed that reads the workers' caches directly, so that its views are always right."""

    aware = True

    def views(self) -> Sequence[View]:
        return [worker.live for worker in self.workers]

    @property
    def promises(self) -> bool:
        return True

    def check(self) -> None:
        for worker in self.workers:
            cached = {DIALECT.hash_of(live.block) for live in worker.cache.live_blocks().values()}
            assert cached == set(worker.live), "the oracle is not what the cache itself says"


class Choice(NamedTuple):
    """The worker that the router chose for a request, and the number of tokens computed there."""

    at: float
    worker: int
    prompt: int
    computed: int
    """Number of prompt tokens that were not in the worker's cache."""
    mispredicted: int
    """Number of blocks of the prompt's prefix that were in the router's view but not in the worker's cache."""


def prefix(view: View, hashes: Sequence[int | bytes]) -> int:
    """Return the number of blocks at the start of a prompt that are in a view."""
    for number, block in enumerate(hashes):
        if block not in view:
            return number
    return len(hashes)


@dataclass
class Fleet:
    """A simulated run of workers and a router, with a queue of scheduled actions."""

    load: Load
    feed: Feed
    choices: list[Choice] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.workers = [Worker(self.load, self.feed, number) for number in range(self.load.workers)]
        self._sent = [0] * self.load.workers
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.feed.connect(self.workers)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Schedule an action at a simulated time."""
        heapq.heappush(self._due, (when, next(self._order), action))

    def run(self, requests: Sequence[Arrival]) -> list[Choice]:
        """Serve all requests until the last one has finished."""
        for second in range(1, int(self.load.seconds)):
            self.at(second, lambda: self.feed.tick(self.now))
        for request in requests:
            self.at(request.at, partial(self._choose, request))
        while self._due:
            self.now, _, action = heapq.heappop(self._due)
            action()
        self.feed.check()
        return self.choices

    def crash(self, number: int) -> None:
        """Crash a worker, which restarts immediately without its cache and its running requests."""
        self.workers[number].begin()
        self.feed.crashed(self.workers[number], self.now)

    def _choose(self, request: Arrival) -> None:
        found = (
            [prefix(view, request.hashes) for view in self.feed.views()] if self.feed.aware else [0] * len(self._sent)
        )
        term = LOAD_TERM if self.feed.aware else 0
        worker = min(self.workers, key=lambda w: (term * w.running - found[w.number], self._sent[w.number]))
        number = worker.number
        wrong = max(0, found[number] - prefix(worker.live, request.hashes))
        assert not (wrong and self.feed.promises), f"at {self.now} {wrong} blocks of worker {number} were not there"
        self._sent[number] += 1
        self._start(worker, request, wrong)

    def _start(self, worker: Worker, request: Arrival, wrong: int) -> None:
        if not worker.cache.fits(len(request.tokens)):
            self.at(self.now + 0.1, partial(self._start, worker, request, wrong))
            return
        started = worker.cache.start(request.tokens, request.prompt)
        computed = request.prompt - started.cached_prompt
        self.choices.append(Choice(request.at, worker.number, request.prompt, computed, wrong))
        worker.running += 1
        worker.publish(self.now)
        epoch = worker.epoch
        self.at(self.now + computed / PREFILL_RATE, partial(self._prefilled, worker, epoch, started, computed))

    def _prefilled(self, worker: Worker, epoch: int, started: Request, computed: int) -> None:
        if worker.epoch == epoch:
            worker.cache.compute(started, computed)
            worker.publish(self.now)
            answer = len(started.tokens) - started.prompt
            self.at(self.now + answer / DECODE_RATE, partial(self._answered, worker, epoch, started, answer))

    def _answered(self, worker: Worker, epoch: int, started: Request, answer: int) -> None:
        if worker.epoch == epoch:
            worker.cache.compute(started, answer)
            worker.cache.finish(started)
            worker.running -= 1
            worker.publish(self.now)
