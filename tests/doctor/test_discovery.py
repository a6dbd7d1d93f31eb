"""Tests for `kvbus doctor` with sources that are discovered.

Some engines are found, some are not, and some requests fail.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvbus.config import load
from kvbus.tools.doctor.examine import examine
from tests.discovery.fleet import Worker, write
from tests.ports import free_port, free_ports


@pytest.fixture
def file(tmp_path):
    return tmp_path / "engines.json"


async def findings_of(file: Any, *before: dict[str, Any], **limits: int) -> tuple[dict[str, str], list[str]]:
    live, replay = free_ports(2)
    entry = {"name": "workers", "discover": {"file": {"path": str(file)}}}
    output = {"endpoint": f"tcp://127.0.0.1:{live}", "replay_endpoint": f"tcp://127.0.0.1:{replay}", "layout": "merged"}
    overrides = {"sources": [entry, *before], "outputs": [output], "http": None, "state_dir": None, "limits": limits}
    report = await examine(load(None, env={}, overrides=overrides), timeout=1.0)
    findings = {finding.key: str(finding) for finding in report.findings if finding.key.startswith("sources")}
    return findings, [str(seen) for seen in report.seen]


async def test_doctor_probes_discovered_engines(file):
    """Doctor also probes discovered engines.

    A finding names the entry of `sources` in the configuration file (`sources[1]`). The number of engines that an
    earlier entry discovers does not change it.
    """
    one = Worker("pod-1", 1)
    await one.start()
    nobody, other = free_ports(2)
    write(file, [one.entry, {"name": "pod-2", "endpoint": f"tcp://127.0.0.1:{nobody}"}])
    fixed = {"name": "fixed", "endpoint": f"tcp://127.0.0.1:{other}"}
    findings, seen = await findings_of(file, fixed)
    assert any(line.startswith("sources[0].discover workers: finds pod-1, pod-2") for line in seen)
    assert str(nobody) in findings["sources[0].endpoint"]
    assert str(other) in findings["sources[1].endpoint"]
    await one.stop()


async def test_doctor_reports_a_failing_discovery_with_the_cause(file):
    findings, _ = await findings_of(file)
    assert "workers gets no list of engines" in findings["sources[0].discover"]
    assert "No such file" in findings["sources[0].discover"]


async def test_doctor_reports_a_discovery_that_lists_no_engine(file):
    write(file, [])
    findings, _ = await findings_of(file)
    said_first = 'no engine is found: the discovery "workers" lists no engine ['
    assert findings["sources[0].discover"].startswith(said_first)


async def test_doctor_reports_an_invalid_entry_beside_a_valid_one(file):
    good, bad = ({"name": f"pod-{n}", "endpoint": f"tcp://127.0.0.1:{free_port()}"} for n in (1, 2))
    write(file, [good, bad | {"data_parallel_size": "auto"}])
    findings, seen = await findings_of(file)
    assert findings["sources[0].discover, pod-2"].startswith(
        "the discovery workers finds pod-2 with an invalid value: [1].data_parallel_size = 'auto': must be a whole "
        "number; for example 1 ["
    )
    assert any(line.startswith("sources[0].endpoint pod-1: ") or "pod-1" in line for line in seen)


async def test_doctor_reports_an_engine_beyond_max_sources(file):
    write(file, [{"name": f"pod-{n}", "endpoint": f"tcp://127.0.0.1:{free_port()}"} for n in (1, 2)])
    findings, _ = await findings_of(file, max_sources=1)
    assert findings["sources[0].discover"].startswith(
        "kvbus does not read 1 of the discovered engines (reason max_sources) ["
    )
    assert findings["sources[0].discover"].endswith("raise limits.max_sources; one of the left-out engines is pod-2")
