"""Tests that the clauses, the schema and the vectors of the specification agree, and that kvbus reads as they
require.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any, Final

import msgspec
import pytest

from kvbus.core.commands import RequestReplay
from kvbus.core.events import BatchReceived, ReplayReceived, SourceUp
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.tools.conform.vectors import END, VECTORS, Vector
from tests.long import sample
from tests.spec.vectors import DIRECTORY, text_of
from tests.wire.captures import CAPTURES, load

SPEC: Final = DIRECTORY.parent
TEXT: Final = (SPEC / "kv-events.md").read_text()
CLAUSES: Final = dict(re.findall(r"^\*\*(\d+\.\d+)\*\* (.*?)(?=\n\n|\Z)", TEXT, re.MULTILINE | re.DOTALL))


def test_each_clause_has_a_rule_and_a_reason():
    assert len(CLAUSES) > 50
    for number, clause in CLAUSES.items():
        rule, why, reason = clause.replace("\n", " ").partition("*Why:*")
        assert re.search(r"\b(MUST|SHOULD|MAY|may|speaks|known|begins|takes|cursor|mean)\b", rule), number
        assert why, number
        assert reason.strip().endswith("."), number


def test_clauses_are_in_ascending_order():
    numbers = [tuple(map(int, number.split("."))) for number in CLAUSES]
    assert all(one < next_one for one, next_one in pairwise(numbers))


@pytest.mark.parametrize("name", VECTORS)
def test_a_vector_file_agrees_with_its_generator(name):
    assert (DIRECTORY / f"{name}.json").read_text() == text_of(VECTORS[name]), "python -m tests.spec.vectors"


def test_every_vector_file_is_generated_and_names_existing_clauses():
    assert {path.stem for path in DIRECTORY.glob("*.json")} == set(VECTORS)
    assert {number for vector in VECTORS.values() for number in vector.clauses} <= set(CLAUSES)


@pytest.mark.parametrize("name", VECTORS)
def test_kvbus_reads_each_vector_as_the_specification_requires(name):
    vector = VECTORS[name]
    relay = Relay([SourceSpec("engine", 0, probe_interval=0.0, groups="all")], [])
    asked = [each for each in relay.handle(SourceUp(0), 0.0) if isinstance(each, RequestReplay)]
    relay.handle(ReplayReceived(0, asked[0].request, END), 0.0)  # the engine's replay buffer is empty
    requests = []
    for frames in vector.live:
        requests += [each for each in relay.handle(BatchReceived(0, frames), 0.0) if isinstance(each, RequestReplay)]
    assert len(requests) == (vector.replay_from is not None)
    assert all(each.start <= (vector.replay_from or 0) for each in requests)
    for frames in vector.replay:
        relay.handle(ReplayReceived(0, requests[-1].request, frames), 0.0)
    tables = relay.sources[0].normalizer.index.tables
    view = {(group, medium, block) for (group, medium, _, _), table in tables.items() for block in table.blocks}
    assert view == set(vector.view)


def schema() -> Any:
    jsonschema = pytest.importorskip(
        "jsonschema", reason="jsonschema is not installed (.ci/run installs it from .ci/tools.lock)"
    )
    return jsonschema.Draft202012Validator(json.loads((SPEC / "kv-events.schema.json").read_text()))


def as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: as_json(each) for name, each in value.items()}
    return [as_json(each) for each in value] if isinstance(value, list | tuple) else value


def schema_errors(validator: Any, payload: bytes) -> set[str]:
    """Return the schema's errors about a payload, without the details that differ from event to event."""
    return {error.schema_path[-1] + " " + error.json_path.rpartition(".")[2].partition("[")[0]
            for error in validator.iter_errors(as_json(msgspec.msgpack.decode(payload)))}  # fmt: skip


DEVIATIONS: Final = {
    "arrays": {"type $"},
    "vllm033_mamba": {"minItems block_hashes"},
    "vllm033_mamba_64_16": {"minItems block_hashes"},
    "vllm033_offload_mamba": {"minItems block_hashes"},
    "vllm033_offload_native": {"minimum block_size"},
    "syn_mooncake_rfc1527": {"type block_size", "type token_ids"},
    "syn_vllm090_positional": {"type $", "minItems $"},
}
"""The schema errors of real engines' payloads, which docs/spec/matrix.md explains."""


@pytest.mark.slow
@pytest.mark.parametrize("capture", sample(CAPTURES, 4))
def test_the_schema_accepts_engine_batches_except_known_deviations(capture):
    validator = schema()
    messages = load(capture)
    found = set().union(*(schema_errors(validator, message.payload) for message in messages[:60]))
    first = msgspec.msgpack.decode(messages[0].payload)[1][0]
    arrays = DEVIATIONS["arrays"] if isinstance(first, list) else set()
    assert found == DEVIATIONS.get(capture, arrays)


def test_the_schema_accepts_exactly_the_valid_vectors():
    validator = schema()
    wrong = {
        "not-msgpack",
        "no-batch",
        "arrays",
        "longer-array",
        "too-few-tokens",
        "token-out-of-range",
        "one-bad-event",
    }
    refused = {name for name, vector in VECTORS.items() if not all(accepted_payloads(validator, vector))}
    assert refused == wrong - {"too-few-tokens"}  # a schema cannot compare the numbers of tokens and hashes


def accepted_payloads(validator: Any, vector: Vector) -> list[bool]:
    found = []
    for frames in vector.live:
        if len(frames) == 3:
            try:
                found.append(not schema_errors(validator, frames[-1]))
            except msgspec.DecodeError:
                found.append(False)
    return found
