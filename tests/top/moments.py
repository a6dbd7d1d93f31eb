"""States of a bus for tests of ``kvbus top``, built from answers as the bus would send them over HTTP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvbus.core.findings.finding import Reported, Severity
from kvbus.tools.top.moment import Moment, Output


def source(name: str, batches: int = 100, **changes: Any) -> dict[str, Any]:
    counts = {"batches": batches, "missing": 0, "recovered": 0, "lost": 0, "rejected": {}} | changes.pop("counts", {})
    return {
        "name": name,
        "endpoint": "tcp://127.0.0.1:5557",
        "state": "live",
        "partial": False,
        "dialect": "vllm-0.30..0.33",
        "blocks": {"GPU": 400},
        "queue_depth": 0,
        "epoch": 0,
        "counts": counts,
        **changes,
    }


def router(peer: str, **changes: Any) -> dict[str, Any]:
    return {
        "output": "routers",
        "stream": 0,
        "peer": peer,
        "name": "",
        "topics": [""],
        "state": "live",
        "state_sent": {"count": 1},
        "queued": 0,
        "behind_seconds": 0.0,
        "dropped": {"batches": 0},
        "left": None,
        **changes,
    }


def finding(text: str, key: str, remedy: str, **subject: Any) -> Reported:
    return Reported("some_id", Severity.PROBLEM, text, key, remedy, "", **subject)


def output(name: str = "routers", batches: float = 100, **changes: Any) -> Output:
    made = Output(name, routers=2, batches=batches, bytes=9e4, queued=0, behind=0, dropped=0, replays=0, states=2)
    return replace(made, **changes)


def moment(at: float, *sources: dict[str, Any], **changes: Any) -> Moment:
    made = Moment(
        at=at,
        sources=list(sources) or [source("engine", int(10 * at))],
        routers=[router("10.0.0.1:4711"), router("10.0.0.2:4711")],
        findings=[],
        outputs=[output(batches=20 * at)],
        reasons={},
        version="1.2.3",
        started=1000.0,
        age=3600.0 + at,
        memory=6e7,
    )
    return replace(made, **changes)
