"""The endpoint that requesters connect to: bound, and bound again, with limits that find out who does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final

from kvbus.common.errors import BindError
from kvbus.core.stats import OutputStats
from kvbus.transport.live.endpoint import REOPEN
from kvbus.transport.requester import FIRST_SHARE
from kvbus.transport.sockets import PeerPolicy
from kvbus.transport.zmtp.endpoint import SYSTEM, Listener, Settings, System
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.peer import PeerHandler
from kvbus.transport.zmtp.protocol import DEFAULT, Limits
from kvbus.transport.zmtp_keys import Keys

MAX_PEERS: Final = 2_048
"""Connections of one endpoint."""


class ReplayEndpoint:
    """A ROUTER that is bound.

    Args:
        endpoint: the endpoint to bind.
        handler: gets what happens to its peers.
        stats: counters of the output; connections that are refused are counted here.
        policy: who may connect, and the largest frame to accept.
        system: the operating system.

    Raises:
        BindError: the endpoint cannot be bound.
    """

    def __init__(
        self, endpoint: str, handler: PeerHandler, stats: OutputStats, policy: PeerPolicy, system: System = SYSTEM
    ) -> None:
        self._endpoint = endpoint
        self._system = system
        self._handler = handler
        self._stats = stats
        self._listener = self._listen(policy)
        self._again: asyncio.TimerHandle | None = None

    def _listen(self, policy: PeerPolicy) -> Listener:
        limit = policy.max_frame_bytes if policy.max_frame_bytes > 0 else DEFAULT.frame_bytes
        settings = Settings(
            limits=Limits(frame_bytes=limit, message_bytes=limit),
            max_peers=MAX_PEERS,
            # one that does not read is found out at once, and not after megabytes; more may wait for one that reads
            high_water=0,
            low_water=0,  # the kernel still has enough to send; and an answer is over when all of it has left
            unsent_bytes=FIRST_SHARE,
            system=self._system,
        )
        self._keys = Keys(policy.curve, bind=True)
        mechanism = self._keys.mechanism
        return Listener(
            self._endpoint, Role.ROUTER, self._handler, settings=settings, refused=self._refused, mechanism=mechanism
        )

    def _refused(self, reason: str, _address: str, _detail: str) -> None:
        self._stats.refused[reason] += 1

    def allow(self, clients: Collection[bytes]) -> None:
        """Replace the allow-list; requesters that are not on it any more are disconnected."""
        self._keys.allow(clients, self._listener.peers.values())

    def reopen(self, policy: PeerPolicy) -> None:
        """Disconnect every requester, and bind again."""
        if self._again is not None:
            self._again.cancel()  # with the policy before this one
        self._listener.close()
        try:
            self._listener = self._listen(policy)
        except BindError:  # another process has taken the endpoint in this moment
            self._again = asyncio.get_running_loop().call_later(REOPEN, self.reopen, policy)

    def close(self, linger: float = 0.0) -> None:
        """Close the endpoint; what was handed over has ``linger`` seconds to leave."""
        if self._again is not None:
            self._again.cancel()
        self._listener.close(linger)
