"""Measure the way of a batch as multiples of other programs on this machine: ``python -m bench.path``.

All figures are ratios of CPU times or latencies of programs that run in turn, in slices of a fraction of a second. So a
slow or busy machine changes the times, but hardly the ratios.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from statistics import median
from typing import Any, Final, NamedTuple, TypeVar

import click
import msgspec

from kvbus.core.events import BatchReceived, SourceUp
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.profiles import PROFILES
from tests.path.trace import trace_case

from . import report
from .engines import MAPS, NAMES, Engine, probe
from .loads import stores
from .process import Kind
from .program import program
from .report import Bound, Result, Table, ratios, told
from .traffic import Result as Run
from .traffic import Traffic, traffic

Load = TypeVar("Load")
T = TypeVar("T")

LIVE: Final = 16_384
"""Number of live blocks in a load with removals."""

WARM: Final = LIVE // 64
"""Number of batches before a measurement. A load with removals then has all its live blocks."""

DIVIDED: Final = "divided by vLLM's maps, vllm"

ALIKE: Final = 1.6
"""Maximum CPU time of a batch in any dialect or profile, divided by that of vLLM's maps to the profile vllm."""


class Shape(NamedTuple):
    """The events of a batch, and its bounds: of the core in untyped decodes, of the process in naive relays."""

    events: int
    blocks: int
    live: int | None
    core: float
    process: float
    """The bound of the process with its state."""
    alone: float
    """The bound of the process without a state."""
    slice: int
    """Number of batches in a slice."""


SHAPES: Final = {
    "1x1": Shape(1, 1, None, 10, 1.0, 1.0, 1500),
    "8x8": Shape(8, 8, None, 5, 2.5, 2.0, 300),
    "mix": Shape(8, 8, LIVE, 5, 2.5, 2.0, 400),
}
"""The shapes of batches: a store of one block; 8 stores of 8 blocks; 4 such stores and 4 removals of 8 blocks."""


class Variant(NamedTuple):
    """A configuration of kvbus, and the dialect of its engine."""

    dialect: str = MAPS
    profile: str = "vllm"
    state: bool = False
    ranks: int = 1
    reason: str = ""
    """Why this variant may take more than :data:`ALIKE` times as long as vLLM's maps; empty if it may not.

    It is the reason only for events of several blocks.
    """

    def __str__(self) -> str:
        """The name in tables."""
        ranks = f", copies on {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.dialect}, {self.profile}{ranks}{', with state' if self.state else ''}"


ONE_BLOCK: Final = "AIBrix reads one block per event, so 8 events become 64"
PROFILED: Final = [
    Variant(profile="dynamo"),
    Variant(profile="llm-d"),
    Variant(profile="aibrix", reason=ONE_BLOCK),
    Variant(profile="aibrix", ranks=2, reason=ONE_BLOCK),
]
VARIANTS: Final = [*(Variant(dialect, state=state) for dialect in NAMES for state in (False, True)), *PROFILED]


def output_of(variant: Variant) -> dict[str, Any]:
    """Return the keys of the output in kvbus's configuration."""
    found: dict[str, Any] = {"profile": variant.profile}
    if variant.profile == "llm-d":
        found["topic"] = "kv@pod@model"
    if variant.ranks > 1:
        found["layout"] = "merged"
    return found


def way(*, quick: bool, runs: int) -> Result:
    """Count the functions and modules of kvbus that a batch, or the state for a late router, passes."""
    del quick, runs
    goals = {"1x1": (35, 14), "8x8": (35, 14), "late": (80, None)}
    names = {"1x1": "a batch of 1x1", "8x8": "a batch of 8x8", "late": "the state of 60 blocks for a late router"}
    bounds, rows = [], []
    for case, goal in goals.items():
        with tempfile.TemporaryDirectory() as state:
            found = asyncio.run(trace_case(case, state)).figures
        rows.append([names[case], *map(str, found.values())])
        for what, limit in zip(("functions", "modules"), goal, strict=True):
            if limit is not None:
                bounds.append(Bound(f"{what} on the way of {names[case]}", limit, "", [found[what]]))
    return Result("Functions on the way", bounds, Table(["what passes", "calls", "functions", "modules"], rows))


