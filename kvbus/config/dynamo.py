"""The keys of ``outputs[].dynamo``, and the checks of an output with ``type: dynamo``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, Field

from kvbus.config.endpoints import host_name, parse_endpoint
from kvbus.config.values import Section, Text, key

if TYPE_CHECKING:
    from kvbus.config.models import Config

TYPE: Final = "dynamo"
PROFILE: Final = "dynamo-plane"
TOPIC: Final = "{source}@{rank}"
"""Topic template that passes a stream's source and rank to the output's driver.

kvbus sends no message with this topic.
"""

Wrong = tuple[str, str, object, str]
"""A problem of an output: the key, a sentence about the problem, the key's value, and an example of a valid value."""


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


def wrongs(config: Config, at: int) -> Iterator[Wrong]:
    """Yield the problems of an output that concern Dynamo.

    Args:
        config: the configuration.
        at: the position of the output in ``outputs``.
    """
    output = config.outputs[at]
    if output.type != TYPE:
        if output.dynamo is not None:
            yield "dynamo", f"only type: {TYPE} has these keys, but the type is {output.type}", None, f"type: {TYPE}"
        return
    for name, wanted in (("profile", PROFILE), ("topic", TOPIC), ("bind", True), ("layout", "per_source")):
        if (given := getattr(output, name)) != wanted:
            text = str(wanted).lower() if isinstance(wanted, bool) else wanted
            yield name, f"type: {TYPE} needs {name}: {text}", given, f"leave out {name}"
    for name in ("replay_endpoint", "snapshot_endpoint", "curve_secret_key_file"):
        if (given := getattr(output, name)) is not None:
            yield name, "Dynamo's event plane does not support this", given, f"leave out {name}"
    if parse_endpoint(output.endpoint).is_ipc:
        yield "endpoint", "Dynamo's frontends connect only over TCP", output.endpoint, "endpoint: tcp://*:5857"
    known = {source.name for source in config.sources}
    for name in (output.dynamo.workers if output.dynamo is not None else {}).keys() - known:
        yield "dynamo", f"workers has {name!r}, but no source has this name", None, "workers: {engine-0: 7587888543}"
