"""Write captures of engines and of a block pool (Mooncake) whose own event encoders cannot be installed.

python -m tests.wire.recording.written

A simulator takes their place: it provides the cache and the workload. The form of the events follows these sources:
TensorRT-LLM's publisher (TensorRT-LLM#17023), the publisher of Mooncake's master and its RFC 1527 (Mooncake#2214), and
SGLang's proposal (sglang#39991). Each run writes the same bytes.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from kvbus.tools.sim.cache import GPU
from kvbus.tools.sim.dialects import DIALECTS, Dialect
from kvbus.tools.sim.engine import EngineOptions, SimEngine
from kvbus.tools.sim.workload import Job, synthetic

DATA: Final = Path(__file__).parents[1] / "data"
BEGIN: Final = 1_763_000_000.0
STEP: Final = 0.01
"""Seconds between two batches of a generated capture."""

VOCABULARY: Final = 100
"""Number of different token ids. It is small, so that the capture files are small."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """The recipe of one capture: a simulated engine, and functions that convert its batches and live blocks."""

    dialect: Dialect
    said: str
    batches: int = 100
    tenants: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    batch: Callable[[], Callable[[list[Any]], list[Any]]] = lambda: lambda batch: batch
    block: Callable[[dict[str, Any]], dict[str, Any]] = lambda block: block

    def engine(self) -> SimEngine:
        """Return the simulated engine. Its pool is so small that it is soon full."""
        options = EngineOptions(**{"blocks": 64, "max_running": 3, "decode_tokens": 16, **self.options})
        return SimEngine(self.dialect, self._jobs(), options=options)

    def _jobs(self) -> Iterator[Job]:
        sizes = {"system_prompts": 2, "system_tokens": 64, "conversations": 6, "turns": 4, "turn_tokens": 48}
        for job in synthetic(28, output_tokens=48, max_tokens=256, tenants=self.tenants, **sizes):
            yield replace(job, tokens=tuple(token % VOCABULARY for token in job.tokens))


# -- Mooncake's RFC 1527 -----------------------------------------------------------------------------------------------


def rfc1527() -> Callable[[list[Any]], list[Any]]:
    """Return a function that converts the events of an engine and its pool to RFC 1527.

    The pool knows only hashes, and sends one event for each hash.
    """
    places: dict[int | None, int] = {None: -1}
    said = 0

    def envelope(ts: int, kind: str, event: dict[str, Any], **more: Any) -> dict[str, Any]:
        nonlocal said
        said += 1
        pool = event["medium"] != "gpu"
        salt = event.get("lora_name")
        return {
            "event_id": said,
            "timestamp": ts,
            "event_type": kind,
            "type": event["type"],
            "model_name": None if pool else "a-model",
            "block_size": None if pool else more.pop("block_size", 16),
            "additional_salt": None if pool else salt,
            "lora_name": None,
            "tenant_id": "default",
            "backend_id": "node-1",
            "medium": event["medium"],
            "dp_rank": 0,
            **more,
        }

    def events(ts: int, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        hashes, stored, pool = event["block_hashes"], event["type"] == "BlockStored", event["medium"] != "gpu"
        parent = event.get("parent_block_hash")
        if stored and not pool:
            places.update((block, places[parent] + 1 + at) for at, block in enumerate(hashes))
        for each in [[block] for block in hashes] if pool else [hashes]:
            fields = {"seq_hashes": each, "base_block_idx": None if pool else places[each[0]]}
            if stored:
                fields |= {"parent_hash": None, "token_ids": None} if pool else {
                    "parent_hash": parent,
                    "token_ids": event["token_ids"],
                }  # fmt: skip
            fields |= {"block_hashes": each, "parent_block_hash": None if pool else parent}
            yield envelope(ts, "stored" if stored else "removed", event, **fields)

    def batch(batch: list[Any]) -> list[Any]:
        ts = round(batch[0] * 1000)
        return [ts, [said for event in batch[1] for said in events(ts, event)], None]

    return batch


# ----------------------------------------------------------------------------------------------------------------------

WRITTEN: Final = {
    "syn_mooncake_rfc1527": Written(
        dialect=replace(
            DIALECTS["trtllm-native"], adapters=True, hashes="unsigned", media={GPU: "gpu", "CPU": "cpu"}
        ),
        said="Mooncake#1527 and Mooncake#2214: the RFC and the publisher's source",
        tenants=2,
        batches=150,
        options={"tiers": {"CPU": 60}, "max_running": 1},
        batch=rfc1527,
        block=lambda block: block | {"medium": block["medium"].upper()},
    ),
    "syn_sglang_39991": Written(
        dialect=DIALECTS["sglang-39991"],
        said="sglang#39991: the proposal",
        tenants=2,
        options={"reset_every": 70},
    ),
    "syn_trtllm_native": Written(
        dialect=DIALECTS["trtllm-native"],
        said="TensorRT-LLM#17023: the publisher's source",
    ),
}  # fmt: skip


def written(name: str) -> tuple[str, str]:
    """Return the text of a capture file and the text of its truth file."""
    capture = WRITTEN[name]
    engine = capture.engine()
    payloads = [engine.step(BEGIN + STEP * at) for at in range(capture.batches)]
    payloads += engine.flush(BEGIN + STEP * capture.batches)
    told = capture.batch()
    lines = []
    for seq, payload in enumerate(payloads):
        assert payload is not None
        said = msgspec.msgpack.encode(told(msgspec.msgpack.decode(payload)))
        line = {"t": round(STEP * seq, 4), "topic": "", "seq": seq, "payload": base64.b64encode(said).decode()}
        lines.append(json.dumps(line) + "\n")
    left_out = {"rank", "prefix"}
    blocks = [
        capture.block({name: value for name, value in block.items() if name not in left_out})
        for block in engine.truth()
    ]
    return "".join(lines), json.dumps({"synthetic_workload": True, "from": capture.said, "blocks": blocks})


if __name__ == "__main__":
    for each in WRITTEN:
        for text, suffix in zip(written(each), ("jsonl", "truth.json"), strict=True):
            (DATA / f"{each}.{suffix}").write_text(text)
            sys.stdout.write(f"{each}.{suffix}: {len(text)} bytes\n")
