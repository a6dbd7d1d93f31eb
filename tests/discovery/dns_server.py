"""A DNS server on loopback (UDP and TCP) for tests. Each test sets a table of the server's answers and failures."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from tests.ports import free_port

Records = dict[tuple[str, str], list[str]]


class DnsServer:
    """A DNS server with records by absolute name and type. A name without any record is NXDOMAIN."""

    def __init__(self) -> None:
        self.port = free_port()
        self.records: Records = {}
        self.ttl = 0
        self.rcode = dns.rcode.NOERROR
        self.silent = False
        self.truncated = False
        """Whether every UDP answer is marked as truncated, so that the client must ask again over TCP."""
        self.questions: list[tuple[str, str]] = []
        self.by_tcp = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def answer(self, wire: bytes) -> dns.message.Message:
        query = dns.message.from_wire(wire)
        response = dns.message.make_response(query)
        question = query.question[0]
        name, kind = question.name.to_text().lower(), dns.rdatatype.to_text(question.rdtype)
        self.questions.append((name, kind))
        response.set_rcode(self.rcode)
        if self.rcode == dns.rcode.NOERROR:
            if records := self.records.get((name, kind)):
                response.answer.append(dns.rrset.from_text(name, self.ttl, "IN", kind, *records))
            elif not any(known == name for known, _ in self.records):
                response.set_rcode(dns.rcode.NXDOMAIN)
        return response

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[DnsServer]:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: _Udp(self), local_addr=("127.0.0.1", self.port))
        tcp = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        try:
            yield self
        finally:
            transport.close()
            tcp.close()
            await tcp.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            size = int.from_bytes(await reader.readexactly(2), "big")
            wire = self.answer(await reader.readexactly(size)).to_wire()
            self.by_tcp += 1
            writer.write(len(wire).to_bytes(2, "big") + wire)
            await writer.drain()
        writer.close()


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if self._server.silent:
            return
        response = self._server.answer(data)
        if self._server.truncated:
            response.answer.clear()
            response.flags |= dns.flags.TC
        self._transport.sendto(response.to_wire(), addr)
