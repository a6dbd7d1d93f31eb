"""Tests that kvbus makes no decision by the wall clock. The module lists all modules that read the wall clock."""

from __future__ import annotations

import ast
from pathlib import Path

import kvbus

ROOT = Path(kvbus.__file__).parent
WALL = {("time", "time"), ("time", "time_ns"), ("time", "localtime"), ("time", "strftime"), ("time", "gmtime")}
READS = {
    "http/server.py": "when a sample of the history was taken, and since when the bus runs, as people are shown",
    "http/timeline.py": "when a transition was seen, as people are shown",
    "index/agreement.py": "since when two workers have different hashes, as people are told",
    "daemon/runtime.py": "the `ts` of heartbeats, and of the clear that opens a numbering",
    "state/sqlite.py": "how far ahead a damaged numbering goes on, and the name of files that are moved aside",
    "parts/discovery/streams.py": "whether a record says a time to come",
    "parts/log/contract.py": "the turn of an epoch, which must not repeat when a log has lost everything",
    "parts/outputs/dynamo/registry.py": "whether somebody still touches the record of a worker",
    "transport/live/hub.py": "when a router has left, as people are shown",
    "transport/live/router.py": "when a router got the state, as people are shown",
    "transport/live/stream.py": "when a router has left one stream",
    "transport/zmtp/peer.py": "since when a router is connected, as people are shown",
}
PEERS = ("cli/", "common/logs.py", "tools/")
"""Paths of simulated engines and of output for people. They are not part of the relay and may read the wall clock."""


def wall_clock_reads(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in WALL or (
                node.value.id == "datetime" and node.attr in ("now", "utcnow", "today")
            ):
                found.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found |= {f"time.{name.name}" for name in node.names if ("time", name.name) in WALL}
    return found


def test_only_the_listed_modules_read_the_wall_clock() -> None:
    reads = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if wall_clock_reads(path) and not str(path.relative_to(ROOT)).startswith(PEERS)
    }
    assert reads == set(READS), reads


def test_the_relay_reads_no_clock() -> None:
    """The relay reads no clock: it gets monotonic seconds as an argument.

    The event Tick brings it the wall clock's time. The relay only copies this time into the ``ts`` of batches.
    """
    nodes = [
        node
        for name in ("relay", "outgoing", "answering")
        for node in ast.walk(ast.parse((ROOT / "core" / f"{name}.py").read_text()))
    ]
    uses = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "wall"]
    assert uses
    compared = [
        node
        for node in nodes
        if isinstance(node, ast.Compare | ast.If | ast.While)
        for inner in ast.walk(node.test if not isinstance(node, ast.Compare) else node)
        if isinstance(inner, ast.Attribute) and inner.attr == "wall"
    ]
    assert compared == []
