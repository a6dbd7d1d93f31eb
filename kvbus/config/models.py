"""The model of the complete configuration, and the streams of the sources that it describes."""

from __future__ import annotations

import contextlib
import io
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import PrivateAttr, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource
from ruamel.yaml import YAML

from kvbus.config.endpoints import endpoint_offset, parse_address
from kvbus.config.front import Front, FrontGrpc
from kvbus.config.layers import Layers, as_lists
from kvbus.config.limits import Limits
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


class Interpose(Section):
    """A port to which both an engine and its routers connect. It is the address in the engine's own flags."""

    name: Name = key("engine", "Name of the engine's source in metrics.", example="engine")
    endpoint: Endpoint = key(
        "tcp://127.0.0.1:5557",
        "Address in the engine's flags, to which the engine and its routers connect. kvbus listens there, and"
        " distinguishes engine and routers by their socket types. Rank r uses port + r.",
        example="tcp://127.0.0.1:5557",
    )
    data_parallel_size: Int = key(
        1, "Number of the engine's data-parallel ranks.", example=1, unit="ranks", ge=1, le=4096
    )
    engine_replay_endpoint: Endpoint | None = key(
        None,
        "The engine's replay endpoint (`replay_endpoint` in `--kv-events-config`). The engine always binds it, so "
        "its port differs from `replay_endpoint` here. null: the engine has none, so missing batches are lost.",
        example="tcp://127.0.0.1:5658",
    )
    profile: ProfileName = key("vllm", "Family of routers that read this port.", example="dynamo")
    replay_endpoint: Endpoint | None = key(
        None,
        "Endpoint where routers ask kvbus for a replay. null: routers can get no replay.",
        example="tcp://127.0.0.1:5558",
    )

    def parts(self) -> tuple[SourceConfig, OutputConfig]:
        """Return the source and the output for which this section is a short form."""
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


