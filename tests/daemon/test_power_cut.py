"""The power is cut at any change of the disk. What was synced is there afterwards, of the rest anything may be.

With ``state_sync: batch`` the state is exact. With ``none`` it is loaded as one that routers may be ahead of, or refused.
With both no seq is used twice, and where the state is not exact, routers are cleared before anything else.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from nacl.bindings import crypto_aead_xchacha20poly1305_ietf_encrypt

from kvbus.config import Config, load
from kvbus.core.commands import Command, Publish
from kvbus.core.events import BatchReceived, Subscribed
from kvbus.daemon import state_seal, state_store
from kvbus.daemon.daemon import Daemon
from tests.doubles.disk import Machine, MemoryDisk, PowerCut
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import removed, store
from tests.long import LONG
from tests.ports import free_ports

SEEDS = 400 if LONG else 16
ROTATE = 3_000
CLEAR = b"AllBlocksCleared"


def truth(batches: int) -> set[int | bytes]:
    """The blocks that are there after so many batches of the engine."""
    return {n for n in range(batches) if n + 1 >= batches or (n + 1) % 4 == 0}


def engine_batch(n: int) -> bytes:
    """It stores block n, and removes the one before but for every fourth."""
    return batch(store([n]), *([removed([n - 1])] if n and n % 4 else []))


class Run:
    """A process on the machine, and what routers got of it."""

    def __init__(self, machine: Machine, config: Config, operations: int | None, seen: int, known: int) -> None:
        self.disk = MemoryDisk(machine, operations)
        self.seen = seen
        """The highest seq that a router ever got."""
        self.first: bytes | None = None
        """What was sent first."""
        self.config = config
        self.daemon: Daemon | None = None
        self.known = known
        """Batches of the engine that routers know of."""

    async def start(self) -> Daemon:
        """Start; the power may be cut meanwhile."""
        daemon = self.daemon = Daemon(self.config, disk=self.disk)
        carry_out = daemon.carry_out

        def watched(commands: list[Command]) -> None:
            carry_out(commands)  # what the power was cut in was not sent
            for command in commands:
                if isinstance(command, Publish):
                    assert command.seq > self.seen, "a seq was used twice"
                    self.seen = command.seq
                    self.first = self.first or command.payload

        daemon.carry_out = watched  # type: ignore[method-assign]
        await daemon.start()
        return daemon

    async def live(self, chance: random.Random) -> None:
        """Batches of the engine, routers that subscribe, checkpoints beside them, until the power is cut."""
        daemon = await self.start()
        assert daemon.state is not None
        self.known = daemon.relay.sources[0].sequencer.next
        connected = not self.known
        for _ in range(300):
            if connected and chance.random() < 0.9:
                daemon.feed(BatchReceived(0, [b"", self.known.to_bytes(8, "big"), engine_batch(self.known)]))
                self.known += 1
            else:
                daemon.feed(Subscribed(0, 0, (1,)))
            if chance.random() < 0.5:
                daemon.state.work()

    async def end(self) -> None:
        """Close what is left of it."""
        self.disk.off = True
        if self.daemon is not None:
            await self.daemon.close(drain=0)


def once_for_each_nonce() -> Callable[[bytes, bytes, bytes, bytes], bytes]:
    """The seal; no nonce may be used with a key for two texts."""
    seal = crypto_aead_xchacha20poly1305_ietf_encrypt
    used: dict[tuple[bytes, bytes], tuple[bytes, bytes]] = {}

    def checked(text: bytes, head: bytes, nonce: bytes, key: bytes) -> bytes:
        assert used.setdefault((key, nonce), (text, head)) == (text, head), "a nonce was used twice"
        return seal(text, head, nonce, key)

    return checked


def blocks_of(daemon: Daemon) -> set[int | bytes]:
    return {block for table in daemon.relay.sources[0].normalizer.index.tables.values() for block in table.blocks}


@pytest.mark.parametrize("kill", [False, True], ids=["power cut", "kill"])
@pytest.mark.parametrize("sync", ["none", "batch"])
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_the_power_is_cut_at_any_moment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, sync: str, *, kill: bool
) -> None:
    """Every other state is sealed. On a busy machine a slice of a checkpoint may be none at all."""
    monkeypatch.setattr(state_store, "MIN_ROTATE", ROTATE)
    now = functools.partial(random.Random(seed).uniform, 0, 2 * state_store.SLICE_SECONDS)
    monkeypatch.setattr(state_store, "time", SimpleNamespace(perf_counter=now))
    key_file = tmp_path / "state.key"
    key_file.write_text("07" * 32)
    key_file.chmod(0o600)
    monkeypatch.setattr(state_seal, "crypto_aead_xchacha20poly1305_ietf_encrypt", once_for_each_nonce())
    chance = random.Random(seed)
    machine = Machine(seed)
    engine, live = free_ports(2)
    config = load(
        None,
        env={},
        overrides={
            "sources": [{"endpoint": f"tcp://127.0.0.1:{engine}"}],
            "outputs": [{"endpoint": f"tcp://127.0.0.1:{live}", "heartbeat": 0}],
            "http": None,
            "on_lost": "keep",
            "state_dir": "/state",
            "state_key_file": str(key_file) if seed % 2 else None,
            "state_sync": sync,
        },
    )
    seen, known, exact = -1, 0, True
    for _ in range(3):
        run = Run(machine, config, chance.choice([chance.randrange(1, 60), chance.randrange(1, 700)]), seen, known)
        try:
            await run.live(chance)
        except PowerCut:
            pass
        finally:
            await run.end()
        seen, known = run.seen, run.known
        may_be_exact = kill or sync == "batch"
        if not kill:
            machine.cut_power()
            # the next process is killed while it starts, or does
            doomed = Run(machine, config, chance.choice([0, *range(2, 30)]) or None, seen, known)
            with contextlib.suppress(PowerCut):
                await doomed.start()
            await doomed.end()
            may_be_exact |= doomed.daemon is not None
            seen = doomed.seen
        after = Run(machine, config, None, seen, known)
        try:
            daemon = await after.start()
            following = daemon.relay.sources[0].sequencer.next
            next_seq = daemon.relay.outputs[0].streams[0].next_seq
            assert blocks_of(daemon) == truth(following)
            assert following <= known + 1
            assert next_seq > seen
            assert next_seq < 2**62
            if daemon.restored:
                assert may_be_exact
                assert following >= known or sync == "none"
                assert after.first is None
            elif seen >= 0:
                exact = False
                assert after.first is not None
                assert CLEAR in after.first
                assert not daemon.relay.sources[0].announced
                assert following == 0 or daemon.relay.sources[0].expired
        finally:
            await after.end()
        seen, known = after.seen, following
    assert exact or sync == "none", "what was synced, or only killed, is exact"
