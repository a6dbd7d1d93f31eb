"""Where a dial ended, and the sentence for it. Log, ``/sources`` and ``kvbus doctor`` all take it from here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

PUBLISHERS: Final = frozenset({"PUB", "XPUB"})
SUBSCRIBERS: Final = frozenset({"SUB", "XSUB"})


class Stop(StrEnum):
    """Where a dial ended. Bounded, in the order in which a dial gets there."""

    NAME = "name"
    """The host name does not resolve."""
    REFUSED = "refused"
    """Nothing listens there."""
    NO_ROUTE = "no_route"
    """The network has no way there, or forbids it."""
    DROPPED = "dropped"
    """Nobody answers the connection attempt: a firewall, or no machine."""
    OTHER_ADDRESS = "other_address"
    """Nothing listens at the address that ZeroMQ takes for the name, and something does at another one of the name."""
    SILENT = "silent"
    """The port accepts, and says nothing."""
    STRANGER = "stranger"
    """The port speaks another protocol."""
    VERSION = "version"
    """The peer speaks a version of ZMTP that nobody can use here."""
    MECHANISM = "mechanism"
    """One side wants CURVE and the other does not."""
    KEYS = "keys"
    """Both sides want CURVE, and the keys do not fit."""
    NO_CURVE = "no_curve"
    """Both sides want CURVE, and the package for looking at it is not installed here."""
    CLOSED = "closed"
    """The peer ended the connection during the handshake."""
    OPEN = "open"
    """The handshake is over."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one dial.

    Attributes:
        endpoint: what was dialled.
        stop: where it ended.
        detail: what is particular about it, as a part of :attr:`sentence`.
        addresses: what the name resolves to, the address that ZeroMQ takes first.
        mechanism: the peer's security mechanism; empty if the dial did not get so far.
        socket_type: the peer's socket type; empty if the dial did not get so far.
        version: the peer's ZMTP.
    """

    endpoint: str
    stop: Stop
    detail: str = ""
    addresses: tuple[str, ...] = ()
    mechanism: str = ""
    socket_type: str = ""
    version: tuple[int, int] = (0, 0)

    @property
    def sentence(self) -> str:
        """Why nothing comes of this endpoint, or that it is open."""
        return f"{_SENTENCES[self.stop].format(endpoint=self.endpoint)}{f' ({self.detail})' if self.detail else ''}"

    @property
    def no_publisher(self) -> str:
        """Why nobody publishes at this endpoint; empty if somebody does."""
        if self.stop is not Stop.OPEN:
            return self.sentence
        if self.socket_type in PUBLISHERS:
            return ""
        return f"{self.endpoint} is a {self.socket_type} socket and no publisher"


_SENTENCES = {
    Stop.NAME: "the host name of {endpoint} does not resolve",
    Stop.REFUSED: "nothing listens at {endpoint}",
    Stop.NO_ROUTE: "there is no way to {endpoint}",
    Stop.DROPPED: "nobody answers at {endpoint}: a firewall drops the packets, or the machine is away",
    Stop.OTHER_ADDRESS: "nothing listens at the first address of {endpoint}, the only one that ZeroMQ tries",
    Stop.SILENT: "{endpoint} accepts and says nothing: it is no ZeroMQ socket, or its process stands still",
    Stop.STRANGER: "{endpoint} does not speak ZeroMQ",
    Stop.VERSION: "{endpoint} speaks ZMTP 1.0, which is too old",
    Stop.MECHANISM: "CURVE is on at one side of {endpoint} only",
    Stop.KEYS: "the CURVE keys do not fit at {endpoint}",
    Stop.NO_CURVE: "CURVE at {endpoint} cannot be looked at: kvbus[curve] is not installed",
    Stop.CLOSED: "{endpoint} ends the connection in the handshake",
    Stop.OPEN: "{endpoint} is open",
}
