"""A vLLM engine for recordings: its real scheduler, cache managers and offload connectors on a CPU, with a fake model.

Three things are not vLLM's own: the model (`continuation`), the copying of blocks (a transfer is reported as complete
some steps later), and the publisher's thread. Batches are encoded as that thread does it, and kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.distributed.kv_events import EventBatch, EventPublisher
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import get_offload_block_hash, get_offload_group_idx
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata
from vllm.v1.structured_output import StructuredOutputManager

from tests.wire.recording.workload import Ask, Kept, Workload, continuation

Key = tuple[int | None, str, int | bytes]
SPECULATED = 3


@dataclass(frozen=True)
class Family:
    """The configuration of one kind of recorded stream: the cache's groups, the offloading, and fields of the
    requests.
    """

    groups: tuple[str, ...] = ("full",)
    blocks: int = 160
    block_size: int = 16
    hash_block_size: int | None = None
    speculative: bool = False
    sessions: bool = False
    salts: bool = False
    full_report: float = 0.0
    resets: float = 0.004
    connector: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    reset_how: tuple[tuple[bool, bool], ...] = ((False, False), (True, False))
    """The kinds of cache resets, as tuples of two flags: preempt running requests, and also reset offloaded blocks.

    vLLM's sleep is (True, True).
    """
    int_hashes: bool = True


SIMPLE = Family(connector="SimpleCPUOffloadConnector", extra={"num_cpu_blocks": 400}, resets=0.01)
NATIVE = Family(connector="OffloadingConnector", resets=0.01)
DESCRIBED = {"self_describing_kv_events": True}
GPU_ONLY = ((True, False),)
SLEEP = ((True, True),)
EITHER = ((False, False), (False, True), (True, False), (True, True))
FAMILIES = {
    "one_group": Family(),
    "bytes": Family(int_hashes=False),
    "session": Family(sessions=True, salts=True),
    "lookahead": Family(speculative=True),
    "window": Family(groups=("full", "window"), blocks=240),
    "mamba": Family(groups=("full", "mamba"), blocks=240),
    "partial": Family(groups=("full", "mamba"), blocks=120, block_size=64, hash_block_size=16),
    "full_report": Family(full_report=0.5),
    "offload_simple": replace(SIMPLE, reset_how=GPU_ONLY),
    "offload_simple_sleep": replace(SIMPLE, reset_how=SLEEP),
    "offload_simple_external": replace(SIMPLE, reset_how=EITHER),
    "offload_lazy": replace(SIMPLE, extra=SIMPLE.extra | {"lazy_offload": True}, reset_how=GPU_ONLY),
    "offload_window": replace(SIMPLE, groups=("full", "window"), blocks=240, reset_how=GPU_ONLY),
    "offload_mamba": replace(SIMPLE, groups=("full", "mamba"), blocks=240, reset_how=GPU_ONLY),
    "offload_native": replace(NATIVE, reset_how=GPU_ONLY),
    "offload_self": replace(NATIVE, extra=DESCRIBED, reset_how=GPU_ONLY),
    "offload_self_sleep": replace(NATIVE, extra=DESCRIBED, reset_how=SLEEP),
    "offload_self_chunks": replace(NATIVE, extra=DESCRIBED | {"block_size": 64}, reset_how=GPU_ONLY),
}


class Publisher(EventPublisher):  # type: ignore[misc]  # vLLM is not there where types are checked
    """A publisher that keeps the batches that the engine's publisher thread would send."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(0)
        self.kept = Kept(clock)

    def publish(self, events: EventBatch) -> None:
        events.data_parallel_rank = self._data_parallel_rank
        self.kept.publish(events)

    def shutdown(self) -> None:
        pass


def model_directory() -> Path:
    """Write a model's configuration to a new directory, and return it. vLLM's scheduler needs nothing else of a
    model.
    """
    where = Path(tempfile.mkdtemp(prefix="kvbus-recording-"))
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    size = {"num_hidden_layers": 1, "vocab_size": 1000, "max_position_embeddings": 2048, "head_dim": 32}
    (where / "config.json").write_text(
        json.dumps(
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", **shape, **size}
        )
    )
    return where


