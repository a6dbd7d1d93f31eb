"""The keys of ``outputs[]``: the endpoints for routers, and the form of the streams at these endpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import model_validator

from kvbus.config import dynamo, logs
from kvbus.config.dynamo import DynamoPlane
from kvbus.config.endpoints import endpoint_offset
from kvbus.config.logs import KafkaTopic, LogKeys, NatsStream, RedisKeys
from kvbus.config.values import (
    Endpoint,
    Framing,
    Int,
    Name,
    OutputType,
    ProfileName,
    Seconds,
    Section,
    Size,
    Template,
    key,
)
from kvbus.core.wire import frames
from kvbus.core.wire.profiles import PROFILES


class StreamEndpoints(NamedTuple):
    """The endpoints of one outgoing stream."""

    endpoint: str
    replay_endpoint: str | None
    snapshot_endpoint: str | None


class OutputConfig(Section):
    """The keys of one output: the endpoints for one family of routers, and the form of the streams there."""

    name: Name = key("routers", "Unique name in metrics.", example="routers")
    type: OutputType = key("zmq", "Transport of the stream: `zmq`, or another type that is installed.", example="zmq")
    endpoint: Endpoint = key(
        "tcp://*:5657", "Endpoint that routers subscribe to, `tcp://host:port` or `ipc://path`.", example="tcp://*:5657"
    )
    replay_endpoint: Endpoint | None = key(
        None,
        "Endpoint where routers ask for a replay. kvbus always binds it. null: routers can get no replay.",
        example="tcp://*:5658",
        default_text="`tcp://*:5658` if `endpoint` is not set either (and `layout` is not `per_topic`), else null",
    )
    snapshot_endpoint: Endpoint | None = key(
        None,
        "Endpoint where routers ask for snapshots, by the protocol that is proposed for vLLM. kvbus always "
        "binds it. The output's sequence frames then have 24 bytes. null: off.",
        example="tcp://*:5659",
    )
    bind: bool = key(
        True, "true: kvbus binds `endpoint`. false: kvbus connects to a router that binds its SUB socket.", example=True
    )
    interpose: bool = key(
        False,
        "true: engines connect to `endpoint` too. For each stream there must be a source with `bind: true` "
        "and the same address. A peer that publishes is then this source, and a peer that subscribes is a "
        "router.",
        example=False,
    )
    layout: Literal["per_source", "merged", "per_topic"] = key(
        "per_source",
        "How sources share the output. per_source: each rank of each source has its own port and its own seqs. The"
        " port of slot i is port + i (or `PATH-i`); slots count all ranks of all sources from 0. merged: all "
        "sources share one endpoint and one numbering. per_topic: all sources share one endpoint, and each rank "
        "has its own topic and its own seqs.",
        example="per_source",
    )
    numbers: Literal["own", "log"] = key(
        "own",
        "Seqs of the batches. own: kvbus numbers the batches. log: batches keep the seqs of the log from which "
        "kvbus reads all sources, so that routers can move between two kvbus that read the same log.",
        example="log",
        default_text="`log` if the sources are read from a log, else `own`",
    )
    profile: ProfileName = key("vllm", "Family of routers that read this output.", example="vllm")
    token_ids: Literal["keep", "drop"] = key(
        "keep",
        "keep: kvbus sends token ids. drop: kvbus sends block hashes, but no token ids, salts, sessions or image "
        "keys. Use drop only for routers that find blocks by the engine's hashes (profile vllm).",
        example="drop",
    )
    topic: Template | None = key(
        None,
        "Topic of the output: a template with `{model}`, `{worker}`, `{source}`, `{rank}`. null: the source's own "
        "topic.",
        example="kv@{worker}@{model}",
    )
    heartbeat: Seconds = key(
        1.0, "Time without batches after which kvbus sends an empty batch. 0: off.", example=1.0, unit="s", ge=0
    )
    replay_framing: Framing = key(
        "auto",
        "Number of frames of a replay message. auto: 3 for the profile sglang, 4 for all other profiles.",
        example="auto",
    )
    journal_batches: Int = key(
        10_000,
        "Maximum number of published batches that each stream keeps for replays.",
        example=10_000,
        unit="batches",
        ge=1,
    )
    journal_bytes: Size = key(
        2_097_152,
        "Maximum size of the batches that each stream keeps for replays. A router that missed more gets the state "
        "instead.",
        example=2_097_152,
        unit="bytes",
        ge=1,
    )
    queue_batches: Int = key(
        10_000,
        "Maximum number of batches of a stream that wait for this output. kvbus drops and counts further batches.",
        example=10_000,
        unit="batches",
        ge=1,
    )
    send_hwm: Int = key(
        10_000,
        "Maximum number of batches that wait for a slow router. Beyond it, kvbus drops and counts the oldest "
        "batches that wait for this router.",
        example=10_000,
        unit="batches",
        ge=1,
    )
    send_bytes: Size = key(
        16_777_216,
        "Maximum size of the batches that wait for slow routers: for all routers of an endpoint together, or,"
        " if keys have limited rights, for all routers with the same rights.",
        example=16_777_216,
        unit="bytes",
        ge=1,
    )
    on_subscribe: Literal["state", "nothing"] = key(
        "state",
        "What a router gets when it subscribes. state: the live blocks. nothing: the router requests a replay itself.",
        example="state",
    )
    curve_secret_key_file: Path | None = key(
        None,
        "The output's own secret key (`kvbus keygen`). It turns on CURVE for all endpoints of the output.",
        example="/etc/kvbus/keys/kvbus.key_secret",
    )
    curve_client_keys: Path | None = key(
        None,
        "Public keys of routers that may connect, with names and rights: a file with one key on each line, or a "
        "directory of key files. With an empty list no router can connect.",
        example="/etc/kvbus/routers",
    )
    curve_server_key_file: Path | None = key(
        None,
        "With `bind: false`: public key of the router that kvbus connects to.",
        example="/etc/kvbus/keys/router.key",
    )

    dynamo: DynamoPlane | None = key(
        None,
        "With `type: dynamo`: where kvbus announces the stream to Dynamo, and for which workers. null: the defaults.",
        example={"namespace": "dynamo"},
    )

    kafka: KafkaTopic | None = key(
        None,
        "With `type: kafka`: the settings of the log, such as topic and cluster. `outputs[].endpoint` is a broker."
        " null: the defaults.",
        example={"topic": "kvbus"},
    )

    nats: NatsStream | None = key(
        None,
        "With `type: nats`: the settings of the log, such as stream and cluster. `outputs[].endpoint` is a server."
        " null: the defaults.",
        example={"stream": "kvbus"},
    )

    redis: RedisKeys | None = key(
        None,
        "With `type: redis`: the settings of the log, such as key prefix and cluster. `outputs[].endpoint` is the "
        "primary or a Sentinel. null: the defaults.",
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
        """The settings of the log to which this output writes; None if it does not write to a log."""
        if self.type == "kafka":
            return self.kafka or KafkaTopic()
        if self.type == "nats":
            return self.nats or NatsStream()
        return (self.redis or RedisKeys()) if self.type == "redis" else None

    @property
    def framing(self) -> frames.Framing:
        """The number of frames of a replay message. For ``auto`` it depends on the profile."""
        if self.replay_framing == "auto":
            return PROFILES[self.profile].framing
        return "3" if self.replay_framing == 3 else "4"

    def stream_endpoints(self, i: int) -> StreamEndpoints:
        """Return the endpoints at which this output sends the stream of the source in slot ``i``.

        They depend on the slot only with ``layout: per_source``.
        """
        n = i if self.layout == "per_source" and self.type not in logs.TYPES else 0
        replay, snapshot = self.replay_endpoint, self.snapshot_endpoint
        return StreamEndpoints(
            endpoint_offset(self.endpoint, n),
            None if replay is None else endpoint_offset(replay, n),
            None if snapshot is None else endpoint_offset(snapshot, n),
        )
