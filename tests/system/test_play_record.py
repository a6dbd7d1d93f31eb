"""Tests for ``kvbus play`` and ``kvbus record`` as a user runs them: processes, signals, and exit codes."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections import Counter
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbus.tools.capture.format import read_capture
from tests.ports import free_port
from tests.typed import there

DATA = Path(__file__).parents[1] / "wire" / "data"


class Command:
    """A running ``kvbus`` command, with methods that wait for its messages."""

    def __init__(self, *args, **options):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvbus", *map(str, args)],
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            **options,
        )
        self.said = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def until(self, text):
        for line in there(self.process.stderr):
            self.said += line
            if text in line:
                return line
        raise AssertionError(f"never said {text!r}: {self.said}")

    def end(self, number=None, timeout=60):
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(timeout)
        self.said += there(self.process.stderr).read()
        return code


def run(*args):
    """Run a ``kvbus`` command to its end. Return its exit code and what it wrote to its standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "kvbus", *map(str, args)], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr


def messages(path):
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [(line["topic"], line["seq"], line["payload"]) for line in lines]


@pytest.fixture
def ipc(tmp_path):
    return f"ipc://{tmp_path}/live"


@pytest.mark.parametrize("name", ["vllm033_restart", "vllm033_map_extras", "sglang0510_positional"])
def test_the_recorder_records_every_played_message(name, tmp_path, ipc):
    source = DATA / f"{name}.jsonl"
    want = messages(source)
    epochs = 1 + sum(after[1] < before[1] for before, after in pairwise(want))
    copy = tmp_path / "copy.jsonl"
    with (
        Command("record", ipc, copy, "--count", len(want)) as recorder,
        Command("play", source, "--endpoint", ipc, "--rate", 2000, "--subscribers", 1, "--exit-after", 0) as player,
    ):
        assert player.end() == 0
        assert recorder.end() == 0
    assert messages(copy) == want
    assert f"published {len(want)} batches in {epochs} epoch" in player.said
    assert f"recorded {len(want)} messages" in recorder.said


def test_an_engine_that_dials_in_is_recorded_by_a_binding_recorder(tmp_path):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    copy = tmp_path / "copy.jsonl"
    source = DATA / "syn_vllm090_positional.jsonl"
    with (
        Command("record", endpoint, copy, "--bind", "--count", 300) as recorder,
        Command(
            "play", source, "--endpoint", endpoint, "--subscribers", 1, "--exit-after", 0, "--rate", 5000
        ) as player,
    ):
        player.until("connecting, as vLLM does")
        assert player.end() == 0
        assert recorder.end() == 0
    assert messages(copy) == messages(source)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_recording_immediately_with_a_complete_file(number, tmp_path, ipc):
    copy = tmp_path / "copy.jsonl"
    source = DATA / "vllm033_map_int.jsonl"
    with (
        Command("play", source, "--endpoint", ipc, "--subscribers", 1, "--rate", 300, "--loop"),
        Command("record", ipc, copy) as recorder,
    ):
        recorder.until("recording")
        while not copy.exists() or copy.stat().st_size < 10_000:
            os.sched_yield()
        assert recorder.end(number) == 0
    got = messages(copy)
    assert got == list(islice(cycle(messages(source)), len(got)))
    assert copy.read_bytes().endswith(b"\n")


def test_a_player_at_its_end_serves_replay_until_a_signal(tmp_path, ipc):
    source = DATA / "syn_vllm090_positional.jsonl"
    with Command("play", source, "--endpoint", ipc, "--replay-endpoint", f"{ipc}-replay", "--rate", 1e5) as player:
        player.until("serving replay until Ctrl-C")
        assert player.end(signal.SIGINT) == 0
        assert "published 300 batches" in player.said


def test_the_player_counts_and_repeats_faults_of_a_seed(ipc):
    source = DATA / "syn_vllm090_positional.jsonl"
    faults = ["--drop", 0.1, "--duplicate", 0.1, "--swap", 0.1, "--hole", 0.1, "--seed", 3]
    said = [run("play", source, "--endpoint", ipc, "--rate", 1e5, "--exit-after", 0, *faults) for _ in range(2)]
    assert said[0] == said[1]
    code, text = said[0]
    assert code == 0
    assert all(word in text for word in ("dropped", "duplicated", "swapped", "holes"))


