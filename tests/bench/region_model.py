"""What a fleet takes, as sums of a few costs: each engine, message, kilobyte, block and router adds its own.

Each :class:`Quantity` is a sum of features of a fleet with a coefficient each, none below zero, fitted to what smaller
fleets took: the sum of the squares of relative errors is the least. Nothing of larger fleets is in the fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any, Final, NamedTuple

Point = dict[str, float]
"""Features of a fleet at some time, and what was seen then."""

MB: Final = 1e6
ROUTERS: Final = 16
FITTED: Final = 30
"""Engines of the largest fleet that the model is fitted on."""


class Quantity(NamedTuple):
    """Something that a fleet takes.

    Attributes:
        name: of what was seen, in a :data:`Point`.
        unit: of it.
        features: whose costs it is the sum of.
    """

    name: str
    unit: str
    features: tuple[str, ...]


WORDS: Final = {
    "one": "",
    "engines": "an engine",
    "batches": "a batch",
    "kB": "a kB",
    "batches of one": "a batch",
    "kB of one": "a kB",
    "sent": "a batch to a router",
    "turns": "a turn",
    "blocks": "1,000 blocks",
    "blocks of one": "1,000 blocks",
    "records": "1,000 batches behind states",
    "MB since": "a MB of the engines' behind states",
    "journal": "a MB of the journal",
    "parts": "a second of CPU of all parts",
}
"""How a coefficient is said. Batches and kB are the engines', token ids included, and a second's."""

WINDOWS: Final = (
    Quantity("engine → leaf", "kB/s", ("batches", "kB")),
    Quantity("leaf → log", "kB/s", ("engines", "batches", "kB")),
    Quantity("log → an aggregator", "kB/s", ("one", "engines", "batches", "kB")),
    Quantity("aggregator → a router", "kB/s", ("batches", "kB")),
    Quantity("batches into the log", "a second", ("batches",)),
    Quantity("messages to a router", "a second", ("engines", "batches")),
    Quantity("CPU of a leaf", "ms/s", ("one", "batches of one", "kB of one")),
    Quantity("CPU of the log", "ms/s", ("one", "engines", "turns", "batches", "kB")),
    Quantity("CPU of an aggregator", "ms/s", ("one", "engines", "turns", "batches", "sent", "kB")),
    Quantity("CPU of a router", "ms/s", ("one", "batches", "kB")),
    Quantity("memory of a leaf", "MiB", ("one", "blocks of one")),
    Quantity("memory of the log's server", "MiB", ("one", "engines")),
    Quantity("memory of an aggregator", "MiB", ("one", "engines", "journal")),
    Quantity("memory of a router", "MiB", ("one", "engines", "blocks")),
    Quantity("journal of an aggregator", "MB", ("blocks", "MB since")),
)
_KEPT: Final = ("one", "engines", "records", "journal")
RECOVERIES: Final = (
    Quantity("router, until exact", "s", _KEPT),
    Quantity("router, its CPU", "s", _KEPT),
    Quantity("aggregator, until its routers are exact", "s", _KEPT),
    Quantity("aggregator, its CPU", "s", _KEPT),
    Quantity("region, CPU of an aggregator", "s", _KEPT),
    Quantity("region, CPU of a router", "s", _KEPT),
    Quantity("region, until all is exact", "s", ("one", "parts")),
)


TURNS: Final = (0.0, 0.002, 0.005, 0.01, 0.02, 0.05)
"""Seconds of a turn that are tried: records that come in one are taken together."""


@dataclass(frozen=True)
class Fitted:
    """A quantity with its coefficients.

    Attributes:
        quantity: what it is.
        coefficients: of its features.
        worst: how far the fit is from what it was made of, the most, relative.
        turn: seconds of a turn, where the quantity has a cost of these.
    """

    quantity: Quantity
    coefficients: tuple[float, ...]
    worst: float
    turn: float = 0.0

    def __call__(self, point: Point) -> float:
        """What it takes of a fleet."""
        return sum(
            c * _value(point, name, self.turn)
            for c, name in zip(self.coefficients, self.quantity.features, strict=True)
        )


def _value(point: Point, name: str, turn: float) -> float:
    """A feature; turns are as many as batches while these are rare, and never more than fit into a second."""
    return point["batches"] / (1 + point["batches"] * turn) if name == "turns" else point[name]


def fit(quantity: Quantity, points: Sequence[Point]) -> Fitted:
    """The coefficients, none below zero, with the least squares of relative errors.

    Raises:
        ValueError: there are fewer points than coefficients.
    """
    if len(points) < len(quantity.features):
        raise ValueError(f"{quantity.name}: {len(points)} points for {len(quantity.features)} coefficients")
    tried = TURNS if "turns" in quantity.features else TURNS[:1]
    return min((_fit(quantity, points, turn) for turn in tried), key=lambda each: round(each[0], 9))[1]


def _fit(quantity: Quantity, points: Sequence[Point], turn: float) -> tuple[float, Fitted]:
    rows = [[_value(point, name, turn) / point[quantity.name] for name in quantity.features] for point in points]
    best: tuple[float, tuple[float, ...]] | None = None
    every = range(len(quantity.features))
    for chosen in (chosen for size in every for chosen in combinations(every, size + 1)):
        found = _least_squares([[row[at] for at in chosen] for row in rows])
        if found is None or min(found) < 0:
            continue
        whole = tuple(dict(zip(chosen, found, strict=True)).get(at, 0.0) for at in every)
        error = sum((sum(c * x for c, x in zip(whole, row, strict=True)) - 1) ** 2 for row in rows)
        if best is None or error < best[0]:
            best = error, whole
    assert best is not None  # each feature alone has a coefficient above zero
    worst = max(abs(sum(c * x for c, x in zip(best[1], row, strict=True)) - 1) for row in rows)
    return best[0], Fitted(quantity, best[1], worst, turn)


def _least_squares(rows: list[list[float]]) -> list[float] | None:
    """Solve the normal equations of `rows · c = 1`; None where they have no single solution."""
    size = len(rows[0])
    scale = [max(abs(row[at]) for row in rows) or 1.0 for at in range(size)]
    scaled = [[value / by for value, by in zip(row, scale, strict=True)] for row in rows]
    left = [[sum(row[a] * row[b] for row in scaled) for b in range(size)] for a in range(size)]
    right = [sum(row[a] for row in scaled) for a in range(size)]
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(left[row][at]))
        if abs(left[pivot][at]) < 1e-9:
            return None
        left[at], left[pivot], right[at], right[pivot] = left[pivot], left[at], right[pivot], right[at]
        for row in range(size):
            if row != at:
                by = left[row][at] / left[at][at]
                left[row] = [a - by * b for a, b in zip(left[row], left[at], strict=True)]
                right[row] -= by * right[at]
    return [right[at] / left[at][at] / scale[at] for at in range(size)]


# -- what was seen -----------------------------------------------------------------------------------------------------


def load_of(run: dict[str, Any], batches: float, size: float) -> Point:
    """The features of a fleet whose engines publish so many batches and bytes a second, all together."""
    engines = run["engines"]
    return {
        "one": 1.0,
        "engines": engines,
        "batches": batches,
        "kB": size / 1e3,
        "batches of one": batches / engines,
        "kB of one": size / 1e3 / engines,
        "blocks": engines * run["blocks"] / 1e3,
        "blocks of one": run["blocks"] / 1e3,
    }


def windows(run: dict[str, Any]) -> Iterator[Point]:
    """The points of one fleet, one for each aggregator and window."""
    for window in run["windows"]:
        load = load_of(run, window["batches"], window["bytes"])
        cpu = {role: 1e3 * sum(each) / len(each) for role, each in window["cpu"].items()}
        rss = {role: sum(each) / len(each) for role, each in window["rss"].items()}
        hops, routers = window["hops"], sum(window["split"])
        for at, connected in enumerate(window["split"]):
            yield load | {
                "sent": window["batches"] * connected,
                "journal": window["journal"][at] / MB,
                "MB since": (window["sent bytes"] - run["filled bytes"]) / MB,
                "load": window["load"],
                "engine → leaf": hops["engine"] / 1e3,
                "leaf → log": hops["log"] / 1e3,
                "log → an aggregator": hops["aggregator"] / 2e3,
                "aggregator → a router": (hops["router 0"] + hops["router 1"]) / routers / 1e3,
                "batches into the log": window["written"],
                "messages to a router": window["heard"],
                "CPU of a leaf": cpu["leaf"],
                "CPU of the log": cpu["broker"],
                "CPU of an aggregator": 1e3 * window["cpu"]["aggregator"][at],
                "CPU of a router": cpu["router"] / routers,
                "memory of a leaf": rss["leaf"],
                "memory of the log's server": rss["broker"],
                "memory of an aggregator": window["rss"]["aggregator"][at],
                "memory of a router": rss["router"] / routers,
                "journal of an aggregator": window["journal"][at] / MB,
            }


def behind_states(run: dict[str, Any]) -> tuple[float, float]:
    """Bytes of the states that an aggregator keeps, and of a batch behind them, as routers get it."""
    windows = run["windows"]
    frames = len(f"kv@pod-{run['engines'] - 1}.engine.0@m") + 8
    of_batch = median((window["heard bytes"] / window["heard"]) - frames for window in windows)
    published = [
        window["batches"] / window["bytes"] * (window["sent bytes"] - run["filled bytes"]) for window in windows
    ]
    return median(w["journal"][0] - of_batch * n for w, n in zip(windows, published, strict=True)), of_batch


def recoveries(run: dict[str, Any]) -> Iterator[Point]:
    """The points of one fleet's recoveries, with what was seen of each kind."""
    states, of_batch = behind_states(run)
    for row in (row | {"kind": kind} for kind, rows in run["recoveries"].items() for row in rows):
        point = load_of(run, 0.0, 0.0) | {"journal": row["journal"] / MB, "load": row["load"]}
        point["records"] = max(0.0, row["journal"] - states) / of_batch / 1e3
        if row["kind"] == "router":
            yield point | {"router, until exact": row["seconds"], "router, its CPU": row["cpu router"]}
        elif row["kind"] == "aggregator":
            seen = {"aggregator, until its routers are exact": row["seconds"]}
            yield point | seen | {"aggregator, its CPU": row["cpu aggregator"]}
        else:
            aggregator, router = row["cpu aggregator"] / 2, row["cpu router"] / ROUTERS
            seen = {"region, CPU of an aggregator": aggregator, "region, CPU of a router": router}
            yield point | seen | {"region, until all is exact": row["seconds"], "parts": _parts(aggregator, router)}


