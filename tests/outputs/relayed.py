"""An output driver behind a relay, for tests of the state that an output sends to its readers.

One simulated engine stores blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvbus.core.commands import Publish, SendState
from kvbus.core.events import BatchReceived, RelayEvent, SourceUp
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.stats import OutputStats
from kvbus.core.wire.profiles import PROFILES
from kvbus.parts.outputs.contract import Services
from kvbus.transport.sockets import PLAIN
from tests.doubles.bus import eventually
from tests.doubles.payloads import payload, store, unpack
from tests.doubles.router import PlainSetRouter
from tests.outputs.driven import TOPIC, make_driver
from tests.outputs.readers import KINDS, Reader
from tests.transport.loops import turns, u64


class StateReader:
    """A reader of an output that keeps a plain set of blocks. It applies batches in the order of arrival."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.seqs: list[int] = []
        self.events: dict[int, list[dict[str, Any]]] = {}
        """The events of each batch that the reader received, by the batch's seq."""
        self.view = PlainSetRouter()

    @property
    def blocks(self) -> set[Any]:
        return {block for *_, block in self.view.blocks}

    @property
    def holes(self) -> list[int]:
        """Seqs that the reader did not get, counted from its first batch on."""
        got = set(self.seqs)
        return [seq for seq in range(self.seqs[0], self.seqs[-1]) if seq not in got]

    def more(self) -> int:
        """Apply the batches that have arrived. Return the number of all batches that the reader has got."""
        for _, seq, batch in self.reader.take():
            self.seqs.append(seq)
            self.events[seq] = unpack(batch)[1]
            self.view.take(seq, batch)
        return len(self.seqs)


class Relayed:
    """An output driver with one stream, and the relay that publishes on it."""

    def __init__(self, name: str, directory: Path, **settings: Any) -> None:
        engine = SourceSpec("engine", 0, replay=False)
        self.relay = Relay([engine], [OutputSpec("routers", PROFILES["vllm"], [TOPIC], heartbeat=0)])
        self.stats = OutputStats()
        services = Services(self.stats, self.feed, lambda: 0.0, 4)
        self.config, self.driver = make_driver(name, directory, {"on_subscribe": "state", **settings}, services)
        self.kind = KINDS[name]
        self.readers: list[Reader] = []
        self.published: dict[int, int] = {}
        """Number of events of each batch that the relay has published, by seq."""
        self.blocks: set[int] = set()
        """Hashes of the blocks that the simulated engine holds."""
        self._batches = 0

    def feed(self, event: RelayEvent) -> None:
        """Pass an event to the relay, and execute the resulting commands as the daemon does."""
        for command in self.relay.handle(event, 0.0):
            if isinstance(command, SendState):
                self.driver.send_state(command)
            elif isinstance(command, Publish):
                self.published[command.seq] = command.events
                self.driver.publish(command)
        self.driver.flush()

    def store(self, count: int) -> None:
        """Let the engine store ``count`` more blocks in one batch."""
        first = len(self.blocks) + 1
        hashes = list(range(first, first + count))
        self.blocks.update(hashes)
        batch = payload(*(store([block], tokens=[block % 1000] * 16) for block in hashes))
        self.feed(BatchReceived(0, [b"", u64(self._batches), batch]))
        self._batches += 1

    async def reader(self, *, slow: bool = False) -> StateReader:
        """Connect one more reader to the output, wait until it is connected, and return it."""
        self.readers.append(self.kind.connect(self.config, 0, slow=slow))
        await eventually(lambda: self.kind.joined(self.stats, self.readers), "every reader let in")
        return StateReader(self.readers[-1])

    @property
    def newest(self) -> int:
        """The newest seq of the stream."""
        return self.relay.outputs[0].streams[0].next_seq - 1

    async def level(self, *readers: StateReader) -> None:
        """Wait until readers have the newest batch, and check that they hold all blocks of the engine."""
        for reader in readers:
            await eventually(lambda r=reader: r.more() and r.seqs[-1] == self.newest, "the newest batch")
            assert reader.blocks == self.blocks
            assert reader.view.violations == []


@contextlib.asynccontextmanager
async def relaying(name: str, directory: Path, **settings: Any) -> AsyncIterator[Relayed]:
    """Yield a driver with a relay. Close the driver at the end."""
    relayed = Relayed(name, directory, **settings)
    try:
        relayed.driver.open(0, TOPIC, PLAIN)
        relayed.feed(SourceUp(0))
        yield relayed
    finally:
        relayed.driver.close(0)
        for reader in relayed.readers:
            reader.close()
        await turns()
