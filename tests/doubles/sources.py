"""Other sources for a running daemon, by the way that discovery takes."""

from __future__ import annotations

import asyncio

from kvbus.config import Config
from kvbus.daemon.change import change_to
from kvbus.daemon.daemon import Daemon
from kvbus.daemon.keys import read_keys


async def change_sources(daemon: Daemon, wanted: Config) -> None:
    """Change to the sources of another configuration.

    Raises:
        KvbusError: an endpoint, a numbering or a key file cannot be had; nothing has changed.
    """
    async with daemon.changing:
        change = change_to(daemon.config, wanted, daemon.source_sockets.is_open, daemon.placement)
        await daemon.changes.apply(change, await asyncio.to_thread(read_keys, wanted))
