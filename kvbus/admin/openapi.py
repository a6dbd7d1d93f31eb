"""``/openapi.json``: every path of the HTTP port, with what it takes and what it answers, from one table."""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import Any, Final, NamedTuple, TypedDict

import msgspec

from kvbus.admin.query import Answer
from kvbus.admin.query_body import MSGPACK, Request
from kvbus.admin.views import RouterEntry, SourceEntry
from kvbus.core.types import HASH_FORMS


class BlockEntry(TypedDict):
    """One live block, a line. Tokens are pairs with EAGLE."""

    source: str
    rank: int
    hash: int | str
    parent: int | str | None
    medium: str | None
    group_idx: int | None
    block_size: int
    token_ids: list[int | tuple[int, int]]
    copies: int


class Overview(TypedDict):
    """The bus as a whole, with five minutes of its history."""

    version: str
    config: dict[str, Any]
    config_refused: list[str]
    state_writing: bool | None
    started: float
    now: float
    content: str | None
    id: str
    transitions: list[dict[str, Any]]
    times: list[float]
    all: dict[str, list[float | None]]
    outputs: dict[str, dict[str, list[float | None]]]


class Problem(TypedDict):
    """Why there is no answer, in a sentence."""

    error: str


JSON: Final = "application/json"

CREDENTIALS: Final = {
    "token": {"type": "http", "scheme": "bearer", "description": "A token of kvbus token, or of a service account."},
    "certificate": {"type": "mutualTLS", "description": "A client certificate."},
}


class Path(NamedTuple):
    """One path. ``problems`` are the statuses with a :class:`Problem`; ``content`` asks others for a credential."""

    path: str
    summary: str
    kind: str = JSON
    answer: Any = str
    parameters: tuple[tuple[str, str], ...] = ()
    problems: tuple[int, ...] = ()
    method: str = "get"
    takes: Any = None
    content: bool = False


PATHS: Final = (
    Path("/", "The status page.", "text/html"),
    Path("/page.css", "Its style.", "text/css"),
    Path("/page.js", "Its script.", "text/javascript"),
    Path("/livez", "Whether the event loop runs.", "text/plain"),
    Path("/readyz", "Whether everything is bound, and logs that are read were read once.", "text/plain"),
    Path("/metrics", "Metrics in Prometheus's text format.", "text/plain"),
    Path("/openapi.json", "This document.", JSON, dict[str, Any]),
    Path("/sources", "Every source as it stands.", JSON, list[SourceEntry]),
    Path("/routers", "Every router, and those that left last.", JSON, list[RouterEntry]),
    Path("/overview", "The bus as a whole.", JSON, Overview),
    Path(
        "/history",
        "Five minutes of a source: its rates and levels, and their times.",
        JSON,
        dict[str, list[float | None]],
        (("source", "A name of /sources."),),
        (404,),
    ),
    Path(
        "/events",
        "Transitions and rates as they come (server-sent); with an output its batches, for local programs, principals.",
        "text/event-stream",
        str,
        (("output", "An output's name."), ("after", "The id of the last event that the client has, as Last-Event-ID.")),
        (400, 403, 404, 503),
        content=True,
    ),
    Path(
        "/blocks",
        "Every live block, for local programs and principals.",
        "application/x-ndjson",
        BlockEntry,
        (("source", "A name of /sources."), ("hashes", f"How hashes are written: {' or '.join(HASH_FORMS)}.")),
        (400, 403, 404, 503),
        content=True,
    ),
    Path(
        "/query",
        "Which sources hold the longest prefix of a prompt, for local programs and principals.",
        JSON,
        Answer,
        (),
        (400, 403, 408, 413, 429, 503),
        "post",
        Request,
        content=True,
    ),
)


PARAMETERS: Final = {path.path: frozenset(name for name, _ in path.parameters) for path in PATHS}
"""The query parameters that each path takes."""


@functools.cache
def document() -> bytes:
    """Return the document."""
    types = list(dict.fromkeys(each for path in PATHS for each in (path.answer, path.takes) if each is not None))
    found, components = msgspec.json.schema_components([*types, Problem], ref_template="#/components/schemas/{name}")
    schemas = dict(zip([*types, Problem], found, strict=True))
    paths = {path.path: {path.method: _operation(path, schemas)} for path in PATHS}
    info = {
        "title": "kvbus",
        "version": version("kvbus"),
        "description": "The HTTP port of a bus. Nothing here changes anything.",
    }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": info,
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": CREDENTIALS},
        },
        order="sorted",
    )


def _operation(path: Path, schemas: dict[Any, Any]) -> dict[str, Any]:
    def body(kind: str, of: Any) -> dict[str, Any]:
        return {"content": {kind: {"schema": schemas[of]}}}

    operation: dict[str, Any] = {
        "summary": path.summary,
        "operationId": f"{path.method}_{path.path.strip('/').replace('.', '_') or 'page'}",
        "responses": {
            "200": {"description": "The answer.", **body(path.kind, path.answer)},
            **{str(status): {"description": "No answer.", **body(JSON, Problem)} for status in {400, *path.problems}},
        },
    }
    if path.content:  # none is needed on this machine, hence the empty one
        operation["security"] = [{}, *({name: []} for name in CREDENTIALS)]
    if path.parameters:
        operation["parameters"] = [
            {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
            for name, text in path.parameters
        ]
    if path.takes is not None:
        content = {kind: {"schema": schemas[path.takes]} for kind in (JSON, MSGPACK)}
        operation["requestBody"] = {"required": True, "content": content}
    return operation
