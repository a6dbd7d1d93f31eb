"""Which clients may connect: at every CURVE handshake libzmq asks the ZAP handler (RFC 27) in this process.

The handler fails closed. It answers 300 ("temporary error") to an unknown domain, another mechanism, a malformed
request, and a key that is not on the allow-list. libzmq then closes the connection when the time for handshakes is over
(3 s). A libzmq client tries again, and may connect once its key is on the list. After a 400 it would never try again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Final

import zmq

from kvbus.transport.pump import Pump
from kvbus.transport.sockets import Context, make_socket

ENDPOINT: Final = "inproc://zeromq.zap.01"
"""The endpoint that libzmq asks, one handler per context (RFC 27)."""

_VERSION: Final = b"1.0"


class ZapHandler:
    """Answer libzmq's ZAP requests from one allow-list per domain.

    It needs a running event loop. Make it before any CURVE server socket.
    """

    def __init__(self, context: Context) -> None:
        self._allowed: dict[bytes, Collection[bytes]] = {}
        self._socket = make_socket(context, zmq.ROUTER)
        self._socket.bind(ENDPOINT)
        self._pump = Pump(self._socket, self._asked)

    def allow(self, domain: str, clients: Collection[bytes]) -> None:
        """Set the allow-list of ``domain``: public keys, 32 raw bytes each."""
        self._allowed[domain.encode()] = clients

    def forget(self, domain: str) -> None:
        """Remove the allow-list of ``domain``, and those of its parts: nobody may connect any more."""
        name = domain.encode()
        for each in [each for each in self._allowed if each == name or each.startswith(name + b"/")]:
            del self._allowed[each]

    def _asked(self, frames: list[bytes]) -> None:
        # [identity of the session, "", version, request id, domain, address, identity, mechanism, credentials …]
        envelope, question = frames[:2], frames[2:]
        if len(question) < 2:
            return  # without a request id there is no answer; libzmq sends no such request
        good = len(question) == 7 and question[0] == _VERSION and question[5] == b"CURVE"
        known = good and question[6] in self._allowed.get(question[2], ())
        verdict = (b"200", b"OK") if known else (b"300", b"not allowed")
        with contextlib.suppress(zmq.ZMQError):  # the connection is gone meanwhile
            self._socket.send_multipart([*envelope, _VERSION, question[1], *verdict, b"", b""], zmq.NOBLOCK)
        self._pump.kick()

    def close(self) -> None:
        """Stop answering: from now on nobody may connect."""
        self._pump.close()
