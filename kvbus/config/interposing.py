"""What ``interpose`` demands: one source behind each stream, at the same address, and nothing that it cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvbus.config.endpoints import endpoint_offset, parse_endpoint
from kvbus.config.paths import Path, show

if TYPE_CHECKING:
    from kvbus.config.findings import Findings

_KEYS: Final = ("curve_secret_key_file", "curve_server_key_file", "curve_client_keys")


def interposed(found: Findings) -> None:
    """Refuse an output at whose port engines dial in too, where they cannot or nobody would take them."""
    for i, output in enumerate(found.config.outputs):
        at: Path = ("outputs", i)
        if not output.interpose or not found.sound((*at, "interpose")):
            continue
        _output(found, at)
        if found.streams_sound() and found.sound((*at, "endpoint")):
            _sources(found, at)


def _output(found: Findings, at: Path) -> None:
    output = found.config.outputs[int(at[1])]
    wrongs: list[tuple[str, bool, str, str | None]] = [
        ("type", output.type != "zmq", "interpose is for type zmq: engines dial ZeroMQ", "type: zmq"),
        ("bind", not output.bind, "with interpose both sides dial kvbus, so it listens", "bind: true"),
        (
            "layout",
            output.layout != "per_source",
            "with interpose each rank has a port, which its engine dials",
            "layout: per_source",
        ),
        (
            "endpoint",
            parse_endpoint(output.endpoint).is_ipc,
            "engines bind an ipc:// endpoint: nobody would dial in",
            "endpoint: tcp://127.0.0.1:5557",
        ),
    ]
    for name, wrong, text, example in wrongs:
        if wrong and found.sound((*at, name)):
            found.report((*at, name), text, value=getattr(output, name), example=example)
    _no_keys(found, at, output)


def _no_keys(found: Findings, at: Path, section: object) -> None:
    for name in _KEYS:
        value = getattr(section, name)
        if value is not None and found.sound((*at, name)):
            found.report((*at, name), "a port with interpose has no CURVE: engines know none", value=value)


def _sources(found: Findings, at: Path) -> None:
    config, output = found.config, found.config.outputs[int(at[1])]
    if parse_endpoint(output.endpoint).is_ipc:
        return
    reported: set[int] = set()
    for index, rank, slot in config.slots():
        source, key = config.sources[index], ("sources", index)
        if index in reported:
            continue
        try:
            here = endpoint_offset(output.endpoint, slot)
        except ValueError:
            continue  # past the last port, which is reported
        if found.sound((*key, "bind")) and not source.bind:
            wrong = f"engines dial {show(at)}.endpoint, so kvbus listens for this one"
            found.report((*key, "bind"), wrong, value=source.bind, example="bind: true")
            reported.add(index)
        elif found.sound((*key, "endpoint")) and source.rank_endpoints(rank)[0] != here:
            first = endpoint_offset(output.endpoint, slot - rank)
            wrong = f"{show(at)}.endpoint has the stream of this source at {here}, and its engine dials the same"
            found.report((*key, "endpoint"), wrong, value=source.endpoint, example=f"endpoint: {first}")
            reported.add(index)
        if rank == 0:
            _no_keys(found, key, source)
