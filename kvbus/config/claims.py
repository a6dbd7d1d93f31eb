"""Checks of the addresses in a configuration.

They reject two listeners at one address, ports above 65535, and wildcard hosts in endpoints that kvbus connects to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbus.config import logs
from kvbus.config.endpoints import MAX_PORT, Address, parse_address, parse_endpoint
from kvbus.config.paths import Path, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvbus.config.contradictions import Contradictions


@dataclass(frozen=True, slots=True)
class _Claim:
    """An address at which a process listens, according to the configuration.

    Attributes:
        key: the configuration key of the endpoint.
        who: the rank, stream or section that the address belongs to, as a text for error messages.
        address: the address.
        ours: whether kvbus is the listener. Otherwise the listener is a peer to which kvbus connects.
    """

    key: Path
    who: str
    address: Address
    ours: bool
    both: bool = False
    """Whether a source and an output may both use the listener.

    This is true for a source that kvbus binds, and for an output with ``interpose``.
    """
    topic: str | None = None
    """Topic prefix of a source whose engine kvbus connects to; None for every other listener."""

    def collides(self, other: _Claim) -> bool:
        mine, theirs = self.address, other.address
        if self.both and other.both and self.key[0] != other.key[0] and mine == theirs:
            return False  # with ``interpose``, source and output share one listener
        if self.shares(other) and not self.mixes(other):
            return False
        if mine.port != theirs.port:
            return False
        if mine.host == theirs.host:
            return True
        # A wildcard occupies the port on every interface of this machine. So it collides with every listener of kvbus
        # on that port, and with a peer's listener only if the peer is on this machine.
        return (mine.is_wildcard and (other.ours or theirs.is_loopback)) or (
            theirs.is_wildcard and (self.ours or mine.is_loopback)
        )

    def shares(self, other: _Claim) -> bool:
        """Return whether both addresses belong to sources that connect to the same socket of an engine."""
        return None not in {self.topic, other.topic} and self.key[-1] == other.key[-1] and self.address == other.address

    def mixes(self, other: _Claim) -> bool:
        """Return whether a topic can begin with the topic prefixes of both claims' sources.

        Both sources would get the batches of such a topic.
        """
        mine, theirs = self.topic or "", other.topic or ""
        return mine.startswith(theirs) or theirs.startswith(mine)


def wildcards(found: Contradictions) -> None:
    """Reject a wildcard host in an endpoint that kvbus connects to, because a wildcard does not name a peer."""
    connected: list[tuple[Path, str | None]] = []
    for i, source in enumerate(found.config.sources):
        if source.discover is not None:
            continue
        if not source.bind and found.sound(("sources", i, "bind")):
            connected.append((("sources", i, "endpoint"), source.endpoint))
        connected.append((("sources", i, "replay_endpoint"), source.replay_endpoint))
        connected.append((("sources", i, "snapshot_endpoint"), source.snapshot_endpoint))
    for i, output in enumerate(found.config.outputs):
        if not output.bind and output.type not in logs.TYPES and found.sound(("outputs", i, "bind")):
            connected.append((("outputs", i, "endpoint"), output.endpoint))
    for key, endpoint in connected:
        if endpoint is not None and found.sound(key) and parse_endpoint(endpoint).is_wildcard:
            name = key[-1]
            only = ", or set bind: true" if name == "endpoint" else ""
            example = f"{name}: tcp://127.0.0.1:{parse_endpoint(endpoint).port}"
            found.report(
                key,
                f"kvbus connects to it, so it must name a host{only}",
                value=endpoint,
                example=example,
            )


def ports(found: Contradictions) -> None:
    """Reject two listeners at one address. Each rank of a source and each stream of an output has its own address."""
    by_port: dict[tuple[int, str], list[_Claim]] = {}
    reported: set[tuple[Path, Path]] = set()
    for claim in _claims(found):
        address = claim.address
        same = by_port.setdefault((address.port, address.host if address.is_ipc else ""), [])
        for other in same:
            pair = (other.key, claim.key)
            if pair in reported or not claim.collides(other):
                continue
            reported.add(pair)
            where = f"ipc://{address.host}" if address.is_ipc else f"port {address.port}"
            wrong = f"{where} ({claim.who}) is taken by {show(other.key)} ({other.who})"
            if claim.shares(other):
                wrong += "; two sources may share it if neither one's topic begins with the other's"
            found.report(claim.key, wrong, value=found.value(claim.key), example=_free(found, claim.key))
        same.append(claim)


def _claims(found: Contradictions) -> Iterable[_Claim]:
    config = found.config
    for i, source in enumerate(config.sources):
        ranks = source.data_parallel_size
        if source.discover is None and found.sound(("sources", i, "data_parallel_size"), ("sources", i, "bind")):
            for name, ours in (("endpoint", source.bind), ("replay_endpoint", False), ("snapshot_endpoint", False)):
                topic = None if source.bind or name == "snapshot_endpoint" else source.topic
                yield from _run(found, ("sources", i, name), range(ranks), "rank", ours=ours, both=ours, topic=topic)
    slots = [slot for _, _, slot in config.slots()] if found.streams_sound() else [0]
    for i, output in enumerate(config.outputs):
        if not found.sound(("outputs", i, "layout"), ("outputs", i, "bind")):
            continue
        several = output.layout == "per_source"
        for name in ("endpoint", "replay_endpoint", "snapshot_endpoint"):
            if name != "endpoint" or output.bind:
                numbers, both = slots if several else [0], output.interpose and name == "endpoint"
                yield from _run(found, ("outputs", i, name), numbers, "stream", ours=True, both=both)
    listening: list[tuple[Path, str, str | None]] = [(("http",), "HTTP", config.http)]
    for name, who, front in (("front", "the front", config.front), ("front_grpc", "the gRPC front", config.front_grpc)):
        if front is not None:
            listening.append(((name, "listen"), who, front.listen))
    for key, who, text in listening:
        if text is not None and found.sound(key):
            host, port = parse_address(text)
            if port != 0:
                yield _Claim(key, who, Address("127.0.0.1" if host == "localhost" else host, port), ours=True)


def _run(
    found: Contradictions,
    key: Path,
    numbers: Sequence[int],
    unit: str,
    *,
    ours: bool,
    both: bool,
    topic: str | None = None,
) -> Iterable[_Claim]:
    """Yield the address of each rank or stream that one endpoint key describes. Report a port above 65535.

    Args:
        found: the configuration that is checked, and the list to which problems are added.
        key: the path of the endpoint key. Rank or stream n has the port of this endpoint plus n.
        numbers: the numbers of the ranks or streams.
        unit: the word ``rank`` or ``stream``, for error messages.
        ours: whether kvbus listens at the endpoint.
        both: whether a source and an output may share the listener.
        topic: the topic prefix of a source whose engine kvbus connects to; None for every other endpoint.
    """
    endpoint = found.value(key)
    if endpoint is None or not found.sound(key):
        return
    base = parse_endpoint(endpoint)
    last = max(numbers, default=0)
    if not base.is_ipc and base.port + last > MAX_PORT:
        wrong = f"{unit} {last} would be at port {base.port + last}, but the highest port is {MAX_PORT}"
        found.report(key, wrong, value=endpoint, example=f"{key[-1]}: {endpoint.rpartition(':')[0]}:5557")
        return
    for n in numbers:
        who = f"{unit} {n}" if len(numbers) > 1 else str(key[0])[:-1]
        if base.is_ipc:
            path = base.host.replace("{rank}", str(n)) if "{rank}" in base.host or n == 0 else f"{base.host}-{n}"
            yield _Claim(key, who, Address(path, 0), ours, both, topic)
        else:
            yield _Claim(key, who, Address(base.host, base.port + n), ours, both, topic)


def _free(found: Contradictions, key: Path) -> str | None:
    """Return a line of YAML for a configuration key whose address collides with another one.

    The line gives the key another port, or another path, that is free.
    """
    value = found.value(key) or ""
    head, _, tail = value.rpartition(":")
    if value.startswith("ipc://") or not tail.isdigit():
        return f"{key[-1]}: {value}-other"
    port = int(tail)
    return f"{key[-1]}: {head}:{port + 100 if port + 200 < MAX_PORT else port - 200}"
