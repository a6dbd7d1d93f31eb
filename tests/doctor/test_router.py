"""Tests for ``kvbus doctor --router``, which compares an output with the requirements of a router's decoder."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.config import load
from kvbus.core.wire.profiles import PROFILES
from kvbus.tools.doctor.outputs import understood
from kvbus.tools.starting import ROUTERS, configuration


def unmet_needs(router: str, *outputs: dict[str, Any]) -> list[list[str]]:
    """Return, for each output, the requirements of the router that the output does not meet.

    If the router can read at least one output, doctor finds no problem, and the list is empty.
    """
    first = [{"name": f"out{n}", "endpoint": f"tcp://127.0.0.1:{7000 + n}", **each} for n, each in enumerate(outputs)]
    over = {"sources": [{"endpoint": "tcp://127.0.0.1:6999"}], "outputs": first, "worker": "w:1", "model": "m"}
    report = understood(load(None, env={}, overrides=over), router)
    assert [finding.id for finding in report.findings] == ["router_misreads"] * len(report.findings)
    return [finding.text.partition("it needs ")[2].split("; ") for finding in report.findings]


@pytest.mark.parametrize("router", ROUTERS)
def test_each_router_can_read_the_configuration_on_its_page(router, tmp_path):
    path = tmp_path / "kvbus.yaml"
    path.write_text(configuration(ROUTERS[router]))
    report = understood(load(path, env={}, overrides={}), router)
    assert report.findings == []
    assert report.seen[-1].text == "meets all needs"


def test_doctor_lists_the_needs_of_kthena_that_the_default_profile_lacks():
    assert unmet_needs("kthena", {}) == [
        [
            "events as arrays",
            "only stores with token ids",
            "byte hashes as integers",
            "only one group of blocks",
            "single tokens in place of EAGLE's pairs",
            "one removal for a block of several ranks",
            "removals in place of a clear of one rank",
            "the topic kv-events",
        ]
    ]


def test_one_suitable_output_is_enough_for_a_router():
    assert unmet_needs("kthena", {}, {"profile": "kthena"}) == []


def test_the_keys_of_an_output_change_the_needs_that_it_meets():
    (found,) = unmet_needs("kthena", {"profile": "aibrix", "topic": "kv-events"})
    assert "the topic kv-events" not in found
    (found,) = unmet_needs("llm-d", {"topic": "kv@{worker}@{model}"})
    assert "topics of the form kv@POD@MODEL" not in found
    assert "replay messages of three frames" not in unmet_needs("sglang", {"replay_framing": 3})[0]
    assert "only stores with token ids" in unmet_needs("smg", {"token_ids": "drop"})[0]


def test_a_router_that_reads_arrays_and_maps_needs_no_maps():
    (found,) = unmet_needs("dynamo", {"profile": "aibrix"})
    assert "events as maps" not in found
    (found,) = unmet_needs("vllm-router", {"profile": "aibrix"})
    assert "events as maps" in found


def test_an_output_with_a_smaller_batch_limit_meets_a_larger_limit():
    assert not any("bytes" in each for each in unmet_needs("vllm-router", {"profile": "smg"})[0])
    assert "at most 4,194,304 bytes in a batch" in unmet_needs("smg", {"profile": "vllm-router"})[0]


def test_doctor_reports_a_router_that_needs_a_connection_for_each_stream():
    topics = {"layout": "per_topic", "topic": "kv@{source}@m", "profile": "vllm"}
    assert "a connection for each stream" in unmet_needs("kthena", topics)[0]


@pytest.mark.parametrize("router", [name for name in PROFILES if name != "dynamo-plane"])
def test_every_profile_meets_its_own_needs(router):
    output = {"profile": router}
    if PROFILES[router].topics == "pod and model":
        output["topic"] = "kv@{worker}@{model}"
    assert unmet_needs(router, output) == []


def test_doctor_with_router_prints_the_needs_that_an_output_lacks():
    sockets = ["--source", "tcp://127.0.0.1:1", "--output", "tcp://127.0.0.1:2", "--set", "http=null"]
    result = CliRunner().invoke(main, ["doctor", *sockets, "--router", "kthena", "--timeout", "0.2"])
    assert "kthena misreads what this output sends: it needs events as arrays; " in result.output
    assert "outputs kthena: events as arrays; " in result.output
    assert result.exit_code == 1


def test_doctor_with_router_requires_a_configuration():
    result = CliRunner().invoke(main, ["doctor", "--http", "http://127.0.0.1:1", "--router", "kthena"])
    assert result.exit_code == 2
    assert "--router needs the configuration" in result.output
