"""A discoverer that looks up a DNS name.

If ``port`` is configured, each address of the name is an engine. Otherwise each host in the name's SRV records is an
engine, and these records have its ports.

kvbus looks the name up again when the TTL of its records has passed, but not before ``interval``. If the connection to
an engine is lost, kvbus does not wait for the TTL. NXDOMAIN, or an answer without records, means that there is no
engine. If the DNS server fails, refuses or does not answer, kvbus keeps the engines that it knows.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, Final

import dns.asyncresolver
import dns.exception
import dns.nameserver
import dns.resolver
from pydantic import model_validator

from kvbus.common.errors import Problem
from kvbus.config.endpoints import parse_address
from kvbus.config.values import Int, Seconds, Section, Text, key
from kvbus.parts.discovery.contract import (
    DiscoveryError,
    Engine,
    EntryError,
    Publisher,
    Services,
    fitting_name,
    publishers_at,
)

LIFETIME: Final = 5.0
"""Timeout in seconds of one look-up, including all servers and all attempts."""
AT_ONCE: Final = 64
"""Maximum number of hosts whose addresses are looked up at the same time."""
MAX_TTL: Final = 300.0
"""Maximum time in seconds between two look-ups, even if the TTL of the records is longer."""


class DnsSettings(Section):
    """The configuration keys of ``discover: {dns: …}``."""

    name: Text = key(
        ...,
        "Name to look up. With `port`, each address of the name is an engine. Without `port`, each host in its SRV "
        "records is an engine, for example with the records of a headless Service's named port "
        "(`_kv-events._tcp.engines.default.svc.cluster.local`).",
        example="engines.default.svc.cluster.local",
    )
    port: Int | None = key(
        None, "Port of rank 0's publisher. null: the port in the SRV records.", example=5557, ge=1, le=65535
    )
    replay_port: Int | None = key(
        None,
        "Port for replays of rank 0. null: no replays, or the ports of `replay_name`.",
        example=5558,
        ge=1,
        le=65535,
    )
    replay_name: Text | None = key(
        None,
        "Name whose SRV records have each host's replay port. Use it in place of `replay_port`.",
        example="_kv-replay._tcp.engines.default.svc.cluster.local",
    )
    interval: Seconds = key(
        5.0, "Minimum time between two look-ups, even if the TTL is shorter.", example=5.0, unit="s", gt=0
    )
    servers: tuple[Text, ...] = key(
        (),
        "Addresses of DNS servers, `host:port`. Empty: the servers in `/etc/resolv.conf`.",
        example=["10.96.0.10:53"],
    )

    @model_validator(mode="after")
    def _sound(self) -> DnsSettings:
        if self.port is not None and self.replay_name is not None:
            raise ValueError(
                "replay_name needs SRV records, so leave out port; or give replay_port in place of replay_name"
            )
        if self.replay_port is not None and self.replay_name is not None:
            raise ValueError("give replay_port or replay_name, not both")
        for server in self.servers:
            ipaddress.ip_address(parse_address(server)[0])
        return self


class DnsDiscoverer:
    """A discoverer that finds engines by a DNS name; see :class:`~kvbus.parts.discovery.contract.Discoverer`."""

    Settings = DnsSettings

    def __init__(self, settings: DnsSettings, services: Services) -> None:
        self._settings = settings
        self._services = services
        self._addresses: dict[str, str] = {}
        """By host: the address to which kvbus connects. It changes only when DNS no longer lists it for the host."""
        self._ttl = 0.0

    async def watch(self) -> AsyncGenerator[tuple[Engine, ...], None]:
        """Yield the set of engines after each look-up of the DNS name."""
        resolver = self._resolver()
        disconnected = self._services.disconnected
        while True:
            self._ttl = MAX_TTL
            disconnected.clear()
            yield await (self._by_address(resolver) if self._settings.port is not None else self._by_srv(resolver))
            await asyncio.sleep(self._settings.interval)
            try:
                async with asyncio.timeout(max(0.0, self._ttl - self._settings.interval)):
                    await disconnected.wait()
            except TimeoutError:
                pass

    def _resolver(self) -> dns.asyncresolver.Resolver:
        try:
            resolver = dns.asyncresolver.Resolver(configure=not self._settings.servers)
        except dns.exception.DNSException as error:
            raise DiscoveryError(f"/etc/resolv.conf: {error}") from error
        if self._settings.servers:
            resolver.nameservers = [
                dns.nameserver.Do53Nameserver(*parse_address(server)) for server in self._settings.servers
            ]
        return resolver

    async def _look_up(self, resolver: dns.asyncresolver.Resolver, name: str, kind: str) -> tuple[Any, ...]:
        try:
            answer = await resolver.resolve(name, kind, search=True, raise_on_no_answer=False, lifetime=LIFETIME)
        except dns.resolver.NXDOMAIN:
            self._ttl = 0.0
            return ()
        except dns.exception.DNSException as error:
            self._ttl = 0.0
            raise DiscoveryError(f"{kind} of {name}: {error}") from error
        self._ttl = min(self._ttl, answer.chaining_result.minimum_ttl)
        return tuple(answer.rrset or ())

    async def _addresses_of(self, resolver: dns.asyncresolver.Resolver, name: str) -> list[str]:
        for kind in ("A", "AAAA"):  # look up IPv6 addresses only if the host has no IPv4 address
            records = await self._look_up(resolver, name, kind)
            if records:
                return sorted({record.address for record in records})
        return []

    async def _by_address(self, resolver: dns.asyncresolver.Resolver) -> tuple[Engine, ...]:
        settings, where = self._settings, f"dns {self._settings.name}"
        found = []
        for address in await self._addresses_of(resolver, settings.name):
            name = fitting_name(address)
            try:
                size = self._services.data_parallel_size
                ranks = publishers_at(address, settings.port or 0, settings.replay_port, size)
                found.append(Engine(name, ranks, where))
            except EntryError as error:
                found.append(Engine(name, (), where, faults=(error.problem,)))
        return tuple(found)

    async def _by_srv(self, resolver: dns.asyncresolver.Resolver) -> tuple[Engine, ...]:
        settings = self._settings
        live = await self._ports(resolver, settings.name)
        replay = {} if settings.replay_name is None else await self._ports(resolver, settings.replay_name)
        self._addresses = {host: at for host, at in self._addresses.items() if host in live}
        turns = asyncio.Semaphore(AT_ONCE)
        engines = [self._engine(resolver, turns, host, live[host], replay.get(host, [])) for host in live]
        return tuple(each for each in await asyncio.gather(*engines) if each is not None)

    async def _engine(
        self,
        resolver: dns.asyncresolver.Resolver,
        turns: asyncio.Semaphore,
        host: str,
        live: list[int],
        replay: list[int],
    ) -> Engine | None:
        """Return the engine on a host that SRV records list; None if the host has no address.

        Args:
            resolver: the resolver with the DNS servers.
            turns: limits the number of look-ups at the same time.
            host: the host's DNS name.
            live: the ports of its live streams; see :meth:`_ranks`.
            replay: the ports of its replays.
        """
        name, where = self._settings.name, f"dns {self._settings.name}, host {host.rstrip('.')}"
        try:
            async with turns:
                addresses = await self._addresses_of(resolver, host)
            if not addresses:
                self._addresses.pop(host, None)
                return None
            if self._addresses.get(host) not in addresses:
                self._addresses[host] = addresses[0]
            return Engine(fitting_name(_short(host, name)), self._ranks(self._addresses[host], live, replay), where)
        except DiscoveryError as error:
            problem = Problem("address", str(error), host)
        except EntryError as error:
            problem = error.problem
        return Engine(fitting_name(_short(host, name)), (), where, faults=(problem,))

    async def _ports(self, resolver: dns.asyncresolver.Resolver, name: str) -> dict[str, list[int]]:
        """Return the ports of each host in a name's SRV records, in ascending order. Each port belongs to one rank."""
        found: dict[str, set[int]] = {}
        for record in await self._look_up(resolver, name, "SRV"):
            if record.target.to_text() != ".":  # RFC 2782: the target "." means that the service is not available
                found.setdefault(record.target.to_text(), set()).add(record.port)
        return {host: sorted(ports) for host, ports in sorted(found.items())}

    def _ranks(self, host: str, live: list[int], replay: list[int]) -> tuple[Publisher, ...]:
        """Return the publishers of the engine on a host that SRV records list.

        Args:
            host: the host's address.
            live: the ports of its live streams. If there are several, each is the port of one rank, in order. If there
                is one, it is the port of rank 0, and the port of rank r is this port plus r.
            replay: the ports of its replays, in the same order; empty if there are no SRV records of replays.
        """
        settings = self._settings
        if not replay and settings.replay_port is not None:
            replay = [settings.replay_port + rank for rank in range(len(live))]
        keys = "port in the SRV record", "replay port"
        if len(live) == 1:
            back = replay[0] if replay else None
            return publishers_at(host, live[0], back, self._services.data_parallel_size, keys)
        pairs = zip(live, replay if len(replay) == len(live) else [None] * len(live), strict=True)
        return tuple(
            replace(publishers_at(host, port, back, 1, keys)[0], rank=rank) for rank, (port, back) in enumerate(pairs)
        )


def _short(host: str, name: str) -> str:
    """Return a host's name without the domain of the service: ``pod-0`` for ``pod-0.engines.default.svc``."""
    domain = ".".join(piece for piece in name.rstrip(".").split(".") if not piece.startswith("_"))
    return host.rstrip(".").removesuffix(f".{domain}")
