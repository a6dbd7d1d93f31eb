"""The configuration's models: every key with its default, its bounds and its documentation."""

from __future__ import annotations

import io
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator
from ruamel.yaml import YAML

from kvbus.config import topics
from kvbus.config.endpoints import endpoint_offset, parse_address
from kvbus.config.values import (
    ApiUrl,
    BlockSize,
    Endpoint,
    Framing,
    HttpAddress,
    HttpHosts,
    Int,
    LogLevel,
    Name,
    OutputType,
    ProfileName,
    Seconds,
    StateDir,
    Template,
    Text,
)
from kvbus.core.wire import frames
from kvbus.core.wire.profiles import PROFILES


def _key(
    default: Any,
    about: str,
    *,
    example: Any,
    unit: str = "",
    default_text: str | None = None,
    **bounds: float,
) -> Any:
    """Make a field that also has its documentation, an example and a unit."""
    extra = {"unit": unit, "default_text": default_text}
    given = {"default_factory": default} if callable(default) else {"default": default}
    return Field(**given, **bounds, description=about, examples=[example], json_schema_extra=extra)  # type: ignore[call-overload]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=False, protected_namespaces=()
    )


class SourceConfig(_Section):
    """One engine: its live stream, its replay, and how many data-parallel ranks it has."""

    name: Name = _key("engine", "Metrics label, unique; rank r of several is `NAME/r`.", example="engine")
    endpoint: Endpoint = _key(
        "tcp://127.0.0.1:5557",
        "The engine's publisher, `tcp://host:port` or `ipc://path`.",
        example="tcp://127.0.0.1:5557",
    )
    replay_endpoint: Endpoint | None = _key(
        None,
        "The engine's replay; null: it has none, and every gap is lost.",
        example="tcp://127.0.0.1:5558",
        default_text="`tcp://127.0.0.1:5558` if `endpoint` is not set either, else null",
    )
    snapshot_endpoint: Endpoint | None = _key(
        None,
        "The engine's snapshots, if it offers that protocol: kvbus catches up by one instead of a replay from 0. "
        "Needs `replay_endpoint`.",
        example="tcp://127.0.0.1:5559",
    )
    bind: bool = _key(False, "true: kvbus binds `endpoint` and the engine dials in.", example=False)
    api: ApiUrl | None = _key(
        None,
        "The engine's own HTTP API, which `on_partial: reset` asks: vLLM's `POST /reset_prefix_cache` (there with "
        "`VLLM_SERVER_DEV_MODE=1`) or SGLang's `POST /flush_cache`.",
        example="http://127.0.0.1:8000",
    )
    data_parallel_size: Int = _key(
        1,
        "Ranks of this engine; rank r is at port + r of both endpoints, with `ipc://` at `PATH-r` "
        "(rank 0: `PATH`) or where the path says `{rank}`.",
        example=1,
        unit="ranks",
        ge=1,
        le=4096,
    )
    topic: Text = _key("", "Subscription prefix; empty: everything.", example="kv@")
    clears: Literal["auto", "device", "all"] = _key(
        "auto",
        "What the engine's AllBlocksCleared speaks of: the device's blocks (vLLM), those of every tier (SGLang), or "
        "auto: of every tier where the engine opens its epoch with one or `api` is SGLang's, else of the device.",
        example="auto",
    )
    slot: Int | None = _key(
        None,
        "Slot of rank 0 among the streams of a per_source output (port + slot); rank r is at slot + r. Set it to keep "
        "a source's ports when one before it is removed.",
        example=2,
        default_text="behind the source before it",
        ge=0,
        le=4095,
    )
    curve_secret_key_file: Path | None = _key(
        None,
        "kvbus's own key pair (`kvbus keygen`) or secret key towards this engine; turns CURVE on for all of its "
        "endpoints.",
        example="/etc/kvbus/keys/kvbus.key_secret",
    )
    curve_server_key_file: Path | None = _key(
        None,
        "Public key of the engine, for the endpoints kvbus connects to.",
        example="/etc/kvbus/keys/engine.key",
    )
    curve_client_keys: Path | None = _key(
        None,
        "With `bind`: the public keys that may dial in; a file with one key a line, or a directory of key files.",
        example="/etc/kvbus/engines",
    )

    @model_validator(mode="before")
    @classmethod
    def _default_replay(cls, data: Any) -> Any:
        # the default replay endpoint belongs to the default endpoint: beside another one it would be another engine's
        if isinstance(data, dict) and "endpoint" not in data:
            return {"replay_endpoint": "tcp://127.0.0.1:5558", **data}
        return data


class StreamEndpoints(NamedTuple):
    """The endpoints of one outgoing stream."""

    endpoint: str
    replay_endpoint: str | None
    snapshot_endpoint: str | None


