"""What ``front`` and ``front_grpc`` demand: an engine other than kvbus, its source, and endpoints to give."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvbus.config.endpoints import Address, is_loopback, parse_address, parse_endpoint
from kvbus.config.paths import Path, show

if TYPE_CHECKING:
    from kvbus.config.findings import Findings
    from kvbus.config.front import Fronting
    from kvbus.config.outputs import OutputConfig

_PORTS = {"http": 80, "https": 443}


def fronted(found: Findings) -> None:
    """Refuse a front that asks itself, or has no one engine or nothing to give."""
    for key, front in (("front", found.config.front), ("front_grpc", found.config.front_grpc)):
        if front is None or not found.sound((key,)):
            continue
        if found.sound((key, "listen")):
            _loops(found, key, front)
        if found.streams_sound() and found.sound((key, "source")):
            _source(found, key, front)
            if found.sound(("outputs",), (key, "output")):
                _output(found, key, front)


def _loops(found: Findings, key: str, front: Fronting) -> None:
    asked: list[tuple[Path, str | None]] = [((key, "engine"), front.engine)]
    for i, source in enumerate(found.config.sources):
        asked.append((("sources", i, "api"), source.api))
        asked.append((("sources", i, "discover"), (source.discover or {}).get("http", {}).get("url")))
    for at, url in asked:
        if url is not None and found.sound(at) and _is_here(url if "://" in url else f"http://{url}", front.listen):
            found.report(at, f"{key}.listen is there: kvbus would ask itself", value=url)


def _is_here(url: str, listen: str) -> bool:
    there, (host, port) = urlsplit(url), parse_address(listen)
    asked, host = ("127.0.0.1" if each == "localhost" else each for each in (there.hostname or "", host))
    here = asked == host or (is_loopback(asked) and Address(host, 1).is_wildcard)
    return here and port == (there.port or _PORTS[there.scheme])


def _source(found: Findings, key: str, front: Fronting) -> None:
    sources = found.config.sources
    names = [source.name for source in sources]
    if front.source is None and len(names) > 1:
        wrong = f"there are {len(names)} sources: which of them is the engine behind it?"
        found.report((key, "source"), wrong, example=f"source: {names[0]}")
    if front.source is not None and front.source not in names and all(each.discover is None for each in sources):
        wrong = f"no source has this name; there are: {', '.join(names)}"
        found.report((key, "source"), wrong, value=front.source, example=f"source: {min(names, default='engine')}")


def _output(found: Findings, key: str, front: Fronting) -> None:
    outputs = found.config.outputs
    number = front.number_of_output(outputs)
    if number is None:
        if outputs:
            wrong = f"no output has this name; there are: {', '.join(each.name for each in outputs)}"
            found.report((key, "output"), wrong, value=front.output, example=f"output: {outputs[0].name}")
        return
    at: Path = ("outputs", number)
    if not found.sound(*((*at, name) for name in ("type", "endpoint", "bind", "layout"))):
        return
    ranks = max(
        (each.data_parallel_size for each in found.config.sources if front.source in (None, each.name)), default=1
    )
    if wrong := _without_endpoints(outputs[number], ranks):
        found.report((key, "output"), f"{show(at)} {wrong}", value=outputs[number].name)


def _without_endpoints(output: OutputConfig, ranks: int) -> str:
    if output.type != "zmq":
        return f"is of type {output.type}, and who asks an engine for its events reads ZeroMQ"
    if not output.bind:
        return "dials out: there is no endpoint to give"
    if parse_endpoint(output.endpoint).is_ipc:
        return "has an ipc:// endpoint, and who asks an engine for its events connects over TCP"
    if output.layout == "merged" and ranks > 1:
        return f"has one stream for all {ranks} ranks (layout: merged), and each rank is asked for by itself"
    return ""
