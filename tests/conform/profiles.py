"""Judge kvbus by the specification as the publisher of its routers, with each profile.

The results go to docs/spec/profiles.md. Run it with ``python -m tests.conform.profiles``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import zmq

from kvbus.core.wire.profiles import PROFILES
from kvbus.tools.capture.format import Message
from kvbus.tools.conform.engine.probes import Target
from kvbus.tools.conform.engine.watch import Watch
from kvbus.tools.conform.report import Level, Outcome, Report
from kvbus.tools.conform.vectors import pack, stored
from kvbus.transport.curve import Curve
from kvbus.transport.engine.publisher import EnginePublisher
from tests.conform.results import store
from tests.doubles.bus import PATIENCE, eventually, running_bus
from tests.ports import free_port, free_ports
from tests.wire.captures import load

PAGE: Final = Path(__file__).parents[2] / "docs" / "spec" / "profiles.md"
SPOKEN: Final = [name for name in PROFILES if name != "dynamo-plane"]
"""The profiles of ZeroMQ outputs. The profile dynamo-plane uses another transport."""

CAPTURE: Final = "vllm033_map_bytes"
BLOCKS: Final = 5_000
"""Number of the engine's blocks. It is more than one batch of a state may have."""

_HEAD: Final = """# What each profile breaks on purpose

This page shows which clauses of [the standard](kv-events.md) kvbus's own outputs break. A profile breaks a clause if its
routers cannot read the form that the standard requires ([why](../decisions/profiles-of-routers.md)). `kvbus conform engine`
judged an output of each profile, while kvbus read a recording of vLLM 0.33. The outputs kept all other clauses, or the run did
not show whether they do. `python -m tests.conform.profiles` writes this page.

Some settings of an output break further clauses. `layout: merged` breaks 1.2 and 10.1, because several ranks share one stream.
`on_subscribe: nothing` breaks 5.1. It also breaks 11.3 for a stream that begins at seq 0: kvbus then knows of no earlier process
whose blocks routers may hold, and sends no clear. `token_ids: drop` breaks no clause, because 14.2 allows it.

| profile | clauses of which it breaks a MUST | clauses of which it breaks a SHOULD |
|---|---|---|
"""


def output(name: str, ports: Sequence[int]) -> dict[str, Any]:
    topic = {"topic": "kv@pod@model"} if PROFILES[name].topics == "pod and model" else {}
    live, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    return {"name": name, "endpoint": live, "replay_endpoint": replay, "profile": name, "heartbeat": 1.0, **topic}


async def judged(capture: str, *, seconds: float = 3.0) -> dict[str, Report]:
    """Judge a bus that has an output for each profile, and return the reports by profile.

    The engine publishes half of a capture before the watch begins, and the other half during the watch.
    """
    ports = free_ports(2 * len(SPOKEN))
    outputs = [output(name, ports[2 * at : 2 * at + 2]) for at, name in enumerate(SPOKEN)]
    messages: list[Message] = load(capture)
    half = len(messages) // 2
    async with (
        running_bus(outputs=outputs) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        for message in messages[:half]:
            engine.publish(message.payload)
        await eventually(lambda: bus.caught_up(half - 1), "the bus has taken the first half")
        watches = {
            each["name"]: Watch(Target(each["endpoint"], each["replay_endpoint"], seconds=seconds)) for each in outputs
        }
        running = asyncio.gather(*(each.run() for each in watches.values()))
        await eventually(lambda: all(each.connected for each in watches.values()), "all are connected")
        for message in messages[half:]:
            engine.publish(message.payload)
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE):
            await running
    return {name: watch.report() for name, watch in watches.items()}


async def of_states(directory: Path) -> Report:
    """Judge kvbus by the clauses of the standard that need states of several batches, snapshots or CURVE.

    The streams of the profiles have none of these.
    """
    (server, server_secret), (client, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    (directory / "server").write_bytes(server_secret + b"\n")
    (directory / "server").chmod(0o600)
    (directory / "clients").write_bytes(client + b" kit\n")
    snapshot = f"tcp://127.0.0.1:{free_port()}"
    output = {
        "snapshot_endpoint": snapshot,
        "curve_secret_key_file": str(directory / "server"),
        "curve_client_keys": str(directory / "clients"),
    }
    async with (
        running_bus(output=output) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        for first in range(1, BLOCKS, 500):
            engine.publish(pack([1.5, [stored(each) for each in range(first, first + 500)], 0]))
        await eventually(lambda: bus.caught_up(engine.next_seq - 1), "the bus has all blocks")
        curve = Curve(client, client_secret, server)
        watch = Watch(Target(bus.out, bus.out_replay, snapshot, curve=curve, seconds=0.5))
        async with asyncio.timeout(PATIENCE):
            await watch.run()
    return watch.report()


def filed(vllm: Report, states: Report) -> Report:
    """Return the report of the profile `vllm` with the missing verdicts filled in from the report `states`.

    A verdict is missing for a clause of the specification for which the run of the profile had no occasion. The report
    `states` is the result of :func:`of_states`.
    """
    more = {each.clause: each for each in states.verdicts}
    verdicts = [more[each.clause] if each.outcome is Outcome.NOT_SEEN else each for each in vllm.verdicts]
    return replace(vllm, verdicts=verdicts)


def page(reports: dict[str, Report]) -> str:
    """Return the text of docs/spec/profiles.md for these reports."""

    def broken(report: Report, level: Level) -> str:
        found = [each for each in report.ordered if each.outcome is Outcome.BROKEN and each.level is level]
        return ", ".join(f"{each.clause} {each.clause.title}" for each in found) or "none"

    rows = (
        f"| `{name}` | {broken(each, Level.MUST)} | {broken(each, Level.SHOULD)} |" for name, each in reports.items()
    )
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    profiles = asyncio.run(judged(CAPTURE))
    PAGE.write_text(page(profiles))
    with TemporaryDirectory() as directory:
        states = asyncio.run(of_states(Path(directory)))
    how = f"its outputs, behind an engine that publishes `{CAPTURE}`; a state of 5,000 blocks, snapshots and CURVE"
    store("engines/kvbus", "kvbus", how, filed(profiles["vllm"], states).without_bytes().to_json())
