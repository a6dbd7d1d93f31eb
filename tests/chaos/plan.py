"""Plans of faults for a campaign: the kind, time and target of each fault, made from a seed.

A *cell* is an engine, a kvbus, its routers and the links between them. It is built anew for each *generation*. A
generation consists of *rounds*: traffic with faults, then silence and a check. A round's plan depends only on ``(seed,
cell, generation, round)``, so any generation can be repeated by itself.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Final, Literal

EngineKind = Literal["sim", "piped"]

TRAFFIC: Final = 2.2
"""Seconds for which the engine publishes in a round."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The parts of a cell and their options.

    Attributes:
        name: name in reports.
        engine: ``sim``: `kvbus sim`, a new process each round. ``piped``: `kvbus play -`, fed by a simulated cache,
            with the same process in many rounds.
        ranks: number of the engine's data-parallel ranks.
        state: whether kvbus has a ``state_dir``.
        dials_in: whether the engine dials and kvbus binds.
        snapshots: whether routers use the snapshot protocol.
        kills_bus: whether kvbus is killed. One cell keeps its process to the end, to see whether its memory grows.
        namespaces: whether the engine and one router have network namespaces, and no proxies.
    """

    name: str
    engine: EngineKind
    ranks: int = 1
    state: bool = False
    dials_in: bool = False
    snapshots: bool = False
    kills_bus: bool = True
    namespaces: bool = False


SHAPES: Final = (
    Shape("sim", "sim", ranks=2, state=True),
    Shape("steady", "piped", snapshots=True, kills_bus=False),
    Shape("life", "piped", state=True, dials_in=True),
    Shape("netns", "piped", state=True, namespaces=True),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A planned fault, with the part of the cell that it hits (``target``).

    It starts ``at`` seconds after the start of the traffic, and lasts ``seconds``.
    """

    at: float
    kind: str
    target: str = ""
    seconds: float = 0.0
    count: int = 0

    def __str__(self) -> str:
        words = [f"{self.at:.2f}s {self.kind}", self.target]
        words += [f"for {self.seconds:.2f}s"] if self.seconds else []
        words += [f"x{self.count}"] if self.count else []
        return " ".join(word for word in words if word)


Flavour = Literal["mixed", "wire", "router", "single", "long"]


@dataclass(frozen=True, slots=True)
class Round:
    """A round's kind, and its faults in order of time.

    ``mixed``: all kinds of faults. ``wire``: only faults of single live batches, which kvbus's counters must show
    exactly. ``router``: faults of one router, which must not affect the other router. ``single``: one fault. ``long``:
    one fault that lasts until kvbus has noticed it.
    """

    flavour: Flavour
    seed: int
    faults: tuple[Fault, ...]


# The numbers are the weights of each kind of fault in a mixed round.
_LINK_KINDS: Final = {"cut": 10, "reset": 10, "stall": 8, "delay": 8, "half-open": 5, "refuse": 5}
_ROUTER_KINDS: Final = {"stop router": 5, "kill router": 1, "cut": 6, "reset": 6, "stall": 6, "half-open": 2}
_WIRE_KINDS: Final = {"drop": 5, "double": 3, "swap": 3}
_NET_KINDS: Final = {"packet loss": 5, "partition": 6, "tcp reset": 4, "link down": 3}
_DURATIONS: Final = {
    "stall": (0.05, 1.2),
    "delay": (0.2, 1.5),
    "half-open": (0.2, 1.5),
    "refuse": (0.05, 0.8),
    "stop engine": (0.05, 1.2),
    "stop kvbus": (0.05, 1.5),
    "stop router": (0.3, 2.0),
    "packet loss": (0.3, 1.5),
    "partition": (0.1, 1.2),
    "tcp reset": (0.1, 0.8),
    "link down": (0.05, 0.8),
    "disk full": (0.3, 1.0),
    "file size limit": (0.3, 1.0),
}
ENGINE_LINKS: Final = ("live", "replay")
ROUTER_LINKS: Final = ("out", "out replay")