def _parts(aggregator: float, router: float) -> float:
    """CPU seconds of a region that begins; here they share two cores."""
    return 2 * aggregator + ROUTERS * router


class Compared(NamedTuple):
    """A quantity of a larger fleet: what the smaller ones predict, and what was measured, at the median of its points."""

    fitted: Fitted
    predicted: float
    measured: tuple[float, ...]

    @property
    def deviation(self) -> float:
        """Of the prediction, in per cent of what was measured."""
        return 100 * (self.predicted / median(self.measured) - 1)


def compare(runs: Sequence[dict[str, Any]], engines: int) -> list[Compared]:
    """Fit all quantities on the fleets of up to :data:`FITTED` engines, and predict a larger one."""
    found: list[Compared] = []
    for quantity in (*WINDOWS, *RECOVERIES):
        known: list[Point] = []
        asked: list[Point] = []
        for run in runs:
            seen = (point for point in (*windows(run), *recoveries(run)) if quantity.name in point)
            if run["engines"] <= FITTED:
                known.extend(seen)
            elif run["engines"] == engines:
                asked.extend(seen)
        fitted = fit(quantity, known)
        if "parts" in quantity.features:  # what was just predicted of them, not what they took
            parts = [[each.fitted(point) for each in found[-2:]] for point in asked]
            asked = [point | {"parts": _parts(*of)} for point, of in zip(asked, parts, strict=True)]
        measured = tuple(point[quantity.name] for point in asked)
        found.append(Compared(fitted, median(map(fitted, asked)), measured))
    return found