@dataclass(frozen=True, slots=True)
class SourceStream:
    """The stream of one engine publisher, which is one rank of a source.

    Attributes:
        label: the label in metrics: the source's name, or ``name/rank`` if the source has several ranks.
        source_index: the position of the source in ``Config.sources``.
        rank: the data-parallel rank within the source.
        endpoint: the endpoint of the rank's live stream.
        replay_endpoint: the endpoint for the rank's replays; None without one.
        snapshot_endpoint: the endpoint for the rank's snapshots; None without one.
        bind: whether kvbus binds ``endpoint``, and the engine connects to it.
        topic: the prefix of the engine's topic.
        clears: the blocks that an AllBlocksCleared of the engine removes. See ``SourceConfig.clears``.
        duplicates: how many removals end a block that was stored several times. See ``Config.duplicates``.
        index: the slot of the source. ``OutputConfig.stream_endpoints(index)`` returns the endpoints at which an output
            sends this stream.
        found: the ``discover`` entry and the place where it found the engine; empty for a configured source.
        interposed: whether routers connect to ``endpoint`` too.
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
        """The structured fields of a log line about this source."""
        return {"source": self.label, "rank": self.rank}


class Config(BaseSettings, Section):  # type: ignore[misc]  # the kinds of model_config differ, and Section's values win
    """The complete configuration. `kvbus.config.load` reads it and checks it for contradictions."""

    model: Text | None = key(
        None,
        "Name of the model. It replaces `{model}` in topics, and is needed only if a topic uses it.",
        example="Qwen/Qwen3-32B",
    )
    worker: Text = key(
        socket.gethostname,
        "Name of this worker. It replaces `{worker}` in topics.",
        example="pod-a",
        default_text="the host name",
    )
    block_size: BlockSize = key(
        "auto",
        "Number of tokens in a block on every output. auto: each source's own block size, which kvbus learns from "
        "the events.",
        example=16,
        unit="tokens",
    )
    duplicates: Literal["count", "ignore", "last"] = key(
        "count",
        "How many removals end a block that the engine has stored several times. count: as many removals as "
        "stores (every release of vLLM). last: one removal, because the engine removes only the last copy (a "
        "build with vllm#55092). ignore: one removal, because the engine announces live blocks again (requests "
        "with `kv_cache_report_mode=full`).",
        example="count",
    )
    groups: Literal["prefix", "all"] = key(
        "prefix",
        "KV-cache groups whose blocks kvbus forwards. prefix: groups whose blocks form prefixes of prompts (full, "
        "MLA or sink attention, or no group). all: every group.",
        example="prefix",
    )
    without_media: Media = key(
        (),
        "Media whose blocks kvbus filters out. For example, LMCache announces the blocks that it stores on the CPU, "
        "but never their eviction, unless its server keeps a log of events. Routers would keep these blocks for "
        "ever. `expiring_media` keeps them for a limited time instead.",
        example=["CPU"],
    )
    expiring_media: Media = key(
        (),
        "Media whose blocks expire. kvbus removes such a block if the engine has announced neither the block nor "
        "one of its descendants for `expire_after`. Use it instead of `without_media`.",
        example=["CPU"],
    )
    expire_after: Seconds = key(
        3600.0,
        "Time without an announcement after which a block on a medium of `expiring_media` expires.",
        example=3600,
        unit="s",
        gt=0,
    )
    orphans: Literal["pass", "drop"] = key(
        "pass",
        "What happens to a stored block whose parent kvbus does not know. pass: kvbus forwards it. drop: kvbus "
        "filters it out. kvbus counts such blocks in both cases.",
        example="pass",
    )
    on_lost: Literal["clear", "keep"] = key(
        "clear",
        "What happens to a source's blocks after a gap that no replay fills. clear: kvbus clears them at the "
        "routers. keep: routers keep them.",
        example="clear",
    )
    source_timeout: Seconds = key(
        30.0,
        "Time without a connection to the engine after which kvbus clears the engine's blocks at the routers.",
        example=30,
        unit="s",
        gt=0,
    )
    discovery_grace: Seconds = key(
        10.0,
        "Time after which a discovered engine is removed if its discovery no longer lists it. If the engine is "
        "listed again earlier, nothing happens.",
        example=10.0,
        unit="s",
        ge=0,
    )
    replay_timeout: Seconds = key(
        2.0,
        "Time without progress of the engine's answer after which kvbus gives up a replay request.",
        example=2.0,
        unit="s",
        gt=0,
    )
    probe_interval: Seconds = key(
        1.0,
        "Time without batches after which kvbus asks the engine whether batches were lost. The time doubles while "
        "the engine sends nothing. 0: off.",
        example=1.0,
        unit="s",
        ge=0,
    )
    reorder_batches: Int = key(
        20_000,
        "Maximum number of batches of a source that wait in kvbus while earlier batches are missing.",
        example=20_000,
        unit="batches",
        ge=1,
    )
    interpose: Interpose | None = key(
        None,
        "One port that an engine and its routers both connect to. This is short for a source with `bind` and an "
        "output with `interpose`; `kvbus check` shows both.",
        example={"endpoint": "tcp://127.0.0.1:5557"},
    )
    sources: tuple[SourceConfig, ...] = key(
        (),
        "The engines that kvbus reads. At least one entry is needed.",
        example=[{"endpoint": "tcp://127.0.0.1:5557"}],
    )
    outputs: tuple[OutputConfig, ...] = key(
        (),
        "The outputs to which routers connect. At least one entry is needed.",
        example=[{"endpoint": "tcp://*:5657"}],
    )
    front: Front | None = key(
        None,
        "Proxy in front of an engine's HTTP API. A client that asks for the endpoints of the engine's events gets "
        "the endpoints of kvbus. kvbus passes on every other request. null: off.",
        example={"listen": "0.0.0.0:8000", "engine": "http://127.0.0.1:8001"},
    )
    front_grpc: FrontGrpc | None = key(
        None,
        "Proxy in front of the gRPC API of vLLM, SGLang or TensorRT-LLM. A client that asks for the endpoints of "
        "the engine's events gets the endpoints of kvbus. Needs the extra `kvbus[grpc]`. null: off.",
        example={"listen": "127.0.0.1:50051", "engine": "127.0.0.1:50052"},
    )
    http: HttpAddress | None = key(
        "127.0.0.1:9477",
        "Address of the HTTP port: status page, probes, `/metrics` and the paths in HTTP.md. Port 0 is any free "
        "port. null: no HTTP. Whatever the address, only programs on this machine and clients with a bearer token "
        "may read token ids.",
        example="127.0.0.1:9477",
    )
    http_allowed_hosts: HttpHosts = key(
        (),
        "Further values of the Host header that a request for token ids may have, beside localhost, 127.0.0.0/8 and "
        "[::1]. The request must still come from loopback.",
        example=["kvbus.example.internal"],
    )
    http_open: Literal["status", "probes"] = key(
        "status",
        "What every client that reaches the HTTP port may read. status: every path without token ids and hashes. "
        "probes: the probes and the files of the status page. All other paths need a request from loopback or a "
        "bearer token.",
        example="probes",
    )
    http_tokens_file: Path | None = key(
        None,
        "File of bearer tokens for HTTP, with a name and a hash on each line, as `kvbus token` prints them.",
        example="/etc/kvbus/http/tokens",
    )
    http_tls_certificate_file: Path | None = key(
        None,
        "Certificate and chain of the HTTP port, PEM. The port then speaks only TLS.",
        example="/etc/kvbus/tls/tls.crt",
    )
    http_tls_key_file: Path | None = key(
        None, "Private key of `http_tls_certificate_file`, PEM, not encrypted.", example="/etc/kvbus/tls/tls.key"
    )
    state_dir: StateDir | None = key(
        "auto",
        "Directory that keeps seqs and state over a restart of kvbus. auto: a directory of its own in the first of "
        "these with 1 GiB free: `$STATE_DIRECTORY`, memory (`$XDG_RUNTIME_DIR`, `/dev/shm`), disk "
        "(`/var/lib/kvbus`, `$XDG_STATE_HOME`). null: kvbus keeps no state, so a restart loses the blocks that "
        "the engine no longer replays.",
        example="auto",
    )
    state_sync: Literal["none", "batch"] = key(
        "none",
        "What survives a power cut. none: only the numbering, so that kvbus uses no seq twice; routers' blocks are"
        " cleared. batch: the complete state, because kvbus waits for the disk before it sends a batch.",
        example="batch",
    )
    shutdown_timeout: Seconds = key(
        5.0,
        "Maximum time at shutdown in which kvbus still sends queued batches and unfinished replay answers to routers.",
        example=5.0,
        unit="s",
        ge=0,
    )
    reload: Literal["auto", "signal"] = key(
        "auto",
        "When kvbus reads the configuration file again, to apply `log_level` and to report keys that need a restart. "
        "auto: after a change (checked every `key_reload_interval`) and at SIGHUP. signal: only at SIGHUP.",
        example="signal",
    )
    key_reload_interval: Seconds = key(
        10.0,
        "Interval at which key files, allow-lists and (with `reload: auto`) the configuration file are checked for "
        "changes. 0: only at SIGHUP.",
        example=10.0,
        unit="s",
        ge=0,
    )
    log_level: LogLevel = key("info", "Minimum severity of log lines.", example="info")
    log_format: Literal["auto", "json", "text"] = key(
        "auto", "Format of log lines. auto: text on a terminal, else JSON.", example="json"
    )
    limits: Limits = key(
        Limits(), "Limits on the memory and other resources that a peer can make kvbus use.", example={"max_frames": 16}
    )

    _interpose_at: tuple[int, int] | None = PrivateAttr(None)
    """The positions of the source and the output that ``interpose`` has added; None without ``interpose``."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the layers that `load` passes as ``layers``, the strongest first.

        Without ``layers``, the values are those of the call alone: code and tests that build a configuration read
        neither the environment nor a file.
        """
        del env_settings, dotenv_settings, file_secret_settings
        layers = cast("InitSettingsSource", init_settings).init_kwargs.get("layers")
        return layers.sources(settings_cls) if isinstance(layers, Layers) else (init_settings,)

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, data: Any) -> Any:
        return as_lists(cls, data)

    def completed(self) -> Config:
        """Return the configuration with the source and output of ``interpose``, and the default of ``numbers``.

        The default of ``numbers`` is ``log`` if a source is read from a log, else ``own``.
        """
        if self.interpose is None:
            if all(source.log_settings is None for source in self.sources):
                return self
            outputs = tuple(
                each if "numbers" in each.model_fields_set else each.model_copy(update={"numbers": "log"})
                for each in self.outputs
            )
            return self.model_copy(update={"outputs": outputs})
        source, output = self.interpose.parts()
        both = {"sources": (*self.sources, source), "outputs": (*self.outputs, output)}
        made = self.model_copy(update={"interpose": None, **both})
        made._interpose_at = len(self.sources), len(self.outputs)  # noqa: SLF001 - of this class
        return made

    def as_written(self, text: str) -> str:
        """Replace key paths in a text by the key paths that the user has written.

        ``interpose`` adds a source and an output, whose keys are not in the user's file. Their key paths are replaced
        by those of ``interpose``.
        """
        if self._interpose_at is None:
            return text
        source, output = self._interpose_at
        text = text.replace(f"sources[{source}].replay_endpoint", "interpose.engine_replay_endpoint")
        text = text.replace(f"sources[{source}].bind", "interpose.endpoint")
        return text.replace(f"sources[{source}]", "interpose").replace(f"outputs[{output}]", "interpose")

    @property
    def log_numbers(self) -> bool:
        """Whether outgoing batches keep the seqs of the log that the sources are read from."""
        return any(output.numbers == "log" for output in self.outputs)

    @property
    def http_address(self) -> tuple[str, int] | None:
        """The host and port on which the HTTP server is to listen; None without a server."""
        return None if self.http is None else parse_address(self.http)

    def sections(self, sources: Iterable[SourceConfig]) -> list[str]:
        """Return the key path of each of these sources in the configuration, such as ``sources[0]``.

        A discovered engine has the path of the ``sources`` entry that has found it.
        """
        positions = {source.name: index for index, source in enumerate(self.sources)}
        names = [each.where.partition(":")[0] if isinstance(each, FoundSource) else each.name for each in sources]
        return [f"sources[{positions.get(name, '')}]" for name in names]

    def slots(self) -> list[tuple[int, int, int]]:
        """Return a tuple for each rank of each source: the source's position in ``sources``, the rank, the slot."""
        out: list[tuple[int, int, int]] = []
        slot = 0
        for source_index, source in enumerate(self.sources):
            slot = slot if source.slot is None else source.slot
            ranks = source.rank_slots(slot)
            out += [(source_index, rank, at) for rank, at in ranks]
            slot += len(ranks)
        return out

    def streams(self) -> list[SourceStream]:
        """Return the stream of every rank of every source, in order."""
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
        """Return the configuration, including defaults, as JSON types."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Return the configuration, including defaults, as YAML. `load` reads the same configuration from it."""
        yaml = YAML(typ="safe", pure=True)
        yaml.default_flow_style = False
        yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
        buffer = io.StringIO()
        yaml.dump(self.to_dict(), buffer)
        return buffer.getvalue()