def make_round(seed: int, cell: int, generation: int, number: int) -> Round:
    """Return the plan of a round, which depends only on these arguments."""
    shape = SHAPES[cell]
    own = zlib.crc32(f"{seed}/{cell}/{generation}/{number}".encode())
    rng = random.Random(own)
    flavours: dict[Flavour, int] = {
        "mixed": 60,
        "wire": 0 if shape.namespaces else 10,
        "router": 16,
        "single": 6,
    }
    flavours["long"] = 4
    flavour = rng.choices(list(flavours), list(flavours.values()))[0]
    if flavour == "mixed":
        faults = [_mixed(rng, shape) for _ in range(rng.randint(12, 16) if shape.namespaces else rng.randint(46, 60))]
    elif flavour == "wire":
        faults = [_wire(rng) for _ in range(rng.randint(60, 80))]
    elif flavour == "router":
        faults = [_router(rng, shape) for _ in range(rng.randint(8, 10) if shape.namespaces else rng.randint(28, 36))]
    elif flavour == "single":
        faults = [_mixed(rng, shape)]
    else:
        kinds = ["engine away", "stop kvbus long"]
        if shape.namespaces:
            kinds += ["connection forgotten"]
        elif not shape.dials_in:
            kinds += ["half-open unnoticed"]
        kinds += [] if shape.namespaces or not shape.kills_bus else ["replay silent"]
        faults = [Fault(rng.uniform(0.2, 1.0), rng.choice(kinds))]
    return Round(flavour, own, tuple(sorted(faults, key=lambda fault: fault.at)))


def _pick(rng: random.Random, kinds: dict[str, int]) -> str:
    return rng.choices(list(kinds), list(kinds.values()))[0]


def _at(rng: random.Random) -> float:
    return round(rng.uniform(0.0, TRAFFIC * 0.9), 3)


def _fault(rng: random.Random, kind: str, target: str = "") -> Fault:
    low, high = _DURATIONS.get(kind, (0.0, 0.0))
    return Fault(_at(rng), kind, target, round(rng.uniform(low, high), 3))


def _wire(rng: random.Random, target: str = "live") -> Fault:
    kind = _pick(rng, _WIRE_KINDS)
    return Fault(_at(rng), kind, target, count=rng.choice([1, 1, 1, 2, 3, 8]) if kind == "drop" else 1)


def _router(rng: random.Random, shape: Shape) -> Fault:
    if shape.namespaces:
        kind = _pick(rng, {**_NET_KINDS, "stop router": 5, "kill router": 2})
        return _fault(rng, kind, "router" if kind in _NET_KINDS else "")
    kind = _pick(rng, {**_ROUTER_KINDS, "drop": 6})
    if kind == "drop":
        return _wire(rng, "out")
    return _fault(rng, kind, rng.choice(ROUTER_LINKS) if kind in _LINK_KINDS else "")


def _mixed(rng: random.Random, shape: Shape) -> Fault:
    groups = {"link": 50, "wire": 38, "engine": 2, "router": 2, "kvbus": 2}
    groups |= {"disk": 1} if shape.state else {}
    group = _pick(rng, groups)
    if group == "wire" and not shape.namespaces:
        return _wire(rng, rng.choice(["live", "live", "live", "out"]))
    if group in ("link", "wire"):
        if shape.namespaces:
            return _fault(rng, _pick(rng, _NET_KINDS), rng.choice(["engine", "engine", "router"]))
        return _fault(rng, _pick(rng, _LINK_KINDS), rng.choice(ENGINE_LINKS * 2 + ROUTER_LINKS))
    if group == "engine":
        return _fault(rng, rng.choice(["stop engine", "stop engine", "kill engine"]))
    if group == "router":
        return _fault(rng, rng.choice(["stop router", "stop router", "kill router"]))
    if group == "kvbus":
        return _fault(
            rng,
            rng.choice(["stop kvbus", "kill kvbus", "kill kvbus", "end kvbus"] if shape.kills_bus else ["stop kvbus"]),
        )
    return _fault(rng, rng.choice(["disk full", "file size limit", "restart on a full disk"]))
