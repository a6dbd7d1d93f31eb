"""The keys of ``sources[]``: where an engine's events are, or who finds engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from kvbus.config.endpoints import endpoint_offset
from kvbus.config.values import ApiUrl, Discover, Endpoint, Int, Name, Section, Text, key


@dataclass(frozen=True, slots=True)
class FoundRank:
    """One publisher of an engine that was found."""

    rank: int
    endpoint: str
    replay_endpoint: str | None


class SourceConfig(Section):
    """One engine: its live stream, its replay, and how many data-parallel ranks it has."""

    name: Name = key("engine", "Metrics label, unique; rank r of several is `NAME/r`.", example="engine")
    discover: Discover | None = key(
        None,
        "Find engines in place of `endpoint`: one of the kinds below, with its settings. Each engine found is a source "
        "under its own name; the other keys here are for all of them.",
        example={"file": {"path": "/etc/kvbus/engines.yaml"}},
    )
    endpoint: Endpoint = key(
        "tcp://127.0.0.1:5557",
        "The engine's publisher, `tcp://host:port` or `ipc://path`.",
        example="tcp://127.0.0.1:5557",
    )
    replay_endpoint: Endpoint | None = key(
        None,
        "The engine's replay; null: it has none, and every gap is lost.",
        example="tcp://127.0.0.1:5558",
        default_text="`tcp://127.0.0.1:5558` if `endpoint` is not set either, else null",
    )
    snapshot_endpoint: Endpoint | None = key(
        None,
        "The engine's snapshots, if it offers that protocol: kvbus catches up by one instead of a replay from 0. "
        "Needs `replay_endpoint`.",
        example="tcp://127.0.0.1:5559",
    )
    bind: bool = key(False, "true: kvbus binds `endpoint` and the engine dials in.", example=False)
    api: ApiUrl | None = key(
        None,
        "The engine's own HTTP API. Of vLLM kvbus reads `/metrics` every 10 s, and clears an engine that sleeps.",
        example="http://127.0.0.1:8000",
    )
    data_parallel_size: Int = key(
        1,
        "Ranks of this engine; rank r is at port + r of both endpoints, with `ipc://` at `PATH-r` "
        "(rank 0: `PATH`) or where the path says `{rank}`. With `discover`: of each engine that says nothing else.",
        example=1,
        unit="ranks",
        ge=1,
        le=4096,
    )
    topic: Text = key(
        "",
        "What the topic of the engine's stream begins with; empty: the first topic that comes. Several sources may "
        "have one `endpoint` if no topic of theirs begins with another one's.",
        example="kv@",
    )
    clears: Literal["auto", "device", "all"] = key(
        "auto",
        "What the engine's AllBlocksCleared speaks of: the device's blocks (vLLM), those of every tier (SGLang), or "
        "auto: of every tier where kvbus has seen the engine open its epoch with one, else of the device.",
        example="auto",
    )
    slot: Int | None = key(
        None,
        "Slot of rank 0 among the streams of a per_source output (port + slot); rank r is at slot + r. Set it to keep "
        "a source's ports when one before it is removed.",
        example=2,
        default_text="behind the source before it",
        ge=0,
        le=4095,
    )
    curve_secret_key_file: Path | None = key(
        None,
        "kvbus's own key pair (`kvbus keygen`) or secret key towards this engine; turns CURVE on for all of its "
        "endpoints.",
        example="/etc/kvbus/keys/kvbus.key_secret",
    )
    curve_server_key_file: Path | None = key(
        None,
        "Public key of the engine, for the endpoints kvbus connects to.",
        example="/etc/kvbus/keys/engine.key",
    )
    curve_client_keys: Path | None = key(
        None,
        "With `bind`: the public keys that may dial in, each as any rank or with `sources=NAME/RANK` as one; a file "
        "with one key a line, or a directory of key files.",
        example="/etc/kvbus/engines",
    )

    @model_validator(mode="before")
    @classmethod
    def _default_replay(cls, data: Any) -> Any:
        # the default replay endpoint belongs to the default endpoint: beside another one it would be another engine's
        if isinstance(data, dict) and "endpoint" not in data and data.get("discover") is None:
            return {"replay_endpoint": "tcp://127.0.0.1:5558", **data}
        return data

    def rank_slots(self, first: int) -> list[tuple[int, int]]:
        """Return each rank with its slot, where rank 0 has the first one; none where engines are to be found."""
        return [] if self.discover is not None else [(rank, first + rank) for rank in range(self.data_parallel_size)]

    def rank_endpoints(self, rank: int) -> tuple[str, str | None, str | None]:
        """Return the publisher, the replay and the snapshots of one rank."""
        replay, snapshot = self.replay_endpoint, self.snapshot_endpoint
        return (
            endpoint_offset(self.endpoint, rank),
            None if replay is None else endpoint_offset(replay, rank),
            None if snapshot is None else endpoint_offset(snapshot, rank),
        )


class FoundSource(SourceConfig):
    """An engine that was found: its keys are those of the entry that found it, and each rank has its own endpoints."""

    ranks: tuple[FoundRank, ...] = ()
    where: str = ""
    """Who found it where, for people."""

    def rank_slots(self, first: int) -> list[tuple[int, int]]:
        """Return each rank with a slot, which it has unless its name has another one."""
        return [(each.rank, first + at) for at, each in enumerate(self.ranks)]

    def rank_endpoints(self, rank: int) -> tuple[str, str | None, str | None]:
        """Return the publisher and the replay of one rank; found engines have no snapshots."""
        found = next(each for each in self.ranks if each.rank == rank)
        return found.endpoint, found.replay_endpoint, None
