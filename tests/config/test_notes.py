"""Tests for the notes that ``kvbus check`` prints about a valid configuration."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.config import load
from kvbus.config.notes import notes

RANKS = "sources: [{endpoint: 'ipc:///e-{rank}', data_parallel_size: 2}]\n"


@pytest.mark.parametrize(
    ("output", "noted"),
    [
        ("{endpoint: 'tcp://*:5657', profile: aibrix}", True),
        ("{endpoint: 'tcp://*:5657', profile: llm-d, topic: 'kv@{worker}@m'}", True),
        ("{endpoint: 'tcp://*:5657', profile: llm-d-sglang, topic: 'kv@{worker}@m'}", True),
        ("{endpoint: 'tcp://*:5657', profile: llm-d, topic: 'kv@{worker}-{rank}@m'}", False),
        ("{endpoint: 'tcp://*:5657', profile: aibrix, layout: merged}", False),
        ("{endpoint: 'tcp://*:5657', profile: vllm}", False),
    ],
)
def test_check_notes_ranks_with_separate_connections(tmp_path, output, noted):
    path = tmp_path / "kvbus.yaml"
    path.write_text(f"{RANKS}outputs: [{output}]")
    found = notes(load(path, env={}, overrides={}))
    assert bool(found) == noted
    done = CliRunner().invoke(main, ["check", "-c", str(path)])
    assert done.exit_code == 0
    assert ("note: outputs[0]: " in done.stderr) == noted
    assert "note" not in done.stdout


def test_check_has_no_note_for_one_rank_or_separate_topics(tmp_path):
    path = tmp_path / "kvbus.yaml"
    path.write_text(
        "sources: [{topic: kv@a@m}]\noutputs: [{endpoint: 'tcp://*:5657', profile: llm-d}, {name: b, profile: aibrix, endpoint: 'ipc:///b'}]"
    )
    assert notes(load(path, env={}, overrides={})) == []
    path.write_text(
        "sources: [{name: a, topic: kv@a@m}, {name: b, endpoint: 'ipc:///b', topic: kv@b@m}]\n"
        "outputs: [{endpoint: 'tcp://*:5657', profile: llm-d}]"
    )
    assert notes(load(path, env={}, overrides={})) == []


@pytest.mark.parametrize(
    ("keys", "noted"),
    [
        ("{}", ""),
        ("{replay_endpoint: 'tcp://*:5558'}", ""),
        (
            "{engine_replay_endpoint: 'tcp://127.0.0.1:5658'}",
            "without replay_endpoint, or give the router kvbus's replay",
        ),
        (
            "{engine_replay_endpoint: 'tcp://127.0.0.1:5658', replay_endpoint: 'tcp://*:5558'}",
            "without replay_endpoint, or give the router tcp://*:5558",
        ),
    ],
)
def test_check_notes_that_the_replay_of_an_interposed_engine_has_other_seqs(tmp_path, keys, noted):
    path = tmp_path / "kvbus.yaml"
    path.write_text(f"interpose: {keys}")
    found = notes(load(path, env={}, overrides={}))
    assert len(found) == bool(noted)
    assert noted in "".join(found)
