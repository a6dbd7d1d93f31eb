"""The keys of ``outputs[]``: what routers find where."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import model_validator

from kvbus.config import dynamo, logs
from kvbus.config.dynamo import DynamoPlane
from kvbus.config.endpoints import endpoint_offset
from kvbus.config.logs import KafkaTopic, LogKeys, NatsStream, RedisKeys
from kvbus.config.values import Endpoint, Framing, Int, Name, OutputType, ProfileName, Seconds, Section, Template, key
from kvbus.core.wire import frames
from kvbus.core.wire.profiles import PROFILES


class StreamEndpoints(NamedTuple):
    """The endpoints of one outgoing stream."""

    endpoint: str
    replay_endpoint: str | None
    snapshot_endpoint: str | None


class OutputConfig(Section):
    """One set of outgoing endpoints, with the framing and encoding that its routers understand."""

    name: Name = key("routers", "Metrics label, unique.", example="routers")
    type: OutputType = key("zmq", "What carries it, `zmq` or another part that is installed.", example="zmq")
    endpoint: Endpoint = key(
        "tcp://*:5657", "Where routers subscribe, `tcp://host:port` or `ipc://path`.", example="tcp://*:5657"
    )
    replay_endpoint: Endpoint | None = key(
        None,
        "Where routers ask for a replay (always bound); null: none.",
        example="tcp://*:5658",
        default_text="`tcp://*:5658` if `endpoint` is not set either (and `layout` is not `per_topic`), else null",
    )
    snapshot_endpoint: Endpoint | None = key(
        None,
        "Where routers ask for snapshots by vLLM's proposal (always bound). It implies 24-byte sequence frames on this "
        "output. null: off.",
        example="tcp://*:5659",
    )
    bind: bool = key(True, "false: dial out to a router that binds its SUB.", example=True)
    interpose: bool = key(
        False,
        "true: engines dial `endpoint` too, where routers subscribe: each stream's source has `bind: true` and the "
        "same address. Who publishes is that source, who subscribes is a router.",
        example=False,
    )
    layout: Literal["per_source", "merged", "per_topic"] = key(
        "per_source",
        "per_source: the i-th source (all ranks counted, from 0, or by `slot`) at port + i with a seq of its own, with "
        "`ipc://` at `PATH-i`; merged: one endpoint, one seq; per_topic: one endpoint, each source (rank) under a "
        "topic of its own with a seq of its own, for routers that keep one seq for each topic.",
        example="per_source",
    )
    numbers: Literal["own", "log"] = key(
        "own",
        "own: kvbus numbers what leaves; log: the numbers are those of the log that all sources are read from, so that "
        "routers may go from one kvbus that reads it to another.",
        example="log",
        default_text="`log` where a source is read from a log, else `own`",
    )
    profile: ProfileName = key("vllm", "Whose framing and encoding this output speaks.", example="vllm")
    token_ids: Literal["keep", "drop"] = key(
        "keep",
        "drop: nothing of prompts leaves here, neither token ids nor salts, sessions and keys of images; block hashes "
        "stay. Only for routers that find blocks by the engine's hashes (profile vllm).",
        example="drop",
    )
    topic: Template | None = key(
        None,
        "null: the source's own; else a template of `{model}`, `{worker}`, `{source}`, `{rank}`.",
        example="kv@{worker}@{model}",
    )
    heartbeat: Seconds = key(1.0, "Idle time before an empty batch is sent; 0: off.", example=1.0, unit="s", ge=0)
    replay_framing: Framing = key(
        "auto",
        "Frames of a replay answer; auto: by profile (sglang 3, the others 4).",
        example="auto",
    )
    journal_batches: Int = key(
        10_000, "Published batches kept for replay, per stream.", example=10_000, unit="batches", ge=1
    )
    journal_bytes: Int = key(
        2_097_152,
        "Payload kept for replay, per stream. A router that missed more gets a state snapshot instead.",
        example=2_097_152,
        unit="bytes",
        ge=1,
    )
    queue_batches: Int = key(
        10_000,
        "Batches of a stream waiting for this output before they are dropped.",
        example=10_000,
        unit="batches",
        ge=1,
    )
    send_hwm: Int = key(
        10_000,
        "Batches that a slow router may be behind before its own are dropped.",
        example=10_000,
        unit="batches",
        ge=1,
    )
    send_bytes: Int = key(
        16_777_216,
        "Bytes kept for routers that are behind, per endpoint, or per view where keys have rights; they share them.",
        example=16_777_216,
        unit="bytes",
        ge=1,
    )
    on_subscribe: Literal["state", "nothing"] = key(
        "state",
        "What a router gets first: the live blocks, or nothing (it asks the replay).",
        example="state",
    )
    curve_secret_key_file: Path | None = key(
        None,
        "This output's own key pair (`kvbus keygen`) or secret key; turns CURVE on for all of its endpoints.",
        example="/etc/kvbus/keys/kvbus.key_secret",
    )
    curve_client_keys: Path | None = key(
        None,
        "The public keys of routers that may connect, with names and what each may read: a file with one key a line, "
        "or a directory of key files. An empty one lets nobody in.",
        example="/etc/kvbus/routers",
    )
    curve_server_key_file: Path | None = key(
        None,
        "With `bind: false`: public key of the router that `endpoint` dials.",
        example="/etc/kvbus/keys/router.key",
    )

    dynamo: DynamoPlane | None = key(
        None,
        "With `type: dynamo`: where it is announced, for which workers; null: the defaults.",
        example={"namespace": "dynamo"},
    )

    kafka: KafkaTopic | None = key(
        None,
        "With `type: kafka`: which topic, and as which cluster; null: the defaults. `endpoint` is a broker.",
        example={"topic": "kvbus"},
    )

    nats: NatsStream | None = key(
        None,
        "With `type: nats`: which stream, and as which cluster; null: the defaults. `endpoint` is a server.",
        example={"stream": "kvbus"},
    )

    redis: RedisKeys | None = key(
        None,
        "With `type: redis`: under which keys, and as which cluster; null: the defaults. `endpoint` is the primary, or "
        "a Sentinel.",
        example={"prefix": "kvbus"},
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type") == dynamo.TYPE:
            return dynamo.defaults(data)
        if isinstance(data, dict) and data.get("type") in logs.TYPES:
            return logs.defaults(data)
        if isinstance(data, dict) and "endpoint" not in data and data.get("layout") != "per_topic":
            data = {"replay_endpoint": "tcp://*:5658", **data}
        return data

    @property
    def log(self) -> LogKeys | None:
        """The keys of the log that this output is; None where it is none."""
        if self.type == "kafka":
            return self.kafka or KafkaTopic()
        if self.type == "nats":
            return self.nats or NatsStream()
        return (self.redis or RedisKeys()) if self.type == "redis" else None

    @property
    def framing(self) -> frames.Framing:
        """Frames of a replay answer, with ``auto`` resolved by the profile."""
        if self.replay_framing == "auto":
            return PROFILES[self.profile].framing
        return "3" if self.replay_framing == 3 else "4"

    def stream_endpoints(self, i: int) -> StreamEndpoints:
        """Return the endpoints of the stream in slot ``i``; a merged output has one stream for all slots."""
        n = i if self.layout == "per_source" and self.type not in logs.TYPES else 0
        replay, snapshot = self.replay_endpoint, self.snapshot_endpoint
        return StreamEndpoints(
            endpoint_offset(self.endpoint, n),
            None if replay is None else endpoint_offset(replay, n),
            None if snapshot is None else endpoint_offset(snapshot, n),
        )