def _sockets(stream: SourceStream) -> set[str]:
    """Return the endpoints of the engine's live stream and replays, with ``localhost`` written as ``127.0.0.1``."""
    return {at.replace("//localhost:", "//127.0.0.1:") for at in (stream.endpoint, stream.replay_endpoint) if at}


def further_ranks(config: Config) -> dict[int, SourceStream]:
    """Return, for each source, a stream at the port after its last rank. The key is the source's position.

    kvbus looks there for a rank of the engine that is not configured. A source is left out if that port is an endpoint
    of this configuration, or if the source has no fixed ports.
    """
    streams, found = config.streams(), {}
    ports = {at.rpartition(":")[2] for stream in streams for at in _endpoints(config, stream)}
    for index, source in enumerate(config.sources):
        if source.bind or source.discover is not None or isinstance(source, FoundSource):
            continue
        size = source.data_parallel_size
        with contextlib.suppress(ValueError):
            endpoint = endpoint_offset(source.endpoint, size)
            if endpoint.startswith("tcp://") and endpoint.rpartition(":")[2] not in ports:
                last = next(each for each in reversed(streams) if each.source_index == index)
                found[index] = replace(last, endpoint=endpoint, replay_endpoint=None, snapshot_endpoint=None, rank=size)
    return found


def _endpoints(config: Config, stream: SourceStream) -> Iterator[str]:
    """Yield the endpoints at which kvbus reads a source's stream, and those at which the outputs send it."""
    ours = [each for output in config.outputs for each in output.stream_endpoints(stream.index)]
    yield from filter(None, (stream.endpoint, stream.replay_endpoint, stream.snapshot_endpoint, *ours))


def render_topic(template: str, stream: SourceStream, config: Config) -> bytes:
    """Return the topic frame of one stream: the template with its placeholders filled in."""
    return topic_for(template, config, config.sources[stream.source_index].name, stream.rank)


def topic_for(template: str, config: Config, source: str, rank: int) -> bytes:
    """Return the topic frame for a source and a rank. The configuration does not have to contain the source."""
    return render_template(template, model=config.model or "", worker=config.worker, source=source, rank=rank)
