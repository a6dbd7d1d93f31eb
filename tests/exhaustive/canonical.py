"""Compute a digest of a state of the search. States with the same future behaviour have the same digest.

The digest contains values, and times relative to now, but no counters. It contains values of unknown types completely.
So a new field may make equivalent states differ, which costs search time, but it never makes different states equal.
"""

from __future__ import annotations

import hashlib
import marshal
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from enum import Enum
from math import inf
from operator import attrgetter
from typing import Any, Final

from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.source_spec import SourceSpec
from kvbus.core.stats import OutputStats, SourceStats
from kvbus.core.wire.frames import FrameLimits
from kvbus.core.wire.profiles import Profile, Wire

CLOCK: Final = 1_000.0
"""Start of a model's clock in seconds.

A float from this value on is a time; a lower float is a ``ts`` or a duration.
"""

CONSTANT: Final = (SourceSpec, OutputSpec, FrameLimits, Profile, Wire, OutputStats)
"""Types whose objects never change, and types that only count events. The digest omits their values."""

CODE: Final = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, weakref.ref, type)
"""Types without state, such as functions and classes. The digest omits their values."""

NAMES_OF_REQUESTS: Final = frozenset({"_last_id", "id"})
"""Fields with request ids. The digest omits them, because an answer in transit always belongs to the newest request."""

ATOMS: Final = frozenset({int, bytes, str, bool, type(None)})

Plain = Callable[["_Walk", Any], Any]


def digest(parts: Iterable[Any], now: float) -> bytes:
    """Return the digest of objects and of all objects that they refer to.

    The digest shows whether two references lead to one object, or to two equal objects.
    """
    walk = _Walk(now)
    return hashlib.blake2b(marshal.dumps([walk.plain(part) for part in parts], 2), digest_size=12).digest()


class _Walk:
    def __init__(self, now: float) -> None:
        self.now = now
        self._seen: dict[int, int] = {}

    def plain(self, value: Any) -> Any:
        """Return a value of the model's state as lists, integers, strings and bytes, from which a digest can be
        computed.
        """
        kind = type(value)
        if kind in ATOMS:
            return value
        if kind is float:
            return ["time", value - self.now] if CLOCK <= value < inf else value
        seen, key = self._seen, id(value)
        if key in seen:
            return ["again", seen[key]]
        seen[key] = len(seen)
        way = _ways.get(kind)
        if way is None:
            way = _ways[kind] = _way(value, kind)
        return way(self, value)


_ways: dict[type, Plain] = {}


def _way(value: Any, kind: type) -> Plain:
    """Return the function that converts a value of this type to plain data for the digest."""
    name = kind.__name__
    if issubclass(kind, Enum):
        return lambda _, value: value.name
    if issubclass(kind, (SourceStats, *CONSTANT, *CODE)):
        return lambda _walk, _value: name
    if issubclass(kind, types.GeneratorType):
        return _generator
    if issubclass(kind, dict | Counter | weakref.WeakValueDictionary):
        return lambda walk, value: [[walk.plain(key), walk.plain(each)] for key, each in value.items()]
    if issubclass(kind, set | frozenset):
        return lambda _, value: sorted(map(repr, value))
    if issubclass(kind, list | tuple | deque):
        return _sequence
    slots = [slot for base in kind.__mro__ for slot in base.__dict__.get("__slots__", ())]
    fields = sorted({*slots, *getattr(kind, "__struct_fields__", ())} - NAMES_OF_REQUESTS - {"__dict__", "__weakref__"})
    if hasattr(value, "__dict__"):
        return lambda walk, value: [
            name, *(walk.plain(each) for key, each in vars(value).items() if key not in NAMES_OF_REQUESTS)
        ]  # fmt: skip
    if not fields:
        return lambda _walk, _value: name
    get = attrgetter(*fields, "__class__")
    return lambda walk, value: [name, *map(walk.plain, get(value)[:-1])]


def _generator(walk: _Walk, value: types.GeneratorType[Any, Any, Any]) -> Any:
    """Return the state of a generator: its position, its variables, and the generator that it runs by ``yield
    from``.
    """
    frame = value.gi_frame
    if frame is None:
        return "an exhausted generator"
    variables = [[name, walk.plain(each)] for name, each in sorted(frame.f_locals.items())]
    return [value.__qualname__, frame.f_lasti, variables, walk.plain(value.gi_yieldfrom)]


def _sequence(walk: _Walk, value: Any) -> Any:
    if len(value) > 100:
        return list(value)  # a ring of fingerprints, which has only plain values
    return list(map(walk.plain, value))
