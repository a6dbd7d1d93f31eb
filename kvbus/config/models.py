"""The configuration as a whole, and the streams that follow from it."""

from __future__ import annotations

import io
import socket
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ModelWrapValidatorHandler, model_validator
from ruamel.yaml import YAML

from kvbus.config import logs
from kvbus.config.endpoints import parse_address
from kvbus.config.front import Front, FrontGrpc
from kvbus.config.outputs import OutputConfig
from kvbus.config.sources import FoundSource, SourceConfig
from kvbus.config.values import (
    BlockSize,
    Endpoint,
    HttpAddress,
    HttpHosts,
    Int,
    LogLevel,
    Media,
    Name,
    ProfileName,
    Seconds,
    Section,
    StateDir,
    Text,
    key,
    render_template,
)


class Limits(Section):
    """Limits of what an engine or a router may make kvbus hold."""

    max_frame_bytes: Int = key(
        67_108_864,
        "Largest frame accepted from an engine; a larger one costs the connection, which is made again.",
        example=67_108_864,
        unit="bytes",
        ge=1024,
        le=2**31 - 1,
    )
    max_frames: Int = key(16, "Most frames in one message.", example=16, unit="frames", ge=5, le=1024)
    max_events: Int = key(65_536, "Most events in one batch.", example=65_536, unit="events", ge=1)
    max_sources: Int = key(
        1024,
        "Most sources, all ranks counted, those that are gone among them: each keeps its number (its rank on a merged "
        "output, its seq under its topic) until another one needs the place. Further ones that are found are left out.",
        example=1024,
        unit="sources",
        ge=1,
        le=65_536,
    )
    max_blocks: Int = key(
        20_000_000,
        "Most live blocks of one source, coarse ones and tails that are left out among them; at the limit stores are "
        "refused.",
        example=20_000_000,
        unit="blocks",
        ge=1,
    )
    max_index_bytes: Int = key(
        4_294_967_296,
        "Most memory that the blocks of one source may take, as kvbus estimates it; at the limit stores are refused.",
        example=4_294_967_296,
        unit="bytes",
        ge=1,
    )
    max_groups: Int = key(
        64,
        "Most KV cache groups of one source (hybrid models have a handful); stores of further ones are refused.",
        example=64,
        unit="groups",
        ge=1,
        le=4096,
    )
    max_held_bytes: Int = key(
        268_435_456,
        "Payload in the reorder buffer of each source; at the limit the newest are dropped, and asked for again.",
        example=268_435_456,
        unit="bytes",
        ge=1,
    )
    max_request_bytes: Int = key(
        65_536,
        "Largest frame accepted from a router (subscriptions, replay and snapshot requests); a larger one costs the "
        "connection.",
        example=65_536,
        unit="bytes",
        ge=1024,
        le=2**31 - 1,
    )
    max_views: Int = key(
        64,
        "Most different rights of the owners of keys, on all outputs together: for each kvbus keeps streams, and the "
        "blocks that may be read. A list with more is refused.",
        example=64,
        unit="views",
        ge=1,
        le=4096,
    )
    max_replay_sessions: Int = key(
        64, "Replay answers being sent at once, per output.", example=64, unit="sessions", ge=1
    )


