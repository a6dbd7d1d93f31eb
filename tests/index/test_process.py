"""Tests for `kvbus index` with real buses and engines: exact answers, and refused configurations."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial

import pytest

from kvbus.common.errors import ConfigError
from kvbus.http.credentials import line_of, new_token
from kvbus.index.access import IndexAccess
from tests.doubles.bus import wait_for
from tests.index.programs import Bus, Engine, Index, Truth, http, running, tokens_of
from tests.security.certificates import Authority
from tests.security.keys import Pair


def check(index: Index, truth: Truth, name: str) -> None:
    """Check that the index gives the exact answer for every prompt of an engine."""
    chains = truth.chains()
    assert len(chains) > 5
    results = index.ask(queries=[{"tokens": tokens_of(chain)} for chain in chains])["results"]
    for chain, result in zip(chains, results, strict=True):
        found = {
            match["rank"]: (match["blocks"], match["tiers"])
            for match in result["matches"]
            if match["source"] == name or match["source"].startswith(f"{name}/")
        }
        assert found == truth.expected(chain)
        best = result["matches"][0]
        assert best["tokens"] == best["blocks"] * best["block_size"] == len(tokens_of(chain))
    assert index.matches(tokens=[1, 2, 3] * 100) == []


def test_an_index_is_exact_after_restarts_of_the_bus_and_of_itself(tmp_path):
    engine = Engine(tmp_path, "engine")
    bus = Bus(tmp_path, "pod-a", engine)
    index = Index(tmp_path, bus.http)
    truth = engine.truth()
    with running(engine, bus, index):
        wait_for(lambda: bus.has(truth), "the bus knows every block")
        wait_for(lambda: index.complete("engine"), "the index is complete")
        check(index, truth, "engine")
        (best, *_) = index.matches(tokens=tokens_of(truth.chains()[0]))
        assert (best["source"], best["worker"], best["state"]) == ("engine", "pod-a", "live")

        assert bus.end() == 0
        wait_for(lambda: index.ask(tokens=[1])["incomplete"], "the index notices")
        (best, *_) = index.matches(tokens=tokens_of(truth.chains()[0]))
        assert best["state"] in {"unknown", "unreachable"}  # the source is gone, but its engine still holds the blocks
        bus.start()
        wait_for(lambda: bus.has(truth), "the bus knows every block again")
        wait_for(lambda: index.complete("engine"), "the index is complete again")
        check(index, truth, "engine")

        assert index.end(signal.SIGINT) == 0
        index.start()
        wait_for(lambda: index.complete("engine"), "the new index is complete")
        check(index, truth, "engine")
        assert index.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("layout", ["per_source", "merged", "per_topic"])
def test_an_index_reads_each_output_layout_and_its_source_names(tmp_path, layout):
    engine = Engine(tmp_path, "engine", ranks=2)
    topic = ", topic: 'kv@{source}-{rank}@{model}'" if layout == "per_topic" else ""
    bus = Bus(tmp_path, "pod-a", engine, output=f", layout: {layout}{topic}")
    index = Index(tmp_path, bus.http)
    truth = engine.truth()
    with running(engine, bus, index):
        wait_for(lambda: bus.has(truth), "the bus knows every block")
        wait_for(lambda: index.complete("engine/0"), "the index is complete")
        check(index, truth, "engine")


def test_an_index_follows_two_buses_and_an_engine(tmp_path):
    engines = [Engine(tmp_path, f"engine-{number}", seed=number) for number in range(3)]
    buses = [Bus(tmp_path, f"pod-{number}", engines[number]) for number in range(2)]
    index = Index(tmp_path, *(bus.http for bus in buses), f"engine-2={engines[2].endpoint},{engines[2].replay}")
    truths = [engine.truth() for engine in engines]
    with running(*engines, *buses, index):
        for bus, truth in zip(buses, truths, strict=False):
            wait_for(partial(bus.has, truth), "the bus knows every block")
        wait_for(lambda: index.complete("engine-0", "engine-1", "engine-2"), "the index is complete")
        for number in range(2):
            check(index, truths[number], f"engine-{number}")
            workers = {each["worker"] for each in index.matches(tokens=tokens_of(truths[number].chains()[0]))}
            assert f"pod-{number}" in workers
        check(index, truths[2], "engine-2")


def test_an_index_marks_answers_as_incomplete_if_its_bus_is_partial(tmp_path):
    engine = Engine(tmp_path, "engine", "--buffer-steps", "5")
    bus = Bus(tmp_path, "pod-a", engine)
    index = Index(tmp_path, bus.http)
    with running(engine):
        wait_for(lambda: "until Ctrl-C" in engine.said, "the engine has published its whole workload")
        with running(bus, index):
            wait_for(lambda: bus.sources() and bus.sources()[0]["partial"], "the bus is partial")
            (source,) = wait_for(lambda: index.ready() and index.ask(tokens=[1])["incomplete"], "named")
            expected = {"source": "engine", "rank": 0, "worker": "pod-a", "state": "live", "partial": True}
            wait_for(lambda: index.ask(tokens=[1])["incomplete"] == [expected], f"partial, not {source}")
            assert (
                b'kvbus_index_partial{rank="0",source="engine",worker="pod-a"} 1.0' in http(f"{index.http}/metrics")[1]
            )


@pytest.mark.parametrize("layout", ["per_source", "merged"])
def test_an_index_sees_only_the_sources_that_its_key_may_read(tmp_path, layout):
    engines = [Engine(tmp_path, f"engine-{number}", seed=number) for number in range(2)]
    server, key = Pair(tmp_path, "kvbus"), Pair(tmp_path, "team-a")
    listed = tmp_path / "routers.keys"
    listed.write_text(f"{key.public.decode()} team-a sources=engine-0\n")
    curve = f", curve_secret_key_file: {server.secret_file}, curve_client_keys: {listed}, layout: {layout}"
    bus = Bus(tmp_path, "pod-a", *engines, output=curve)
    without = Index(tmp_path, bus.http, name="without")
    keys = "--curve-secret-key", str(key.secret_file), "--curve-server-key", str(server.public_file)
    index = Index(tmp_path, bus.http, *keys)
    truths = [engine.truth() for engine in engines]
    with running(*engines, bus):
        wait_for(lambda: bus.has(*truths), "the bus knows every block")
        with running(without):
            assert without.ended() == 78
            assert "requires CURVE: give --curve-secret-key" in without.said
        with running(index):
            wait_for(lambda: index.complete("engine-0"), "the index is complete")
            check(index, truths[0], "engine-0")
            questions = [{"tokens": tokens_of(chain)} for truth in truths for chain in truth.chains()]
            results = index.ask(queries=questions)["results"]
            assert {match["source"] for result in results for match in result["matches"]} == {"engine-0"}


def test_an_index_reads_changed_tls_and_token_files_again(tmp_path):
    authority = Authority(tmp_path)
    issued = authority.issue("index")
    token, file = new_token(), tmp_path / "tokens"
    file.write_text("# nobody\n")
    access = IndexAccess(file, issued.certificate, issued.key)
    before = access.context()
    assert access.read() == []
    file.write_text(f"{line_of('r', token, content=True)}\nnonsense\n")
    issued.certificate.write_text("nonsense")
    assert [problem.key for problem in access.read()] == ["--tokens-file", "--tls-certificate"]
    file.write_text(f"{line_of('r', token, content=True)}\n")
    authority.issue("index")
    assert access.read() == []
    assert access.context() not in {None, before}

    index = Index(
        tmp_path, "tcp://127.0.0.1:1", "--tls-certificate", str(issued.certificate), "--tls-key", str(issued.key)
    )
    with running(index):
        wait_for(lambda: "answers at https://" in index.said, "it listens")
        at = "--http", index.http.replace("http://", "https://"), "--http-ca", str(authority.certificate)
        command = [sys.executable, "-m", "kvbus", "query", *at, "--hashes", "1", "--json"]
        answer = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=100).stdout)
        assert answer["results"] == [{"matches": []}]
    with pytest.raises(ConfigError, match="--tokens-file"):
        IndexAccess(tmp_path / "missing")


def test_an_index_refuses_an_output_without_token_ids(tmp_path):
    engine = Engine(tmp_path, "engine")
    bus = Bus(tmp_path, "pod-a", engine, output=", token_ids: drop")
    index = Index(tmp_path, bus.http)
    with running(engine, bus):
        wait_for(bus.sources, "the bus answers")
        with running(index):
            assert index.ended() == 78
            assert "output out has no token ids (token_ids: drop), so the index cannot find prompts" in index.said
        direct = Index(tmp_path, f"bus={bus.out},{bus.out_replay}", name="direct")
        with running(direct):
            wait_for(lambda: "bus sends no token ids" in direct.said, "it says so")
            (source,) = direct.ask(tokens=[1])["incomplete"]
            assert (source["source"], source["state"]) == ("bus", "no_tokens")


def test_an_index_without_a_free_port_or_a_source_ends_with_an_error(tmp_path):
    first = Index(tmp_path, "tcp://127.0.0.1:1")
    with running(first):
        wait_for(lambda: http(f"{first.http}/livez")[0] == 200, "it listens")
        second = Index(tmp_path, "tcp://127.0.0.1:1", "--listen", first.http.removeprefix("http://"), name="second")
        with running(second):
            assert second.ended() == 69
            assert "cannot listen on http 127.0.0.1" in second.said
    for args, why in (
        ((), "or --log"),
        (("nonsense",), "such as tcp://"),
        (("a=",), "nor [NAME=]"),
    ):
        wrong = Index(tmp_path, *args, name="wrong")
        with running(wrong):
            assert wrong.ended() == 2
        assert why in wrong.said


def test_an_index_whose_bus_was_never_reached_is_not_ready(tmp_path):
    engine = Engine(tmp_path, "engine")
    bus = Bus(tmp_path, "pod-a", engine)
    index = Index(tmp_path, bus.http)
    with running(engine, index):
        awaited = f"no answer so far from {bus.http}"
        wait_for(lambda: awaited.encode() in http(f"{index.http}/readyz")[1], "it says what it waits for")
        assert not index.ready()
        with running(bus):
            wait_for(index.ready, "the bus answers")
        assert index.ready(), "it has a state to answer from"
