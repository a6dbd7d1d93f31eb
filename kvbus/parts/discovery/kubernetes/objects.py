"""From Kubernetes' objects to engines: which pods and endpoints count, and where they publish."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from kvbus.parts.discovery.contract import DiscoveryError, Engine, fitting_name, host_in_url, publishers

LIVE: Final = "kvbus/port"
REPLAY: Final = "kvbus/replay-port"
RANKS: Final = "kvbus/data-parallel-size"
"""Annotations of a pod, which say more than the settings."""

Object = dict[str, Any]


class Ports(NamedTuple):
    """The ports of all engines, each by its name or its number, and how many ranks follow."""

    live: str
    replay: str
    ranks: int


def of_pods(pods: Iterable[Object], ports: Ports, where: str) -> tuple[tuple[Engine, ...], list[str]]:
    """Return the engines among pods, and the names of pods that have no such port.

    A pod counts from its address on, ready or not: an engine's first events come early. It counts no more once it is
    being deleted, or has ended.
    """
    found: list[Engine] = []
    without: list[str] = []
    for pod in pods:
        meta, status = pod.get("metadata") or {}, pod.get("status") or {}
        address = status.get("podIP")
        if not address or meta.get("deletionTimestamp") or status.get("phase") in {"Succeeded", "Failed"}:
            continue
        name, notes = str(meta.get("name")), meta.get("annotations") or {}
        spec = pod.get("spec") or {}
        named = {
            port["name"]: port["containerPort"]
            for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
            for port in container.get("ports") or ()
            if port.get("name")
        }
        wanted = Ports(
            notes.get(LIVE, ports.live), notes.get(REPLAY, ports.replay), _ranks(notes.get(RANKS), name, ports.ranks)
        )
        engine = _engine(name, address, named, wanted, f"{where}, pod {name}")
        if engine is None:
            without.append(name)
        else:
            found.append(engine)
    return _by_name(found), sorted(without)


def of_slices(slices: Iterable[Object], ports: Ports, where: str) -> tuple[tuple[Engine, ...], list[str]]:
    """Return the engines among the endpoints of EndpointSlices, and the names of slices that have no such port.

    An endpoint is known by its pod's name, else by its address. It counts, ready or not, until it is terminating. Of
    one with an address of each family the IPv4 one counts.
    """
    found: list[Engine] = []
    without: list[str] = []
    for each in sorted(slices, key=lambda each: (str(each.get("addressType")), str(each["metadata"]["name"]))):
        named = {port.get("name") or "": port.get("port") for port in each.get("ports") or ()}
        for endpoint in each.get("endpoints") or ():
            addresses = endpoint.get("addresses") or ()
            if not addresses or (endpoint.get("conditions") or {}).get("terminating"):
                continue
            name = str((endpoint.get("targetRef") or {}).get("name") or addresses[0])
            engine = _engine(name, addresses[0], named, ports, f"{where}, endpoint {name}")
            if engine is None:
                without.append(str(each["metadata"]["name"]))
                break
            found.append(engine)
    return _by_name(found), sorted(without)


def _by_name(engines: Iterable[Engine]) -> tuple[Engine, ...]:
    """One engine for each name: the first."""
    known: dict[str, Engine] = {}
    for engine in engines:
        known.setdefault(engine.name, engine)
    return tuple(known[name] for name in sorted(known))


def _engine(name: str, address: str, named: dict[str, Any], ports: Ports, where: str) -> Engine | None:
    live, replay = _port(ports.live, named), _port(ports.replay, named)
    if live is None:
        return None
    base = f"tcp://{host_in_url(address)}"
    back = None if replay is None else f"{base}:{replay}"
    return Engine(fitting_name(name), publishers(f"{base}:{live}", back, ports.ranks), where)


def _port(wanted: str, named: dict[str, Any]) -> int | None:
    if wanted.isascii() and wanted.isdigit():
        return int(wanted)
    port = named.get(wanted)
    return port if isinstance(port, int) else None


def _ranks(text: str | None, name: str, otherwise: int) -> int:
    if text is None:
        return otherwise
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:5]) <= 4096):
        raise DiscoveryError(f"pod {name}: annotation {RANKS} is {text!r:.40}, and must be 1 to 4096")
    return int(text)