def spec(kind: str, block_size: int) -> Any:
    attention = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    if kind == "full":
        return FullAttentionSpec(block_size=block_size, **attention)
    if kind.startswith("window"):
        return SlidingWindowSpec(block_size=block_size, sliding_window=64, **attention)
    return MambaSpec(
        block_size=block_size,
        shapes=((block_size * 64,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )


class Engine:
    """A vLLM scheduler that a test advances step by step, and the batches that it has published."""

    def __init__(self, family: Family, seed: int, publisher: EventPublisher | None = None) -> None:
        os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = str(int(family.int_hashes))
        self.family = family
        self.random = random.Random(seed * 7 + 1)
        self.work = Workload(seed, salts=family.salts)
        self.steps = 0
        self.resets = 0
        self.aborts = 0
        self.preemptions = 0
        self.asks: dict[str, Ask] = {}
        config, cache = configuration(family)
        size = family.block_size
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=max(group.kv_cache_spec.block_size for group in cache.kv_cache_groups),
            hash_block_size=family.hash_block_size or size,
            log_stats=False,
        )
        keeping = Publisher(lambda: 1_700_000_000 + self.steps / 64)
        self.published = keeping.kept.batches
        self.scheduler.kv_event_publisher = publisher or keeping
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(
            family.hash_block_size or size, hash_fn, self.scheduler.num_hash_lookahead_tokens
        )
        self.transfers: deque[tuple[int, str, Any]] = deque()

    # -- driving ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.steps += 1
        chance = self.random
        if len(self.asks) < 14 and chance.random() < 0.6:
            self.ask(self.work.next())
        if self.asks and chance.random() < 0.02:
            self.aborts += 1
            gone = chance.choice(sorted(self.asks))
            self.scheduler.finish_requests([gone], RequestStatus.FINISHED_ABORTED)
            self.asks.pop(gone)
        if chance.random() < self.family.resets:
            self.reset()
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        self.scheduler.update_from_output(output, self.run(output))
        for gone in [known for known in self.asks if known not in self.scheduler.requests]:
            ask = self.asks.pop(gone)
            ask.conversation += [chance.randrange(900) for _ in range(3)]
        if self.family.speculative:
            self.draft(output)

    def ask(self, ask: Ask) -> None:
        name = f"r{self.work.asked}"
        self.asks[name] = ask
        full = self.random.random() < self.family.full_report
        sampling = SamplingParams(
            max_tokens=ask.answer,
            ignore_eos=True,
            extra_args={"kv_cache_report_mode": "full"} if full else None,
        )
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=ask.tokens,
                sampling_params=sampling,
                pooling_params=None,
                cache_salt=ask.salt,
                session_id=ask.session if self.family.sessions else None,
                block_hasher=self.hasher,
                arrival_time=float(self.steps),
            )
        )

    def reset(self) -> None:
        running, offloaded = self.random.choice(self.family.reset_how)
        if self.transfers and running:
            return  # the engine would raise an error
        with contextlib.suppress(RuntimeError):  # vLLM may refuse it because the connector still prepares a transfer
            self.resets += self.scheduler.reset_prefix_cache(running, reset_connector=offloaded)

    def run(self, output: Any) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in names:
            request = self.scheduler.requests[name]
            drafts = output.scheduled_spec_decode_tokens.get(name, [])
            if request.num_computed_tokens < request.num_tokens:
                sampled.append([])  # a prompt chunk that is not the last samples no token
                continue
            said: list[int] = []
            for draft in [*drafts, None]:
                said.append(continuation([*request.all_token_ids, *said]))
                if draft != said[-1]:
                    break
            sampled.append(said)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=self.transferred(output),
        )

    def draft(self, output: Any) -> None:
        names = [name for name in output.num_scheduled_tokens if name in self.scheduler.requests]
        drafts = []
        for name in names:
            tokens = list(self.scheduler.requests[name].all_token_ids)
            guess: list[int] = []
            for _ in range(SPECULATED):
                right = continuation([*tokens, *guess])
                guess.append(right if self.random.random() < 0.7 else self.random.randrange(900))
            drafts.append(guess)
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def transferred(self, output: Any) -> KVConnectorOutput | None:
        """Report that transfers of blocks are complete, some steps after the connector has requested them."""
        if self.scheduler.connector is None:
            return None
        meta = output.kv_connector_metadata
        due = self.steps + self.random.randint(0, 3)
        if self.family.connector == "SimpleCPUOffloadConnector":
            return self._simple(meta, due)
        return self._native(meta, due)

    def _done(self) -> list[tuple[str, Any]]:
        done = []
        while self.transfers and self.transfers[0][0] <= self.steps:
            done.append(self.transfers.popleft()[1:])
        return done

    def _simple(self, meta: Any, due: int) -> KVConnectorOutput:
        if meta.store_event >= 0:
            self.transfers.append((due, "store", meta.store_event))
        if meta.load_event >= 0:
            self.transfers.append((due, "load", list(meta.load_event_to_reqs[meta.load_event])))
        stored, loaded = {}, set()
        for what, which in self._done():
            if what == "store":
                stored[which] = 1
            else:
                loaded.update(which)
        return KVConnectorOutput(
            finished_recving=loaded,
            kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stored) if stored else None,
        )

    def _native(self, meta: Any, due: int) -> KVConnectorOutput:
        for job in meta.store_jobs:
            self.transfers.append((due, "store", (job, None)))
        for job, what in meta.load_jobs.items():
            self.transfers.append((due, "load", (job, what)))
        flushed = meta.jobs_to_flush or set()
        loaded, worker = set(), OffloadingWorkerMetadata()
        left: deque[tuple[int, str, Any]] = deque()
        for when, what, (job, load) in self.transfers:
            if when > self.steps and job not in flushed:
                left.append((when, what, (job, load)))
                continue
            worker.mark_completed(job)
            if load is not None and not load.sync:
                loaded.add(load.req_id)
        self.transfers = left
        return KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=worker)

    # -- the truth ---------------------------------------------------------------------------------------------------

    def pool(self) -> dict[Key, int]:
        """Return the present cache contents: group, medium and hash of each block, with the number of copies."""
        size = self.family.block_size
        found = held(self.scheduler.kv_cache_manager.block_pool, "GPU", size)
        connector = self.scheduler.connector
        if self.family.connector == "SimpleCPUOffloadConnector":
            found |= held(connector.scheduler_manager.cpu_block_pool, "CPU", size)
        if self.family.connector == "OffloadingConnector":
            offloading = connector.connector_scheduler
            payloads = vars(vars(offloading)["_events_tracker"])["_pending_event_metadata"]
            for key, chunk in vars(offloading.manager)["_policy"].chunks.items():
                if not chunk.is_ready:
                    continue
                of_chunk = payloads[key].block_hashes if key in payloads else [BlockHash(get_offload_block_hash(key))]
                for block in of_chunk:
                    name = (get_offload_group_idx(key), "CPU", maybe_convert_block_hash(block))
                    found[name] = found.get(name, 0) + 1
        return found

    def counts(self) -> dict[str, int]:
        return {"resets": self.resets, "aborts": self.aborts, "preemptions": self.preemptions}

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.scheduler.kv_cache_manager.kv_cache_event_metadata]


