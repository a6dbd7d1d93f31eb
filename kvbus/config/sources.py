"""The keys of ``sources[]``. An entry has an engine's endpoints, or a discovery that finds engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from kvbus.config import logs
from kvbus.config.endpoints import endpoint_offset
from kvbus.config.values import ApiUrl, Discover, Endpoint, Int, Name, Section, Text, key


@dataclass(frozen=True, slots=True)
class FoundRank:
    """The endpoints of one data-parallel rank of a discovered engine."""

    rank: int
    endpoint: str
    replay_endpoint: str | None


class SourceConfig(Section):
    """The keys of one engine, or of a discovery that finds engines."""

    name: Name = key(
        "engine", "Unique name in metrics. If the source has several ranks, rank r is `NAME/r`.", example="engine"
    )
    discover: Discover | None = key(
        None,
        "Discover engines instead of naming an `endpoint`: a kind of discovery with its settings. kvbus adds"
        " each discovered engine under its own name, and the other keys of this entry apply to every such engine.",
        example={"file": {"path": "/etc/kvbus/engines.yaml"}},
    )
    endpoint: Endpoint = key(
        "tcp://127.0.0.1:5557",
        "The engine's event publisher, `tcp://host:port` or `ipc://path`.",
        example="tcp://127.0.0.1:5557",
    )
    replay_endpoint: Endpoint | None = key(
        None,
        "The engine's replay endpoint. null: the engine has none, so missing batches are lost.",
        example="tcp://127.0.0.1:5558",
        default_text="`tcp://127.0.0.1:5558` if `endpoint` is not set either, else null",
    )
    snapshot_endpoint: Endpoint | None = key(
        None,
        "The engine's snapshot endpoint, if the engine offers snapshots. kvbus then asks for a snapshot instead "
        "of a replay from 0. Needs `replay_endpoint`.",
        example="tcp://127.0.0.1:5559",
    )
    bind: bool = key(False, "true: kvbus binds `endpoint`, and the engine connects to it.", example=False)
    api: ApiUrl | None = key(
        None,
        "Base URL of the engine's HTTP API. kvbus reads vLLM's `/metrics` every 10 s, and clears the blocks of an "
        "engine that sleeps.",
        example="http://127.0.0.1:8000",
    )
    data_parallel_size: Int = key(
        1,
        "Number of the engine's data-parallel ranks. Rank r uses port + r at every endpoint. With `ipc://` it uses"
        " `PATH-r` (rank 0: `PATH`), or the path with r in place of `{rank}`. With `discover`: the number for "
        "engines whose discovery does not state it.",
        example=1,
        unit="ranks",
        ge=1,
        le=4096,
    )
    topic: Text = key(
        "",
        "Beginning of the engine's topic. Empty: kvbus reads the first topic that arrives. Several sources may "
        "share one `endpoint` if no source's topic begins with another source's topic.",
        example="kv@",
    )
    clears: Literal["auto", "device", "all"] = key(
        "auto",
        "Blocks that the engine's AllBlocksCleared removes. device: the blocks on the device (vLLM). all: the "
        "blocks of every tier (SGLang). auto: all if the engine sent an AllBlocksCleared first when it started, "
        "else device.",
        example="auto",
    )
    slot: Int | None = key(
        None,
        "Slot of rank 0; rank r has slot + r. On a per_source output, the stream of slot i is at port + i. "
        "Set this key to keep the ports when an earlier source is removed.",
        example=2,
        default_text="after the previous source",
        ge=0,
        le=4095,
    )
    curve_secret_key_file: Path | None = key(
        None,
        "kvbus's own secret key (`kvbus keygen`) for connections with this engine. It turns on CURVE for all "
        "endpoints of the source.",
        example="/etc/kvbus/keys/kvbus.key_secret",
    )
    curve_server_key_file: Path | None = key(
        None,
        "Public key of the engine, for the endpoints to which kvbus connects.",
        example="/etc/kvbus/keys/engine.key",
    )
    curve_client_keys: Path | None = key(
        None,
        "With `bind`: public keys of engines that may connect, each as any rank, or as one rank with "
        "`sources=NAME/RANK`. A file with one key on each line, or a directory of key files.",
        example="/etc/kvbus/engines",
    )

    @model_validator(mode="before")
    @classmethod
    def _default_replay(cls, data: Any) -> Any:
        # Only the default endpoint gets the default replay endpoint. Beside another endpoint, it might belong to
        # another engine.
        if isinstance(data, dict) and "endpoint" not in data and data.get("discover") is None:
            return {"replay_endpoint": "tcp://127.0.0.1:5558", **data}
        return data

    @property
    def log_settings(self) -> dict[str, Any] | None:
        """The settings of ``discover`` if this source is read from a log; None for every other source."""
        found = [settings for kind, settings in (self.discover or {}).items() if kind in logs.TYPES]
        return found[0] if found else None

    def rank_slots(self, first: int) -> list[tuple[int, int]]:
        """Return the rank and the slot of each rank. An entry with ``discover`` has no ranks.

        Args:
            first: the slot of rank 0.
        """
        return [] if self.discover is not None else [(rank, first + rank) for rank in range(self.data_parallel_size)]

    def rank_endpoints(self, rank: int) -> tuple[str, str | None, str | None]:
        """Return the endpoints of one rank: live stream, replay and snapshot."""
        replay, snapshot = self.replay_endpoint, self.snapshot_endpoint
        return (
            endpoint_offset(self.endpoint, rank),
            None if replay is None else endpoint_offset(replay, rank),
            None if snapshot is None else endpoint_offset(snapshot, rank),
        )


class FoundSource(SourceConfig):
    """A discovered engine. It has the keys of the ``sources`` entry that has found it, and endpoints for each rank."""

    ranks: tuple[FoundRank, ...] = ()
    where: str = ""
    """Where the engine was found, as a text for the operator.

    It has the name of the ``sources`` entry, and a place as the discovery names it, such as a Kubernetes namespace.
    """

    def rank_slots(self, first: int) -> list[tuple[int, int]]:
        """Return each rank with a provisional slot. The ranks get consecutive slots from ``first`` on.

        If the worker has had another slot before, kvbus later replaces the provisional slot by that slot.
        """
        return [(each.rank, first + at) for at, each in enumerate(self.ranks)]

    def rank_endpoints(self, rank: int) -> tuple[str, str | None, str | None]:
        """Return the endpoints of one rank: live stream, replay, and None for the snapshots.

        Discovery finds no snapshot endpoints.
        """
        found = next(each for each in self.ranks if each.rank == rank)
        return found.endpoint, found.replay_endpoint, None