def _relay(variant: Variant) -> Callable[[list[bytes]], None]:
    """Return a function that passes payloads to a new relay, in turn from each of the variant's ranks."""
    topic = b"kv@pod@model" if variant.profile == "llm-d" else None
    spec = OutputSpec("r", PROFILES[variant.profile], [topic], merged=variant.ranks > 1, heartbeat=0)
    found = Relay([SourceSpec("e", rank, replay=False) for rank in range(variant.ranks)], [spec])
    for rank in range(variant.ranks):
        found.handle(SourceUp(rank), 1.0)
    seq = 0

    def handle(payloads: list[bytes]) -> None:
        nonlocal seq
        handle = found.handle
        for payload in payloads:
            frames = [b"", seq.to_bytes(8, "big"), payload]
            for rank in range(variant.ranks):
                handle(BatchReceived(rank, frames), 1.0)
            seq += 1

    return handle


def core(*, quick: bool, runs: int) -> Result:
    """Measure the core without sockets: the CPU time of ``Relay.handle``, in untyped decodes of the same payload."""
    slices = 10 if quick else 40
    plain = [each for each in VARIANTS if not each.state]
    bounds, rows = [], []
    for name, shape in SHAPES.items():
        found: dict[Variant, list[float]] = {each: [] for each in plain}
        decodes: dict[Variant, list[float]] = {each: [] for each in plain}
        for _ in range(runs):
            times = _core(shape, plain, slices)
            for each in plain:
                found[each].append(median(times[each]))
                decodes[each].append(median(ratios(times[each], times[each.dialect])))
        alike = {each: ratios(us, found[plain[0]]) for each, us in found.items()}
        bounds.append(Bound(f"core, {name}, in untyped decodes", shape.core, "x", decodes[plain[0]]))
        bounds += _alike(f"core, {name}", shape, alike)
        rows += [[name, str(each), told(found[each], "us"), told(decodes[each]), told(alike[each])] for each in plain]
    columns = ["a batch", "dialect, profile", "CPU time of a batch", "in untyped decodes", DIVIDED]
    return Result("The core: CPU time of a batch without sockets", bounds, Table(columns, rows))


def _core(shape: Shape, variants: list[Variant], slices: int) -> dict[Variant | str, list[float]]:
    """Return the CPU time of a batch in microseconds, in each slice, of the core and of a decode by dialect."""
    decode = msgspec.msgpack.Decoder().decode

    def decode_all(payloads: list[bytes]) -> None:
        for payload in payloads:
            decode(payload)

    load = Engine(*shape[:3]).batches(list(NAMES))
    tasks: dict[Variant | str, Callable[[list[bytes]], None]] = {each: _relay(each) for each in variants}
    tasks |= dict.fromkeys(NAMES, decode_all)
    times: dict[Variant | str, list[float]] = {each: [] for each in tasks}
    for at in range(-1, slices):
        batches = list(islice(load, WARM if at < 0 else 100))
        for each in sorted(tasks, key=str, reverse=at % 2 == 0):
            payloads = [batch[each if isinstance(each, str) else each.dialect] for batch in batches]
            began = time.thread_time()
            tasks[each](payloads)
            if at >= 0:
                seconds = time.thread_time() - began
                times[each].append(seconds / len(batches) / (1 if isinstance(each, str) else each.ranks) * 1e6)
        if at < 0:
            gc.collect()
            gc.freeze()
    gc.unfreeze()
    return times


def _alike(what: str, shape: Shape, found: dict[Variant, list[float]]) -> list[Bound]:
    """Return the bounds for all variants without a state except the first, with which they are compared."""
    return [
        Bound(f"{what}, {each}: {DIVIDED}", ALIKE, "x", values, reason=each.reason if shape.blocks > 1 else "")
        for each, values in list(found.items())[1:]
        if not each.state
    ]