def test_the_truth_file_of_sim_matches_the_recorded_blocks(tmp_path, ipc):
    copy, truth = tmp_path / "copy.jsonl", tmp_path / "truth.json"
    sim = ["sim", "--dialect", "vllm-0.33", "--rate", 1e5, "--blocks", 300, "--requests", 60]
    sim += ["--exit-after", 0, "--truth-file", truth]
    code, said = run(*sim, "--endpoint", f"{ipc}-alone")
    assert code == 0, said
    alone = json.loads(truth.read_text())
    (count,) = alone["next_seq"]
    with (
        Command("record", ipc, copy, "--count", count) as recorder,
        Command(*sim, "--endpoint", ipc, "--subscribers", 1) as engine,
    ):
        assert engine.end() == 0
        assert recorder.end() == 0
    want = json.loads(truth.read_text())
    assert want == alone  # the same seed gives the same cache
    live = Counter[Any]()
    for message in read_capture(copy):
        for event in msgspec.msgpack.decode(message.payload)[1]:
            assert event["type"] != "AllBlocksCleared"
            for value in event["block_hashes"]:
                live[value] += 1 if event["type"] == "BlockStored" else -1
    assert +live == Counter({block["hash"]: block["copies"] for block in want["blocks"]})


def test_each_simulated_rank_has_its_own_port_and_restarts(tmp_path):
    with Command(
        *("sim", "--endpoint", "tcp://127.0.0.1:*", "--replay-endpoint", "tcp://127.0.0.1:*", "--ranks", 2),
        *("--rate", 200, "--seconds", 1, "--restart-every", 0.3, "--dialect", "sglang-0.5.23"),
    ) as engine:
        assert engine.end() == 0
    bound = [line.split()[-1] for line in engine.said.splitlines() if "publishing on" in line]
    assert len(set(bound)) == 2
    assert engine.said.count("replay on tcp://127.0.0.1:") == 2


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["play", "missing.jsonl"], 78, "missing.jsonl:1: No such file"),
        (["play", "bad.jsonl", "--endpoint", "tcp://127.0.0.1:*", "--bind"], 78, "bad.jsonl:2: not a recorded message"),
        (["play", "good.jsonl", "--rate", 5, "--speed", 1], 2, "exclude each other"),
        (["play", "good.jsonl", "--drop", 1.5], 2, "not in the range"),
        (["play", "good.jsonl", "--endpoint", "nonsense", "--bind"], 2, "for example --endpoint 'tcp://*:5557'"),
        (["play", "good.jsonl", "--endpoint", "TAKEN", "--bind"], 69, "cannot listen on tcp://127.0.0.1:"),
        (["record", "nonsense", "x.jsonl"], 2, "for example tcp://127.0.0.1:5557"),
        (["record", "TAKEN", "x.jsonl", "--bind"], 69, "cannot listen on"),
        (["record", "tcp://127.0.0.1:1", "no/such/dir.jsonl"], 78, "no/such/dir.jsonl: No such file"),
        (["sim", "--dialect", "vllm-9"], 2, "vllm-9"),
        (["sim", "--dialect", "vllm-0.9.0", "--tier", "CPU=4"], 2, "has no medium for tier CPU"),
        (["sim", "--tier", "GPU=4"], 2, "CPU=4000"),
        (["sim", "--trace", "bad.jsonl"], 78, "bad.jsonl:1: not a trace request"),
        (["sim", "--endpoint", "TAKEN", "--bind"], 69, "cannot listen on"),
        (["sim", "--truth-file", "no/such/truth.json"], 78, "truth.json: no such directory"),
        (["sim", "--endpoint", "nonsense"], 2, "for example --endpoint"),
    ],
)
def test_errors_of_play_record_and_sim_have_a_message_and_an_exit_code(args, code, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = '{"t": 0, "topic": "", "seq": 0, "payload": "kA=="}\n'
    Path("good.jsonl").write_text(good)
    Path("bad.jsonl").write_text(good + '{"t": 0}\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        got, said = run(*(endpoint if arg == "TAKEN" else arg for arg in args))
    assert (got, message in said) == (code, True), said
    assert "Traceback" not in said


def test_an_existing_recording_is_replaced_only_with_force(tmp_path, ipc):
    copy = tmp_path / "copy.jsonl"
    copy.write_text("kept")
    code, said = run("record", ipc, copy)
    assert (code, copy.read_text()) == (78, "kept")
    assert f"{copy} exists already; --force replaces it" in said
    with Command("record", ipc, copy, "--force") as recorder:
        recorder.until("recording")
        recorder.end(signal.SIGINT)
    assert copy.read_text() == ""
    assert copy.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("answer", ["n", "y"])
def test_on_a_terminal_kvbus_asks_before_it_replaces_a_recording(answer, tmp_path, ipc):
    copy = tmp_path / "copy.jsonl"
    copy.write_text("kept")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvbus", "record", ipc, str(copy), "--seconds", "0.1"]
    with subprocess.Popen(command, stdin=theirs, stderr=subprocess.PIPE, text=True) as process:
        os.write(ours, f"{answer}\n".encode())
        _, said = process.communicate(timeout=60)
    assert f"{copy} exists already. Replace it?" in said
    assert copy.read_text() == ("kept" if answer == "n" else "")
