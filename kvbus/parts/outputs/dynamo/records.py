"""What Dynamo's discovery says: the two records of a source of events, and the cards of workers."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

SOURCES: Final = "v1/event_sources"
CHANNELS: Final = "v1/event_channels"
CARDS: Final = "v1/mdc"
INSTANCES: Final = "v1/instances"

TOPIC: Final = "kv-events"


class Scope(NamedTuple):
    """The endpoint that workers serve, whose cards and events belong together."""

    namespace: str
    component: str
    endpoint: str

    @property
    def workers(self) -> str:
        """Where the cards and the instances of its workers are."""
        return f"{self.namespace}/{self.component}/{self.endpoint}/"

    @property
    def events(self) -> str:
        """Where its sources of events are."""
        return f"namespace/{self.namespace}/component/{self.component}/endpoint/{self.endpoint}/topic/{TOPIC}/"


class Found(NamedTuple):
    """A worker with a model card, and the host that it serves at."""

    worker: int
    host: str


class Other(NamedTuple):
    """Somebody who says to be the source of a rank's events."""

    publisher: int
    endpoint: str


def records(scope: Scope, publisher: int, worker: int, rank: int, endpoint: str) -> dict[str, bytes]:
    """The records of one source by their paths. A router that finds the channel has to know the source before."""
    path = f"{scope.events}{publisher:x}"
    place = {"namespace": scope.namespace, "component": scope.component, "name": scope.endpoint}
    about = {"scope": {"kind": "endpoint", "endpoint": place}, "topic": TOPIC}
    source = {
        "type": "EventSource",
        **about,
        "publisher_id": publisher,
        "metadata": {
            "kv_state_endpoint": place,
            "worker": {"worker_id": worker, "dp_rank": rank},
            "publisher_id": publisher,
        },
    }
    channel = {
        "type": "EventChannel",
        **about,
        "instance_id": publisher,
        "transport": {"kind": "Zmq", "config": {"endpoint": endpoint}},
    }
    encode = msgspec.json.encode
    return {f"{SOURCES}/{path}": encode(source), f"{CHANNELS}/{path}": encode(channel)}


def workers(cards: dict[str, bytes], instances: dict[str, bytes]) -> list[Found]:
    """The workers with a card, by their ids."""
    hosts = {_number(each, "instance_id"): _host(each) for each in map(_decoded, instances.values())}
    known = {_number(each, "instance_id") for each in map(_decoded, cards.values())} - {0}
    return [Found(worker, hosts.get(worker, "")) for worker in sorted(known)]


def others(
    sources: dict[str, bytes], channels: dict[str, bytes], worker: int, rank: int, publisher: int
) -> list[Other]:
    """The sources of a rank but the one of this publisher. With two of them a router takes neither."""
    found = []
    for path, body in sources.items():
        about = _part(_decoded(body), "metadata")
        number = _number(about, "publisher_id")
        if _part(about, "worker") == {"worker_id": worker, "dp_rank": rank} and number != publisher:
            channel = _decoded(channels.get(path.replace(SOURCES, CHANNELS, 1), b""))
            found.append(Other(number, str(_part(channel, "transport", "config", "endpoint") or "")))
    return found


def _host(instance: dict[str, Any]) -> str:
    return str(_part(instance, "transport", "tcp")).partition("/")[0].rpartition(":")[0]


def _part(record: Any, *names: str) -> Any:
    """What a record, which others may have written, has at the end of this path; None if it does not."""
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record


def _number(record: Any, name: str) -> int:
    """One of its numbers; 0 if there is none."""
    found = _part(record, name)
    return found if isinstance(found, int) else 0


def _decoded(body: bytes) -> dict[str, Any]:
    """A record; empty where it is none, or is being written."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