def process(*, quick: bool, runs: int) -> Result:
    """Measure the CPU time of the complete process at the maximum rate, in naive relays."""
    bounds, rows = [], []
    for name, shape in SHAPES.items():
        found: dict[Variant, list[float]] = {each: [] for each in VARIANTS}
        naive: dict[str, list[float]] = {dialect: [] for dialect in NAMES}
        for run in range(runs):
            _say(f"{name}, run {run + 1} of {runs}")
            for each, us in _saturated(shape, 3 if quick else 8).items():
                (naive[each] if isinstance(each, str) else found[each]).append(us)
        relays = {each: ratios(us, naive[each.dialect]) for each, us in found.items()}
        alike = {each: ratios(us, found[VARIANTS[0]]) for each, us in found.items()}
        for each, limit, kept in ((VARIANTS[0], shape.alone, ""), (VARIANTS[1], shape.process, " with its state")):
            bounds.append(Bound(f"process{kept}, {name}, in naive relays", limit, "x", relays[each]))
        bounds += _alike(f"process, {name}", shape, alike)
        rows += [[name, str(each), told(us, "us"), told(relays[each]), told(alike[each])] for each, us in found.items()]
    columns = ["a batch", "dialect, profile", "CPU time of a batch", "in naive relays", DIVIDED]
    return Result("The process: CPU time of a batch at the maximum rate", bounds, Table(columns, rows))


def _saturated(shape: Shape, rounds: int) -> dict[Variant | str, float]:
    """Return the CPU time of a batch in microseconds, for each variant of kvbus, and for a naive relay by dialect."""
    load = Engine(*shape[:3]).batches(list(NAMES))
    others = Engine(*shape[:3]).batches([MAPS], rank=1)  # a second rank with the same blocks
    found: dict[Variant | str, float] = dict.fromkeys((*VARIANTS, *NAMES), 0.0)
    with contextlib.ExitStack() as stack:
        relays: dict[Variant | str, Traffic] = {
            each: stack.enter_context(
                traffic(
                    "kvbus", each.ranks, probing=partial(probe, each.dialect), output=output_of(each), state=each.state
                )
            )
            for each in VARIANTS
        }
        relays |= dict.fromkeys(NAMES, stack.enter_context(traffic("naive")))
        for at in range(-1, rounds):
            size = WARM if at < 0 else shape.slice
            batches, second = list(islice(load, size)), [batch[MAPS] for batch in islice(others, size)]
            for each in sorted(relays, key=str, reverse=at % 2 == 0):
                dialect, ranks = (each, 1) if isinstance(each, str) else (each.dialect, each.ranks)
                payloads = [[batch[dialect] for batch in batches], second][:ranks]
                # Of two ranks' batches with the same stores, the first arrives. Removals arrive with the second.
                copies = 1 if shape.live and at >= 0 else ranks
                run = relays[each].saturate(*payloads, batches=size, copies=copies)
                if at >= 0:
                    found[each] += run.cpu_us / rounds
    return found


def _say(text: str) -> None:
    click.echo(f"  {text}", err=True)


def _in_turn(relays: Sequence[Traffic], loads: Iterable[Load], measure: Callable[[Traffic, Load], T]) -> list[list[T]]:
    """Measure each relay with each load, in alternating order. Return the results of each relay."""
    found: list[list[T]] = [[] for _ in relays]
    for turn, load in enumerate(loads):
        for relay, results in list(zip(relays, found, strict=True))[:: 1 if turn % 2 == 0 else -1]:
            results.append(measure(relay, load))
    return found


def _paced(relay: Traffic, load: list[bytes], *, rate: float) -> Run:
    return relay.pace(load, rate=rate)