class Interpose(Section):
    """An engine that dials, and routers that dial the address in the engine's own flags."""

    name: Name = key("engine", "Metrics label of the engine's source.", example="engine")
    endpoint: Endpoint = key(
        "tcp://127.0.0.1:5557",
        "What the engine's flag says, which the engine dials and routers derive their address from; kvbus listens "
        "there, and by the socket type that a peer names it knows an engine from a router. Rank r is at port + r.",
        example="tcp://127.0.0.1:5557",
    )
    data_parallel_size: Int = key(1, "Ranks of the engine.", example=1, unit="ranks", ge=1, le=4096)
    engine_replay_endpoint: Endpoint | None = key(
        None,
        "The engine's replay (`replay_endpoint` in vLLM's and SGLang's `--kv-events-config`), which it always binds: "
        "another port than `replay_endpoint` here. null: it has none, and every gap is lost.",
        example="tcp://127.0.0.1:5658",
    )
    profile: ProfileName = key("vllm", "Whose framing and encoding these routers read.", example="dynamo")
    replay_endpoint: Endpoint | None = key(
        None,
        "Where routers ask kvbus for a replay: the address that they derive, or are given. null: none.",
        example="tcp://127.0.0.1:5558",
    )

    def parts(self) -> tuple[SourceConfig, OutputConfig]:
        """Return the source and the output that this is short for."""
        source = SourceConfig(
            name=self.name,
            endpoint=self.endpoint,
            replay_endpoint=self.engine_replay_endpoint,
            bind=True,
            data_parallel_size=self.data_parallel_size,
        )
        output = OutputConfig(
            name="interposed",
            endpoint=self.endpoint,
            replay_endpoint=self.replay_endpoint,
            interpose=True,
            profile=self.profile,
        )
        return source, output


def as_written(text: str, source: int, output: int) -> str:
    """Name the keys of ``interpose`` in place of those of its source and its output, which nobody has written.

    Args:
        text: what is said of the configuration.
        source: the source's position.
        output: the output's position.
    """
    text = text.replace(f"sources[{source}].replay_endpoint", "interpose.engine_replay_endpoint")
    return text.replace(f"sources[{source}]", "interpose").replace(f"outputs[{output}]", "interpose")


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
        topic: what the topic begins with.
        clears: what the engine's AllBlocksCleared speaks of.
        duplicates: what its removals of blocks with copies take away.
        index: the stream's slot; ``OutputConfig.stream_endpoints(index)`` are its endpoints on an output.
        found: who found its engine where; empty if the configuration names it.
        interposed: whether routers dial ``endpoint`` too.
        shared: whether another source has the same ``endpoint`` or ``replay_endpoint``.
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
    duplicates: Literal["count", "ignore", "last"]
    index: int
    found: str = ""
    interposed: bool = False
    shared: bool = False

    @property
    def log_fields(self) -> dict[str, str | int]:
        """Fields of a log line about this publisher."""
        return {"source": self.label, "rank": self.rank}


