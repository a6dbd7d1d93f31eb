"""Tests for real routers at an output with ``layout: per_topic``: three ranks share one endpoint, with one topic each.

One router keeps a seq for each topic. The other router reads only one topic.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from .cases import CASES, play
from .kinds import DYNAMO, KINDS, LLMD_TOPIC, PROGRAMS, PYTHON_ENV, named_streams
from .routers import Kind, Program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cases import Case
    from .routers import Router, Stream

RANKS: Final = 3
SEVERAL: Final = {"ranks": RANKS, "layout": "per_topic"}
OUTPUT: Final = {"topic": "kv@{source}-{rank}@{model}", "replay_endpoint": None}
MODEL: Final = LLMD_TOPIC.rpartition("@")[2]


def _one_stream_a_topic(streams: Sequence[Stream]) -> dict[str, Any]:
    """Return the description of the streams for a router's program.

    At the engine, each endpoint is one stream. At kvbus, each topic of the only endpoint is one stream.
    """
    named = named_streams(streams)
    if len(streams) == 1:
        (one,) = named["streams"]
        named["streams"] = [{**one, "name": f"w{rank}", "topic": f"kv@engine-{rank}@{MODEL}"} for rank in range(RANKS)]
    return named


def _kv_router(directory: Path, name: str) -> Router:
    return Program([os.environ[PYTHON_ENV], str(PROGRAMS / "kvrouter.py")], directory, name, _one_stream_a_topic)


(LLMD,) = (kind for kind in KINDS if kind.name.startswith("llm-d-kv-cache"))
READERS: Final = (
    replace(LLMD, output={**LLMD.output, **OUTPUT}),
    Kind("Dynamo 1.6.1, KvRouter", _kv_router, DYNAMO, {"profile": "dynamo", **OUTPUT}),
)
HAPPENS: Final = ("late", "missed_five", "rank_restarts", "bus_killed", "bus_killed_state", "one_more")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.name in HAPPENS], ids=lambda case: case.name)
@pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.name)
async def test_a_router_of_an_output_with_a_topic_per_rank_is_exact(kind: Kind, case: Case, tmp_path: Path) -> None:
    if lacking := kind.lacking():
        pytest.skip(lacking)
    live, direct, behind = await play(replace(case, settings={**case.settings, **SEVERAL}), kind, tmp_path)
    assert tuple(behind) == (0, 0), f"{live} blocks; missing and dead directly: {tuple(direct)}"