class OutputConfig(_Section):
    """One set of outgoing endpoints, with the framing and encoding that its routers understand."""

    name: Name = _key("routers", "Metrics label, unique.", example="routers")
    type: OutputType = _key("zmq", "What carries it, `zmq` or another part that is installed.", example="zmq")
    endpoint: Endpoint = _key(
        "tcp://*:5657", "Where routers subscribe, `tcp://host:port` or `ipc://path`.", example="tcp://*:5657"
    )
    replay_endpoint: Endpoint | None = _key(
        None,
        "Where routers ask for a replay (always bound); null: none.",
        example="tcp://*:5658",
        default_text="`tcp://*:5658` if `endpoint` is not set either, else null",
    )
    snapshot_endpoint: Endpoint | None = _key(
        None,
        "The snapshot protocol (always bound); implies 24-byte sequence frames on this output. null: off.",
        example="tcp://*:5659",
    )
    bind: bool = _key(True, "false: dial out to a router that binds its SUB.", example=True)
    layout: Literal["per_source", "merged"] = _key(
        "per_source",
        "per_source: the i-th source (all ranks counted, from 0, or by `slot`) at port + i with a seq of its own, with "
        "`ipc://` at `PATH-i`; merged: one endpoint, one seq.",
        example="per_source",
    )
    profile: ProfileName = _key("vllm", "Whose framing and encoding this output speaks.", example="vllm")
    topic: Template | None = _key(
        None,
        "null: the source's own; else a template of `{model}`, `{worker}`, `{source}`, `{rank}`.",
        example="kv@{worker}@{model}",
    )
    heartbeat: Seconds = _key(1.0, "Idle time before an empty batch is sent; 0: off.", example=1.0, unit="s", ge=0)
    replay_framing: Framing = _key(
        "auto",
        "Frames of a replay answer; auto: by profile (sglang 3, the others 4).",
        example="auto",
    )
    journal_batches: Int = _key(
        10_000, "Published batches kept for replay, per stream.", example=10_000, unit="batches", ge=1
    )
    journal_bytes: Int = _key(
        2_097_152,
        "Payload kept for replay, per stream. A router that missed more gets a state snapshot instead.",
        example=2_097_152,
        unit="bytes",
        ge=1,
    )
    queue_batches: Int = _key(
        10_000,
        "Batches waiting for this output before they are dropped.",
        example=10_000,
        unit="batches",
        ge=1,
    )
    send_hwm: Int = _key(
        10_000,
        "Batches that a slow router may be behind before its own are dropped.",
        example=10_000,
        unit="batches",
        ge=1,
    )
    send_bytes: Int = _key(
        16_777_216,
        "Bytes kept for routers that are behind, per stream; they share them.",
        example=16_777_216,
        unit="bytes",
        ge=1,
    )
    on_subscribe: Literal["state", "nothing"] = _key(
        "state",
        "What a router gets first: the live blocks, or nothing (it asks the replay).",
        example="state",
    )
    curve_secret_key_file: Path | None = _key(
        None,
        "This output's own key pair (`kvbus keygen`) or secret key; turns CURVE on for all of its endpoints.",
        example="/etc/kvbus/keys/kvbus.key_secret",
    )
    curve_client_keys: Path | None = _key(
        None,
        "The public keys of routers that may connect: a file with one key a line, or a directory of key files. An "
        "empty one lets nobody in.",
        example="/etc/kvbus/routers",
    )
    curve_server_key_file: Path | None = _key(
        None,
        "With `bind: false`: public key of the router that `endpoint` dials.",
        example="/etc/kvbus/keys/router.key",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        if isinstance(data, dict) and "endpoint" not in data:
            data = {"replay_endpoint": "tcp://*:5658", **data}
        return data

    @property
    def framing(self) -> frames.Framing:
        """Frames of a replay answer, with ``auto`` resolved by the profile."""
        if self.replay_framing == "auto":
            return PROFILES[self.profile].framing
        return "3" if self.replay_framing == 3 else "4"

    def stream_endpoints(self, i: int) -> StreamEndpoints:
        """Return the endpoints of the stream in slot ``i``; a merged output has one stream for all slots."""
        n = i if self.layout == "per_source" else 0
        replay, snapshot = self.replay_endpoint, self.snapshot_endpoint
        return StreamEndpoints(
            endpoint_offset(self.endpoint, n),
            None if replay is None else endpoint_offset(replay, n),
            None if snapshot is None else endpoint_offset(snapshot, n),
        )


class Limits(_Section):
    """Limits of what an engine or a router may make kvbus hold."""

    max_frame_bytes: Int = _key(
        67_108_864,
        "Largest frame accepted from an engine; a larger one costs the connection, which is made again.",
        example=67_108_864,
        unit="bytes",
        ge=1024,
        le=2**31 - 1,
    )
    max_frames: Int = _key(16, "Most frames in one message.", example=16, unit="frames", ge=5, le=1024)
    max_events: Int = _key(65_536, "Most events in one batch.", example=65_536, unit="events", ge=1)
    max_blocks: Int = _key(
        20_000_000,
        "Most live blocks of one source, coarse ones and tails that are left out among them; at the limit stores are "
        "refused.",
        example=20_000_000,
        unit="blocks",
        ge=1,
    )
    max_index_bytes: Int = _key(
        4_294_967_296,
        "Most memory that the blocks of one source may take, as kvbus estimates it; at the limit stores are refused.",
        example=4_294_967_296,
        unit="bytes",
        ge=1,
    )
    max_groups: Int = _key(
        64,
        "Most KV cache groups of one source (hybrid models have a handful); stores of further ones are refused.",
        example=64,
        unit="groups",
        ge=1,
        le=4096,
    )
    max_held_bytes: Int = _key(
        268_435_456,
        "Payload in the reorder buffer of each source; at the limit the newest are dropped, and asked for again.",
        example=268_435_456,
        unit="bytes",
        ge=1,
    )
    max_request_bytes: Int = _key(
        65_536,
        "Largest frame accepted from a router (subscriptions, replay and snapshot requests); a larger one costs the "
        "connection.",
        example=65_536,
        unit="bytes",
        ge=1024,
        le=2**31 - 1,
    )
    max_replay_sessions: Int = _key(
        64, "Replay answers being sent at once, per output.", example=64, unit="sessions", ge=1
    )


@dataclass(frozen=True, slots=True)
class SourceStream:
    """One engine publisher: a source and one of its ranks.

    Attributes:
        label: metrics label: the source's name, or ``name/rank`` if it has several ranks.
        source_index: position of the source in ``Config.sources``.
        rank: data-parallel rank within the source.
        endpoint: the rank's publisher.
        replay_endpoint: the rank's replay, if the source has one.
        snapshot_endpoint: the rank's snapshots, if the source offers them.
        bind: whether kvbus binds ``endpoint``.
        topic: subscription prefix.
        clears: what the engine's AllBlocksCleared speaks of.
        index: the stream's slot; ``OutputConfig.stream_endpoints(index)`` are its endpoints on an output.
    """

    label: str
    source_index: int
    rank: int
    endpoint: str
    replay_endpoint: str | None
    snapshot_endpoint: str | None
    bind: bool
    topic: bytes
    clears: Literal["auto", "device", "all"]
    index: int


class Config(_Section):
    """The whole configuration. `kvbus.config.load` reads it and checks it as a whole."""

    model: Text | None = _key(None, "`{model}` in topics; needed only where a topic uses it.", example="Qwen/Qwen3-32B")
    worker: Text = _key(socket.gethostname, "`{worker}` in topics.", example="pod-a", default_text="the host name")
    block_size: BlockSize = _key(
        "auto", "Block size on every output; auto: learned per source.", example=16, unit="tokens"
    )
    duplicates: Literal["count", "ignore"] = _key(
        "count",
        "A hash stored again is one more copy (count), or the same block announced again (ignore; for an "
        "engine with `kv_cache_report_mode=full`).",
        example="count",
    )
    groups: Literal["prefix", "all"] = _key(
        "prefix",
        "prefix: only groups that carry prefixes (full, MLA, sink attention, or no group); all: every group.",
        example="prefix",
    )
    orphans: Literal["pass", "drop"] = _key(
        "pass", "Stores whose parent is unknown; counted either way.", example="pass"
    )
    on_lost: Literal["clear", "keep"] = _key(
        "clear", "The source's blocks after a gap that no replay fills.", example="clear"
    )
    on_partial: Literal["keep", "reset"] = _key(
        "keep",
        "Where the engine may hold blocks that cannot be known (`partial` in `/sources`): wait until it restarts or "
        "resets its cache (keep), or ask its API to reset it (reset; needs `api` in every source).",
        example="keep",
    )
    source_timeout: Seconds = _key(
        30.0,
        "Time without the engine's connection before its blocks are cleared downstream.",
        example=30,
        unit="s",
        gt=0,
    )
    replay_timeout: Seconds = _key(
        2.0, "Time without progress before a replay answer is given up.", example=2.0, unit="s", gt=0
    )
    probe_interval: Seconds = _key(
        1.0,
        "Idle time before the engine is asked whether its last batches were lost (doubling while it stays idle); "
        "0: off.",
        example=1.0,
        unit="s",
        ge=0,
    )
    reorder_batches: Int = _key(
        20_000,
        "Batches in the reorder buffer of each source, which wait while a gap is filled.",
        example=20_000,
        unit="batches",
        ge=1,
    )
    sources: tuple[SourceConfig, ...] = _key(
        (), "The engines; at least one.", example=[{"endpoint": "tcp://127.0.0.1:5557"}]
    )
    outputs: tuple[OutputConfig, ...] = _key(
        (), "The outgoing streams; at least one.", example=[{"endpoint": "tcp://*:5657"}]
    )
    http: HttpAddress | None = _key(
        "127.0.0.1:9477",
        "Address of `/metrics`, `/livez`, `/readyz`, `/sources`, `/routers`, `/blocks` and the status page; port 0: "
        "any free port; null: no HTTP. `/blocks` is answered to loopback alone, whatever the address.",
        example="127.0.0.1:9477",
    )
    http_allowed_hosts: HttpHosts = _key(
        (),
        "Further names by which `/blocks` may be asked for (the Host header), beside localhost, 127.0.0.0/8 and [::1]; "
        "still from loopback alone.",
        example=["kvbus.example.internal"],
    )
    state_dir: StateDir | None = _key(
        "auto",
        "Directory that keeps seq and state over a restart of kvbus. auto: one of its own in `$STATE_DIRECTORY`, else "
        "in memory (`$XDG_RUNTIME_DIR`, `/dev/shm`), else on disk (`/var/lib/kvbus`, `$XDG_STATE_HOME`), where 1 GiB "
        "is free; null: none, and a restart loses what the engine's replay no longer has.",
        example="auto",
    )
    state_sync: Literal["none", "batch"] = _key(
        "none",
        "What of `state_dir` outlives a power cut. none: no seq is used twice, and routers are cleared after it; "
        "batch: the state, because kvbus waits for the disk before it sends anything.",
        example="batch",
    )
    shutdown_timeout: Seconds = _key(
        5.0,
        "Time that routers get, at the end, to take what is queued for them and the replay answers under way.",
        example=5.0,
        unit="s",
        ge=0,
    )
    key_reload_interval: Seconds = _key(
        10.0,
        "How often key files and allow-lists are looked at for changes; 0: at SIGHUP only.",
        example=10.0,
        unit="s",
        ge=0,
    )
    log_level: LogLevel = _key("info", "Least severe log line written.", example="info")
    log_format: Literal["auto", "json", "text"] = _key(
        "auto", "auto: text on a terminal, else JSON lines.", example="json"
    )
    limits: Limits = _key(Limits(), "Bounds on what a peer may make kvbus hold.", example={"max_frames": 16})

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Host and port of the HTTP server; None without one."""
        return None if self.http is None else parse_address(self.http)

    def slots(self) -> list[tuple[int, int, int]]:
        """Return, for each source and rank in order, its position in ``sources``, its rank and its slot."""
        out: list[tuple[int, int, int]] = []
        slot = 0
        for source_index, source in enumerate(self.sources):
            slot = slot if source.slot is None else source.slot
            out += [(source_index, rank, slot + rank) for rank in range(source.data_parallel_size)]
            slot += source.data_parallel_size
        return out

    def streams(self) -> list[SourceStream]:
        """Return every engine publisher: one for each source and rank, in order."""
        out: list[SourceStream] = []
        for source_index, rank, slot in self.slots():
            source = self.sources[source_index]
            several = source.data_parallel_size > 1
            replay, snapshot = source.replay_endpoint, source.snapshot_endpoint
            out.append(
                SourceStream(
                    label=f"{source.name}/{rank}" if several else source.name,
                    source_index=source_index,
                    rank=rank,
                    endpoint=endpoint_offset(source.endpoint, rank),
                    replay_endpoint=None if replay is None else endpoint_offset(replay, rank),
                    snapshot_endpoint=None if snapshot is None else endpoint_offset(snapshot, rank),
                    bind=source.bind,
                    topic=source.topic.encode(),
                    clears=source.clears,
                    index=slot,
                )
            )
        return out

    def to_dict(self) -> dict[str, Any]:
        """Return the effective configuration as plain JSON types, defaults included."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Return the effective configuration as YAML, with defaults. `load` reads it back the same."""
        yaml = YAML(typ="safe", pure=True)
        yaml.default_flow_style = False
        yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
        buffer = io.StringIO()
        yaml.dump(self.to_dict(), buffer)
        return buffer.getvalue()


def render_topic(template: str, stream: SourceStream, config: Config) -> bytes:
    """Return the topic frame of one stream: the template with its placeholders filled in."""
    return topics.render(
        template,
        model=config.model or "",
        worker=config.worker,
        source=config.sources[stream.source_index].name,
        rank=stream.rank,
    )
