"""Tests for the vectors of docs/spec/log: kvbus reads, follows and writes as the files of the vectors say."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvbus.parts.log.record import Kind, Stream, read, write
from tests.log.reading import Reading
from tests.log.vectors import DIRECTORY, FIELDS, LOGS, REFUSED, files, text_of


def steps(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DIRECTORY / f"{name}.json").read_text())["steps"]
    return found


def test_the_files_of_the_vectors_are_up_to_date():
    found = {path.stem: path.read_text() for path in DIRECTORY.glob("*.json")}
    assert found == {name: text_of(content) for name, content in files().items()}, "python -m tests.log.vectors"


@pytest.mark.parametrize("name", LOGS)
def test_a_follower_has_the_blocks_and_counts_of_the_vector(name):
    reading = Reading()
    for number, step in enumerate(steps(name)):
        before = reading.follower.counts.copy()
        if step["record"] is None:
            reading.wait(step["at"])
        else:
            reading.take(bytes.fromhex(step["record"]), now=step["at"])
        follower = reading.follower
        names = ("group", "medium", "hash")
        found = {
            "counted": dict(follower.counts - before),
            "holds": follower.holds.value,
            "epoch": follower.epoch,
            "next": follower.seq,
            "view": [dict(zip(names, key, strict=True)) for key in sorted(reading.view.blocks, key=str)],
        }
        step["view"].sort(key=lambda block: str(tuple(block.values())))
        assert found == {key: step[key] for key in found}, number


@pytest.mark.parametrize("name", LOGS)
def test_a_record_is_read_and_written_as_the_vector_says(name):
    for number, step in enumerate(steps(name)):
        data = bytes.fromhex(step["record"] or "")
        if step["fields"] is None:
            with pytest.raises(ValueError):
                read(data)
            continue
        found = read(data)
        values = msgspec.structs.asdict(found) | {"payload": len(found.payload)}
        assert {name: values[name] for name in FIELDS} == step["fields"], number
        assert read(write(found)) == found
        if name not in ("packed", "later-fields"):
            assert write(found) == data, number


def test_the_vectors_contain_every_kind_of_record_and_every_count():
    found = [step for name in LOGS for step in steps(name)]
    assert {step["fields"]["kind"] for step in found if step["fields"]} == set(Kind)
    known = {"double", "old_epoch", "known", "unusable", "lost", "expired", "clock_set_back"}
    assert {reason for step in found for reason in step["counted"]} == known | REFUSED
    assert {step["holds"] for step in found} == {"nothing", "part", "all", "former"}


def test_a_key_names_the_stream_of_the_vector():
    for each in json.loads((DIRECTORY / "keys.json").read_text())["keys"]:
        if each["stream"] is None:
            with pytest.raises(ValueError):
                Stream.parse(each["key"])
        else:
            assert Stream.parse(each["key"]) == Stream(**each["stream"])
            assert Stream(**each["stream"]).key == each["key"]
