"""The keys of ``outputs[].dynamo``."""

from __future__ import annotations

from typing import Annotated, Any, Final
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, Field

from kvbus.config.endpoints import host_name
from kvbus.config.values import Section, Text, key

TYPE: Final = "dynamo"
PROFILE: Final = "dynamo-plane"
TOPIC: Final = "{source}@{rank}"
"""Topic template that passes a stream's source and rank to the output's driver.

kvbus sends no message with this topic.
"""


def _discovery(value: str) -> str:
    try:
        url = urlsplit(value)
        files = url.scheme == "file" and not url.netloc and unquote(url.path).startswith("/")
        etcd = url.scheme == "http" and url.hostname and url.port != 0 and url.path in {"", "/"}
    except ValueError:
        files, etcd = False, None
    if not (files or etcd) or "@" in value or "?" in value or "#" in value:
        raise ValueError("must be file:///DIRECTORY, or the address of etcd, such as http://host:2379")
    return value.rstrip("/")


def _host(value: str) -> str:
    if host_name(value) is None or ":" in value.rpartition("]")[2]:
        raise ValueError("must be a host name or an address, without a port")
    return value


def _segment(value: str) -> str:
    if not value or not value.isprintable() or "/" in value or " " in value:
        raise ValueError("must be a name without slashes and spaces")
    return value


Discovery = Annotated[str, AfterValidator(_discovery)]
Host = Annotated[str, AfterValidator(_host)]
Segment = Annotated[Text, AfterValidator(_segment)]
WorkerId = Annotated[int, Field(ge=0, le=2**64 - 1, strict=True)]


class DynamoPlane(Section):
    """The keys of an output with ``type: dynamo``: where kvbus announces the output, and Dynamo's worker ids."""

    discovery: Discovery = key(
        "file:///tmp/dynamo_store_kv",
        "Dynamo's discovery: `file://` and the directory in `DYN_FILE_KV`, or `http://host:2379` for etcd.",
        example="http://etcd:2379",
    )
    namespace: Segment = key("dynamo", "Namespace of the endpoint that Dynamo's workers serve.", example="dynamo")
    component: Segment = key("backend", "Component of the endpoint that Dynamo's workers serve.", example="backend")
    endpoint: Segment = key(
        "generate", "Last part of the name of the endpoint that Dynamo's workers serve.", example="generate"
    )
    advertise: Host | None = key(
        None,
        "Host at which frontends reach kvbus. null: the host of `endpoint`, or the address that this machine's "
        "name resolves to.",
        example="10.0.0.7",
    )
    workers: dict[str, WorkerId] = key(
        {},
        "Dynamo's worker id for each source name. A source without an entry belongs to the only worker that has a "
        "model card, or to the only such worker at the host that kvbus advertises.",
        example={"engine-0": 7587888543},
    )


def defaults(data: dict[str, Any]) -> dict[str, Any]:
    """Return ``data``, the keys of an output with ``type: dynamo``, with this type's defaults for the absent keys."""
    return {"profile": PROFILE, "topic": TOPIC, "replay_endpoint": None, **data}
