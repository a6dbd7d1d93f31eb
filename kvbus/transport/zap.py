"""Who may dial in: libzmq asks the ZAP handler (RFC 27) at every CURVE handshake, in this process.

It fails closed. An unknown domain, another mechanism, a malformed question or a key that is not on the list is answered
with 300, "not now", and the connection is dropped when the time for handshakes is over (3 s): a libzmq client tries
again, and is let in once its key was added. (After 400 it would stay away for ever.)
"""

from __future__ import annotations

import contextlib
from typing import Final

import zmq

from kvbus.transport.pump import Pump
from kvbus.transport.sockets import Context, make_socket

ENDPOINT: Final = "inproc://zeromq.zap.01"
"""Where libzmq asks, one handler for a context."""

_VERSION: Final = b"1.0"


class ZapHandler:
    """Answer libzmq's questions from an allow-list for each domain. Needs a running loop; make it before any server."""

    def __init__(self, context: Context) -> None:
        self._allowed: dict[bytes, frozenset[bytes]] = {}
        self._socket = make_socket(context, zmq.ROUTER)
        self._socket.bind(ENDPOINT)
        self._pump = Pump(self._socket, self._asked)

    def allow(self, domain: str, clients: frozenset[bytes]) -> None:
        """From now on these public keys (32 bytes each) are let into ``domain``, and no other."""
        self._allowed[domain.encode()] = clients

    def forget(self, domain: str) -> None:
        """Let nobody into ``domain`` any more."""
        self._allowed.pop(domain.encode(), None)

    def _asked(self, frames: list[bytes]) -> None:
        # [identity of the session, "", version, request id, domain, address, identity, mechanism, credentials …]
        envelope, question = frames[:2], frames[2:]
        if len(question) < 2:
            return  # there is no request id to answer to; libzmq sends none such
        good = len(question) == 7 and question[0] == _VERSION and question[5] == b"CURVE"
        known = good and question[6] in self._allowed.get(question[2], ())
        verdict = (b"200", b"OK") if known else (b"300", b"not allowed")
        with contextlib.suppress(zmq.ZMQError):  # the session has gone away in the meantime
            self._socket.send_multipart([*envelope, _VERSION, question[1], *verdict, b"", b""], zmq.NOBLOCK)
        self._pump.kick()

    def close(self) -> None:
        """Answer no more: nobody is let in."""
        self._pump.close()