def latency(*, quick: bool, runs: int) -> Result:
    """Measure the time of a batch from engine to router, in alternating slices of kvbus and libzmq's proxy."""
    kinds: tuple[Kind, ...] = ("kvbus", "proxy")
    bounds, rows = [], []
    for rate in (1000, 2000):
        load, slices = stores(1, 1), 1 + (4 if quick else 5 * runs)
        with contextlib.ExitStack() as stack:
            relays = [stack.enter_context(traffic(kind, state=True)) for kind in kinds]
            loads = [list(islice(load, 2 * rate)) for _ in range(slices)]
            pairs = _in_turn(relays, loads, partial(_paced, rate=rate))
        found = {  # the first slice warms up
            name: [[run.percentile(share) for run in taken[1:]] for taken in pairs]
            for name, share in (("p50", 0.5), ("p99", 0.99))
        }
        for name, (kvbus, proxy) in found.items():
            by_proxy = ratios(kvbus, proxy)
            bounds.append(Bound(f"latency at {rate:,} batches/s, {name}, in libzmq's proxies", 1.5, "x", by_proxy))
            rows.append([f"{rate:,}", name, told(kvbus, "us"), told(proxy, "us"), told(by_proxy)])
    return Result(
        "Latency of a batch of 1x1 from engine to router",
        bounds,
        Table(["batches/s", "percentile", "kvbus with its state", "proxy", "in proxies"], rows),
    )


def routers(*, quick: bool, runs: int) -> Result:
    """Measure the CPU time of kvbus and of libzmq's proxy with many routers."""
    kinds: tuple[Kind, ...] = ("kvbus", "proxy")
    rate = 1000
    slices = 2 if quick else 2 * runs
    bounds, rows = [], []
    for many in (1, 16, 64):
        load = stores(1, 1)
        with contextlib.ExitStack() as stack:
            relays = [stack.enter_context(traffic(kind, routers=many)) for kind in kinds]
            loads = [list(islice(load, 2 * rate)) for _ in range(slices)]
            found = _in_turn(relays, loads, lambda relay, load: relay.pace(load, rate=rate).cpu_share)
        by_proxy = ratios(*found)
        if many > 1:
            bounds.append(Bound(f"CPU time with {many} routers, in libzmq's proxies", 1.0, "x", by_proxy))
        rows.append([str(many), *(told(shares, "%") for shares in found), told(by_proxy)])
    return Result(
        "CPU time at 1,000 batches/s of 1x1, for several numbers of routers",
        bounds,
        Table(["routers", "kvbus: share of one core", "proxy: share of one core", "in proxies"], rows),
    )


def ranks(*, quick: bool, runs: int) -> Result:
    """Measure the CPU time of kvbus with its state beside an engine of eight ranks at a usual rate."""
    kinds: tuple[Kind, ...] = ("kvbus", "naive")
    count, rate, seconds = 8, 50, 2 if quick else 5
    slices = 2 if quick else 2 * runs
    bounds, rows = [], []
    for name in ("1x1", "8x8"):
        shape = SHAPES[name]
        engines = [Engine(*shape[:3], seed=rank).batches([MAPS], rank=rank) for rank in range(count)]
        with contextlib.ExitStack() as stack:
            relays = [stack.enter_context(traffic(kind, count, state=True)) for kind in kinds]
            loads = [
                [[batch[MAPS] for batch in islice(engine, rate * seconds)] for engine in engines] for _ in range(slices)
            ]
            found = _in_turn(relays, loads, lambda relay, load: relay.pace(*load, rate=rate).cpu_share)
        by_naive = ratios(*found)
        if name == "1x1":
            bounds.append(Bound("8 ranks x 50/s of 1x1: kvbus's share of one core, with its state", 8, "%", found[0]))
        else:
            bounds.append(Bound("8 ranks x 50/s of 8x8: kvbus with its state, in naive relays", 2.5, "x", by_naive))
        rows.append([name, *(told(shares, "%") for shares in found), told(by_naive)])
    return Result(
        "CPU time beside an engine of 8 ranks, each with 50 batches/s",
        bounds,
        Table(["a batch", "kvbus: share of one core", "naive: share of one core", "in naive relays"], rows),
    )


main = program(
    "bench.path", report.PATH, {each.__name__: each for each in (way, core, process, latency, routers, ranks)}
)

if __name__ == "__main__":
    main()
