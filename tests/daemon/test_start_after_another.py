"""Tests that kvbus starts after a run with any other configuration: the old run's files never prevent it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from kvbus.config import load
from kvbus.core.events import BatchReceived
from kvbus.daemon.daemon import Daemon
from kvbus.state.reservations import SeqReservations
from tests.doubles.bus import eventually
from tests.doubles.payloads import payload, store
from tests.state.left import opened
from tests.typed import there


def by_topic(topic: str = "kv@{source}", **more: Any) -> dict[str, Any]:
    return {"endpoint": "ipc:///%/out", "layout": "per_topic", "topic": topic, **more}


def engine(name: str = "a", ranks: int = 1, **more: Any) -> dict[str, Any]:
    return {"name": name, "endpoint": f"ipc:///%/{name}", "data_parallel_size": ranks, **more}


MERGED: Final = {"endpoint": "ipc:///%/out", "layout": "merged"}
EACH: Final = {"endpoint": "ipc:///%/out", "layout": "per_source"}
FOUND: Final = {"name": "found", "discover": {"file": {"path": "%/engines.json"}}}

CASES: Final[dict[str, dict[str, Any]]] = {
    "two ranks, a topic each": {"sources": [engine(ranks=2)], "outputs": [by_topic("kv@{source}@{rank}")]},
    "a topic for each source": {"sources": [engine()], "outputs": [by_topic()]},
    "one topic for all": {"sources": [engine("c")], "outputs": [by_topic("kv@{source}", name="out")]},
    "the topic names the model": {
        "model": "m",
        "sources": [engine("b")],
        "outputs": [by_topic("kv@{source}@{model}")],
    },
    "three sources": {"sources": [engine("a"), engine("b"), engine("c", 2)], "outputs": [by_topic("{source}.{rank}")]},
    "room for one": {"sources": [engine("d")], "outputs": [by_topic()], "limits": {"max_sources": 1}},
    "merged": {"sources": [engine("b"), engine("a", 2)], "outputs": [MERGED]},
    "an output each": {"sources": [engine("a", 2), engine("b")], "outputs": [EACH]},
    "a fixed slot": {"sources": [engine("a", slot=3)], "outputs": [by_topic()]},
    "another slot": {"sources": [engine("b", slot=3), engine("a", slot=0)], "outputs": [MERGED]},
    "two outputs": {
        "sources": [engine("a"), engine("b")],
        "outputs": [by_topic(name="one"), {"name": "two", "endpoint": "ipc:///%/two", "layout": "merged"}],
    },
    "the names changed": {
        "sources": [engine("a"), engine("b")],
        "outputs": [
            {"name": "one", "endpoint": "ipc:///%/two", "layout": "merged"},
            by_topic("{source}", name="two"),
        ],
    },
    "engines are found": {"sources": [FOUND], "outputs": [by_topic()], "discovery_grace": 0},
    "engines are found, merged": {"sources": [FOUND, engine("a")], "outputs": [MERGED], "limits": {"max_sources": 2}},
    "another entry finds": {
        "sources": [{**FOUND, "name": "other", "data_parallel_size": 2}],
        "outputs": [by_topic("kv@{source}@{rank}")],
    },
}
ENGINES: Final = [
    {"name": "a", "endpoint": "tcp://127.0.0.1:9", "data_parallel_size": 2},
    {"name": "b", "endpoint": "tcp://127.0.0.1:19"},
]


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a kvbus without a state keep its seq reservations in a directory of the test."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "engines.json").write_text(json.dumps(ENGINES))


def settings_of(case: str, root: Path, *, keeps: bool) -> dict[str, Any]:
    text = json.dumps(CASES[case]).replace("ipc:///%", f"ipc://{root}").replace("%", str(root))
    return {"http": None, "state_dir": str(root / "state") if keeps else None, **json.loads(text)}


async def run(case: str, root: Path, *, keeps: bool) -> None:
    """Start a daemon with a configuration, let each source publish two blocks, and stop the daemon."""
    daemon = Daemon(load(None, env={}, overrides=settings_of(case, root, keeps=keeps)))
    await daemon.start()
    try:
        await eventually(
            lambda: all(each.engines == len(ENGINES) for each in daemon.discovery_stats), "engines are found"
        )
        await eventually(lambda: daemon.streams, "there are sources")
        for slot in daemon.streams:
            for seq in range(2):
                frames = [b"", seq.to_bytes(8, "big"), payload(store([100 * slot + seq]))]
                daemon.feed(BatchReceived(slot, frames))
    finally:
        await daemon.close(drain=0)


@pytest.mark.parametrize("keeps", [True, False], ids=["state", "no state"])
@pytest.mark.parametrize("before", CASES)
async def test_every_configuration_starts_after_every_other_configuration(
    before: str, keeps: bool, tmp_path: Path
) -> None:
    await run(before, tmp_path, keeps=keeps)
    for other in list(CASES)[list(CASES).index(before) :]:
        await run(other, tmp_path, keeps=keeps)
        await run(before, tmp_path, keeps=keeps)  # run it again, so that each pair is tried in both orders


async def test_kvbus_starts_with_a_kept_engine_that_cannot_be_dialled(tmp_path: Path) -> None:
    unfit = {"name": "c", "endpoint": "tcp://no$host:29"}  # libzmq refuses this host name
    (tmp_path / "engines.json").write_text(json.dumps([ENGINES[1], unfit]))
    config = load(None, env={}, overrides=settings_of("engines are found", tmp_path, keeps=True))
    first = Daemon(config)
    await first.start()
    try:
        await eventually(lambda: first.discovery_stats[0].changes["joined"] == 2, "both are sources")
    finally:
        await first.close(drain=0)
    second = Daemon(config)
    await second.start()
    try:
        assert {stream.label for stream in second.streams.values()} == {"b", "c"}
    finally:
        await second.close(drain=0)


@pytest.mark.parametrize(
    "kept",
    [
        {"found": [{"name": "c", "publishers": [], "where": ""}]},
        {"found": [{"name": "c", "publishers": [{"rank": 0, "endpoint": "nowhere"}], "where": ""}]},
        {"found": [{"name": "c", "where": ""}]},
        [],
    ],
    ids=["no publishers", "no endpoint", "a key is missing", "another shape"],
)
async def test_kvbus_starts_with_unreadable_kept_engines(kept: Any, tmp_path: Path) -> None:
    await run("engines are found", tmp_path, keeps=True)
    with opened(tmp_path / "state") as kept_in:
        SeqReservations(kept_in).keep("found", json.dumps(kept).encode())
    await run("engines are found", tmp_path, keeps=True)


@pytest.mark.parametrize("change", [{"forgotten": -1}, {"forgotten": 2**70}, {"slots": [["x", 0, -1]]}, {"gone": 1}])
async def test_kvbus_starts_with_unreadable_kept_slots(change: dict[str, Any], tmp_path: Path) -> None:
    await run("three sources", tmp_path, keeps=True)
    with opened(tmp_path / "state") as kept_in:
        reservations = SeqReservations(kept_in)
        slots = json.loads(there(reservations.kept("slots")))
        reservations.keep("slots", json.dumps({**slots, **change}).encode())
    await run("three sources", tmp_path, keeps=True)
