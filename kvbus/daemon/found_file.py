"""What discovery found last, kept with the seq reservations: a restart goes on with it until it is asked anew.

So the sources are those that the state on disk belongs to, and one that cannot be asked after a restart costs nothing.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from kvbus.config import Config
from kvbus.parts.discovery.contract import Engine
from kvbus.state.reservations import SeqReservations

log = logging.getLogger("kvbus.daemon.discovery")

Found = dict[str, list[Engine]]
"""The engines that are sources, by entry."""

_KEPT: Final = "found"


class FoundFile:
    """Keeps the engines that were found.

    Args:
        reservations: where they are kept.
        config: says whether engines are searched at all.
    """

    def __init__(self, reservations: SeqReservations, config: Config) -> None:
        self._reservations = reservations
        self._searches = any(source.discover is not None for source in config.sources)

    def read(self) -> Found:
        """Return what was kept; nothing where nothing was, or damaged content."""
        content = self._reservations.kept(_KEPT) if self._searches else None
        if content is None:
            return {}
        try:
            kept = msgspec.json.decode(content, type=Found)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("the engines that were kept are damaged (%s): engines are found anew", error)
            return {}
        # an engine without a publisher can be no source
        return {name: [engine for engine in engines if engine.publishers] for name, engines in kept.items()}

    def keep(self, found: Found) -> None:
        """Keep what was found."""
        if self._searches:
            self._reservations.keep(_KEPT, msgspec.json.encode(found))
