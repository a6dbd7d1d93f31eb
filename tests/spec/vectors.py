"""Write the test vectors of the specification to files in docs/spec: ``python -m tests.spec.vectors``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvbus.tools.conform.vectors import VECTORS

if TYPE_CHECKING:
    from kvbus.tools.conform.vectors import Frames, Vector

DIRECTORY: Final = Path(__file__).parents[2] / "docs" / "spec" / "vectors"


def written(vector: Vector) -> dict[str, Any]:
    """Return a vector as its file contains it: frames, and hashes that are bytes, become hexadecimal digits."""

    def frames(messages: list[Frames]) -> list[list[str]]:
        return [[frame.hex() for frame in each] for each in messages]

    names = ("group", "medium", "hash")
    view = [dict(zip(names, [g, m, h.hex() if isinstance(h, bytes) else h], strict=True)) for g, m, h in vector.view]
    made: dict[str, Any] = {"title": vector.title, "clauses": vector.clauses, "live": frames(vector.live)}
    made["events"] = [_readable(each[-1]) for each in vector.live]
    if vector.replay_from is not None:
        made |= {"asks": vector.replay_from, "replay": frames(vector.replay)}
    return made | {"view": view}


def _readable(payload: bytes) -> Any:
    """Return a payload in a form for people; None if it is not MessagePack."""
    try:
        return _plain(msgspec.msgpack.decode(payload))
    except msgspec.DecodeError:
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def text_of(vector: Vector) -> str:
    return json.dumps(written(vector), indent=1) + "\n"


if __name__ == "__main__":
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name, vector in VECTORS.items():
        (DIRECTORY / f"{name}.json").write_text(text_of(vector))