class Config(Section):
    """The whole configuration. `kvbus.config.load` reads it and checks it as a whole."""

    model: Text | None = key(None, "`{model}` in topics; needed only where a topic uses it.", example="Qwen/Qwen3-32B")
    worker: Text = key(socket.gethostname, "`{worker}` in topics.", example="pod-a", default_text="the host name")
    block_size: BlockSize = key(
        "auto", "Block size on every output; auto: learned per source.", example=16, unit="tokens"
    )
    duplicates: Literal["count", "ignore", "last"] = key(
        "count",
        "What removes a block that the engine has stored several times. count: as many removals as stores (every "
        "release of vLLM). last: one removal, because the engine removes only the last copy (a build with vllm#55092). "
        "ignore: one removal, because the engine announces live blocks again (requests with "
        "`kv_cache_report_mode=full`).",
        example="count",
    )
    groups: Literal["prefix", "all"] = key(
        "prefix",
        "prefix: only groups that carry prefixes (full, MLA, sink attention, or no group); all: every group.",
        example="prefix",
    )
    without_media: Media = key(
        (),
        "Media whose blocks are left out. LMCache announces what it stores on the CPU and never what it evicts "
        "(LMCache#5076): such blocks would stay for good. `expiring_media` keeps them for a while.",
        example=["CPU"],
    )
    expiring_media: Media = key(
        (),
        "Media on which a block is taken for gone when the engine has not announced it, or one behind it, for "
        "`expire_after`. For LMCache, in place of `without_media`.",
        example=["CPU"],
    )
    expire_after: Seconds = key(3600.0, "How long a block of `expiring_media` stays.", example=3600, unit="s", gt=0)
    orphans: Literal["pass", "drop"] = key(
        "pass", "Stores whose parent is unknown; counted either way.", example="pass"
    )
    on_lost: Literal["clear", "keep"] = key(
        "clear", "The source's blocks after a gap that no replay fills.", example="clear"
    )
    source_timeout: Seconds = key(
        30.0,
        "Time without the engine's connection before its blocks are cleared downstream.",
        example=30,
        unit="s",
        gt=0,
    )
    discovery_grace: Seconds = key(
        10.0,
        "Time after which a found engine that its discovery no longer lists leaves; one that is back by then was never "
        "away.",
        example=10.0,
        unit="s",
        ge=0,
    )
    replay_timeout: Seconds = key(
        2.0, "Time without progress before a replay answer is given up.", example=2.0, unit="s", gt=0
    )
    probe_interval: Seconds = key(
        1.0,
        "Idle time before the engine is asked whether its last batches were lost (doubling while it stays idle); "
        "0: off.",
        example=1.0,
        unit="s",
        ge=0,
    )
    reorder_batches: Int = key(
        20_000,
        "Batches in the reorder buffer of each source, which wait while a gap is filled.",
        example=20_000,
        unit="batches",
        ge=1,
    )
    interpose: Interpose | None = key(
        None,
        "One port for an engine that dials and routers that dial it: short for a source with `bind` and an output with "
        "`interpose`, which `kvbus check` shows.",
        example={"endpoint": "tcp://127.0.0.1:5557"},
    )
    sources: tuple[SourceConfig, ...] = key(
        (), "The engines; at least one.", example=[{"endpoint": "tcp://127.0.0.1:5557"}]
    )
    outputs: tuple[OutputConfig, ...] = key(
        (), "The outgoing streams; at least one.", example=[{"endpoint": "tcp://*:5657"}]
    )
    front: Front | None = key(
        None,
        "Stand before an engine's HTTP API: whoever asks there where its events are gets kvbus's endpoints, and "
        "everything else is handed on; null: off.",
        example={"listen": "0.0.0.0:8000", "engine": "http://127.0.0.1:8001"},
    )
    front_grpc: FrontGrpc | None = key(
        None,
        "The same for an engine's gRPC API (`vllm.Control/GetKvEventSources`); extra `kvbus[grpc]`; null: off.",
        example={"listen": "127.0.0.1:50051", "engine": "127.0.0.1:50052"},
    )
    http: HttpAddress | None = key(
        "127.0.0.1:9477",
        "Address of the status page, probes, `/metrics`, `/events` and what else HTTP.md has; port 0: any "
        "free port; null: no HTTP. What shows token ids is given to loopback and to principals alone, whatever the "
        "address.",
        example="127.0.0.1:9477",
    )
    http_allowed_hosts: HttpHosts = key(
        (),
        "Further names by which token ids may be asked for (the Host header), beside localhost, 127.0.0.0/8 and [::1]; "
        "still from loopback alone.",
        example=["kvbus.example.internal"],
    )
    http_open: Literal["status", "probes"] = key(
        "status",
        "What everybody who reaches the HTTP port may read. status: all that shows no token ids and no hashes; probes: "
        "the probes and the files of the page, which hold nothing of the bus, and the rest is for loopback and for "
        "principals.",
        example="probes",
    )
    http_tokens_file: Path | None = key(
        None,
        "Bearer tokens that may read over HTTP from elsewhere: a name and a hash a line, as `kvbus token` prints them.",
        example="/etc/kvbus/http/tokens",
    )
    http_tls_certificate_file: Path | None = key(
        None,
        "The HTTP port's certificate and its chain, PEM; the port then speaks TLS alone.",
        example="/etc/kvbus/tls/tls.crt",
    )
    http_tls_key_file: Path | None = key(
        None, "The secret key of that certificate, PEM, not encrypted.", example="/etc/kvbus/tls/tls.key"
    )
    state_dir: StateDir | None = key(
        "auto",
        "Directory that keeps seq and state over a restart of kvbus. auto: one of its own in `$STATE_DIRECTORY`, else "
        "in memory (`$XDG_RUNTIME_DIR`, `/dev/shm`), else on disk (`/var/lib/kvbus`, `$XDG_STATE_HOME`), where 1 GiB "
        "is free; null: none, and a restart loses what the engine's replay no longer has.",
        example="auto",
    )
    state_sync: Literal["none", "batch"] = key(
        "none",
        "What of `state_dir` outlives a power cut. none: no seq is used twice, and routers are cleared after it; "
        "batch: the state, because kvbus waits for the disk before it sends anything.",
        example="batch",
    )
    shutdown_timeout: Seconds = key(
        5.0,
        "Time that routers get, at the end, to take what is queued for them and the replay answers under way.",
        example=5.0,
        unit="s",
        ge=0,
    )
    reload: Literal["auto", "signal"] = key(
        "auto",
        "When kvbus reads the configuration file again, for `log_level` and to name keys that take a restart: auto: "
        "once it has changed (looked at every `key_reload_interval`), and at SIGHUP; signal: at SIGHUP only.",
        example="signal",
    )
    key_reload_interval: Seconds = key(
        10.0,
        "How often key files, allow-lists and (`reload: auto`) the configuration file are looked at for changes; 0: at "
        "SIGHUP only.",
        example=10.0,
        unit="s",
        ge=0,
    )
    log_level: LogLevel = key("info", "Least severe log line written.", example="info")
    log_format: Literal["auto", "json", "text"] = key(
        "auto", "auto: text on a terminal, else JSON lines.", example="json"
    )
    limits: Limits = key(Limits(), "Bounds on what a peer may make kvbus hold.", example={"max_frames": 16})

    @model_validator(mode="wrap")
    @classmethod
    def _interposed(cls, data: Any, valid: ModelWrapValidatorHandler[Config]) -> Config:
        config = valid(data)
        if config.interpose is None:
            return config.model_copy(update={"outputs": logs.numbered(config)})
        source, output = config.interpose.parts()
        both = {"sources": (*config.sources, source), "outputs": (*config.outputs, output)}
        return config.model_copy(update={"interpose": None, **both})

    @property
    def log_numbers(self) -> bool:
        """Whether routers get the numbers of a log."""
        return any(output.numbers == "log" for output in self.outputs)

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
            ranks = source.rank_slots(slot)
            out += [(source_index, rank, at) for rank, at in ranks]
            slot += len(ranks)
        return out

    def streams(self) -> list[SourceStream]:
        """Return every engine publisher: one for each source and rank, in order."""
        out: list[SourceStream] = []
        interposed = any(output.interpose for output in self.outputs)
        for source_index, rank, slot in self.slots():
            source = self.sources[source_index]
            several = source.data_parallel_size > 1
            endpoint, replay, snapshot = source.rank_endpoints(rank)
            out.append(
                SourceStream(
                    label=f"{source.name}/{rank}" if several else source.name,
                    source_index=source_index,
                    rank=rank,
                    endpoint=endpoint,
                    replay_endpoint=replay,
                    snapshot_endpoint=snapshot,
                    bind=source.bind,
                    topic=source.topic.encode(),
                    clears=source.clears,
                    duplicates=self.duplicates,
                    index=slot,
                    found=source.where if isinstance(source, FoundSource) else "",
                    interposed=interposed and source.bind,
                )
            )
        dialled = [each for each in out if not each.bind]
        readers = Counter(at for each in dialled for at in _sockets(each))
        return [
            replace(stream, shared=not stream.bind and any(readers[at] > 1 for at in _sockets(stream)))
            for stream in out
        ]

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


def _sockets(stream: SourceStream) -> set[str]:
    """Return where the engine's live stream and its replay are, in one spelling of each address."""
    return {at.replace("//localhost:", "//127.0.0.1:") for at in (stream.endpoint, stream.replay_endpoint) if at}


def render_topic(template: str, stream: SourceStream, config: Config) -> bytes:
    """Return the topic frame of one stream: the template with its placeholders filled in."""
    return topic_for(template, config, config.sources[stream.source_index].name, stream.rank)


def topic_for(template: str, config: Config, source: str, rank: int) -> bytes:
    """Return the topic frame for a source of this name, which need not be in the configuration."""
    return render_template(template, model=config.model or "", worker=config.worker, source=source, rank=rank)