def held(pool: Any, medium: str, size: int) -> dict[Key, int]:
    """Return the hash of every complete block that a lookup in the pool can find, with the number of copies.

    A lookup can also find the end of a prompt, by hashes of smaller blocks. kvbus does not announce these smaller
    blocks.
    """
    found: Counter[Key] = Counter()
    for block in pool.blocks:
        if (key := block.block_hash) is not None and block.block_hash_num_tokens % size == 0:
            assert pool.cached_block_hash_to_block.contain(key, block.block_id)
            found[get_group_id(key), medium, maybe_convert_block_hash(get_block_hash(key))] += 1
    return dict(found)


def configuration(family: Family) -> tuple[VllmConfig, KVCacheConfig]:
    where = model_directory()
    model = ModelConfig(model=str(where), skip_tokenizer_init=True, dtype="float32", max_model_len=1024)
    cache = CacheConfig(block_size=family.block_size, enable_prefix_caching=True)
    speculative = None
    if family.speculative:
        speculative = SpeculativeConfig(
            model=str(where),
            method="eagle",
            num_speculative_tokens=SPECULATED,
            target_model_config=model,
            target_parallel_config=ParallelConfig(),
        )
    transfer = None
    if family.connector:
        transfer = KVTransferConfig(
            kv_connector=family.connector,
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": 400 * 16 * 256, **family.extra},
        )
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_model_len=1024,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        device_config=DeviceConfig(device="cpu"),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        kv_transfer_config=transfer,
        speculative_config=speculative,
    )
    cache.num_gpu_blocks = family.blocks
    groups = [KVCacheGroupSpec([f"layer{i}"], spec(kind, family.block_size)) for i, kind in enumerate(family.groups)]
    page = groups[0].kv_cache_spec.page_size_bytes
    tensors = [
        KVCacheTensor(page * family.blocks, [f"layer{i}"], page * family.blocks, page) for i in range(len(groups))
    ]
    return config, KVCacheConfig(
        num_blocks=family.blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        hash_block_size=family.hash_block_size or family.block_size,
    )
