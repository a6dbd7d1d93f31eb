"""Tests that the captures of `tests.wire.recording.written` have the form that their sources require.

The sources are the code of publishers, and RFC 1527. The tests also generate the captures again.
"""

from typing import Any, Literal

import msgspec
import pytest

from kvbus.core.commands import Publish
from kvbus.core.events import BatchReceived
from tests.core.dsl import Script
from tests.doubles.router import events_of as maps_of
from tests.wire.captures import DATA, load
from tests.wire.recording.written import WRITTEN, written

Hashes = list[int]


class TrtllmStored(msgspec.Struct, tag_field="type", tag="BlockStored", forbid_unknown_fields=True):
    """TensorRT-LLM's BlockStored (TensorRT-LLM#17023).

    Fields that have a default in TensorRT-LLM are left out here, because TensorRT-LLM never sets them.
    """

    block_hashes: Hashes
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: Literal["GPU"]
    lora_name: None


class TrtllmRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", forbid_unknown_fields=True):
    """The BlockRemoved event as TensorRT-LLM publishes it (TensorRT-LLM#17023)."""

    block_hashes: Hashes
    medium: Literal["GPU"]


class SglangStored(msgspec.Struct, tag_field="type", tag="BlockStored", forbid_unknown_fields=True):
    """SGLang's BlockStored (sglang#39991). The fields medium and lora_name have no default."""

    block_hashes: Hashes
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    cache_salt: str | None = None
    session_id: str | None = None


class SglangRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", forbid_unknown_fields=True):
    """The BlockRemoved event as SGLang publishes it (sglang#39991)."""

    block_hashes: Hashes
    medium: str | None


class Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", forbid_unknown_fields=True):
    """The AllBlocksCleared event, which is the same for every engine."""


class Rfc1527Event(msgspec.Struct, forbid_unknown_fields=True):
    """An event of Mooncake (Mooncake#2214), with the fields for older readers.

    All keys are present; unknown values are null.
    """

    event_id: int
    timestamp: int
    event_type: Literal["stored", "removed"]
    type: Literal["BlockStored", "BlockRemoved"]
    model_name: str | None
    block_size: int | None
    additional_salt: str | None
    lora_name: None
    tenant_id: str
    backend_id: str
    medium: Literal["gpu", "cpu"]
    dp_rank: int
    seq_hashes: Hashes
    base_block_idx: int | None
    block_hashes: Hashes
    parent_block_hash: int | None
    parent_hash: int | None = None
    token_ids: list[int] | None = None


FORMS: dict[str, Any] = {
    "syn_mooncake_rfc1527": tuple[int, list[Rfc1527Event], None],
    "syn_sglang_39991": tuple[float, list[SglangStored | SglangRemoved | Cleared], int],
    "syn_trtllm_native": tuple[float, list[TrtllmStored | TrtllmRemoved], int],
}


def events_of(name: str) -> list[Any]:
    decode = msgspec.msgpack.Decoder(FORMS[name]).decode
    return [event for message in load(name) for event in decode(message.payload)[1]]


def test_each_synthetic_capture_has_its_documented_form() -> None:
    assert set(FORMS) == set(WRITTEN)
    assert all(events_of(name) for name in FORMS)


@pytest.mark.parametrize("name", WRITTEN)
def test_each_synthetic_capture_is_reproduced_exactly(name: str) -> None:
    kept = tuple((DATA / f"{name}.{suffix}").read_text() for suffix in ("jsonl", "truth.json"))
    assert written(name) == kept


def test_a_salt_is_only_in_the_keys_of_the_first_block_of_a_prompt() -> None:
    stores = [event for event in events_of("syn_sglang_39991") if isinstance(event, SglangStored)]
    first = [event for event in stores if event.cache_salt and event.parent_block_hash is None]
    assert first
    for event in stores:
        keys = [[event.cache_salt], *[None] * (len(event.block_hashes) - 1)] if event in first else None
        assert event.extra_keys == keys


def test_hashes_of_tensorrt_llm_are_signed() -> None:
    hashes = [block for event in events_of("syn_trtllm_native") for block in event.block_hashes]
    assert min(hashes) < 0 < max(hashes) < 2**63


def test_pool_events_contain_only_hashes() -> None:
    pool = [event for event in events_of("syn_mooncake_rfc1527") if event.medium == "cpu"]
    assert {len(event.seq_hashes) for event in pool} == {1}
    assert {(event.block_size, event.token_ids, event.parent_hash) for event in pool} == {(None, None, None)}


def test_a_pool_block_is_sent_with_the_salt_of_the_engines_block() -> None:
    script = Script()
    salts: dict[Any, set[tuple[str, str | None]]] = {}
    for message in load("syn_mooncake_rfc1527"):
        for command in script.handle(BatchReceived(0, [b"", message.seq.to_bytes(8, "big"), message.payload])):
            for event in maps_of(command.payload) if isinstance(command, Publish) else ():
                for block in event["block_hashes"] if event["type"] == "BlockStored" else ():
                    salts.setdefault(block, set()).add((event["medium"], event.get("cache_salt")))
    told = list(salts.values())
    assert {("GPU", "adapter-1"), ("CPU", "adapter-1")} in told
    assert all(len({salt for _, salt in found}) == 1 for found in told)
