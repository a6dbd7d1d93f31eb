"""Tests that docs/spec/recordings.md and ``kvbus conform`` have the same verdicts about recordings of real engines."""

from __future__ import annotations

import json

from click.testing import CliRunner

from kvbus.cli import main
from tests.conform.recordings import FILED, PAGE, found, page
from tests.wire.captures import DATA


def test_the_page_has_the_verdicts_about_each_recorded_stream():
    captures = found()
    assert json.loads(FILED.read_text()) == captures, "python -m tests.conform.recordings"
    assert PAGE.read_text() == page(captures)


def test_conform_engine_judges_a_recorded_file():
    done = CliRunner().invoke(main, ["conform", "engine", str(DATA / "vllm0110_positional_bytes.jsonl"), "--json"])
    assert done.exit_code == 1, done.output
    verdicts = {each["clause"]: each for each in json.loads(done.stdout)["verdicts"]}
    assert verdicts["6.2"]["outcome"] == "broken"
    assert bytes.fromhex(verdicts["6.2"]["evidence"][0]["hex"])[1:13] == b"\xabBlockStored"
    assert verdicts["4.2"]["outcome"] == "not seen"


def test_conform_engine_cannot_judge_an_empty_file(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    done = CliRunner().invoke(main, ["conform", "engine", str(empty)])
    assert done.exit_code == 69


def test_conform_engine_with_strict_fails_on_a_broken_should(tmp_path):
    file = str(DATA / "syn_sglang0523_tiers_disk.jsonl")  # this stream breaks only the SHOULD of clause 11.3
    assert CliRunner().invoke(main, ["conform", "engine", file]).exit_code == 0
    assert CliRunner().invoke(main, ["conform", "engine", file, "--strict"]).exit_code == 1
