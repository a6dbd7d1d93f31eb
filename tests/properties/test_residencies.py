"""Tests that routers are exact if an engine keeps a block on one medium under several localities and owners.

Each of them is a residency, which the engine stores and removes separately (vLLM 0.26 and 0.30). Routers that know the
fields hold each residency. The others hold one block for all residencies on a medium.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvbus.core.checkpoint import Loader, dump
from kvbus.core.commands import Publish, SendState
from kvbus.core.events import BatchReceived, SourceUp, Subscribed
from kvbus.core.outputs.spec import OutputSpec, Rights
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.profiles import PROFILES
from kvbus.core.write_ahead_log import Records, decode_records
from tests.doubles.payloads import batch, cleared, removed, store
from tests.doubles.router import events_of

NODES = 7
SIZE = 4
PAIRS: list[tuple[str | None, str | None]] = [
    (None, None),
    ("LOCAL", None),
    ("REMOTE", None),
    (None, "kvcr"),
    ("LOCAL", "kvcr"),
]
PLACES = st.tuples(st.sampled_from([None, 0]), st.sampled_from(["GPU", "CPU", "STORAGE"]), st.sampled_from(PAIRS))
PATHS = st.builds(
    lambda first, count: list(range(first, min(first + count, NODES))), st.integers(0, 6), st.integers(1, 3)
)
EVENTS = st.one_of(
    st.tuples(st.just("store"), PLACES, PATHS),
    st.tuples(st.just("store"), PLACES, PATHS),
    st.tuples(st.just("remove"), PLACES, PATHS),
    st.tuples(st.just("remove"), PLACES, PATHS),
    st.tuples(st.just("clear"), st.none(), st.none()),
)
STEPS = st.lists(
    st.one_of(
        st.lists(EVENTS, min_size=1, max_size=6),
        st.lists(EVENTS, min_size=1, max_size=6),
        st.sampled_from(["late", "restart"]),
    ),
    min_size=1,
    max_size=8,
)

_ON_GPU: Any = (None, "GPU", (None, None))
CLEARED_AND_STORED_ELSEWHERE: Any = [
    *[("store", _ON_GPU, [0])] * 3,
    ("store", (None, "CPU", (None, None)), [0]),
    ("clear", None, None),
    ("store", (None, "GPU", ("LOCAL", None)), [0]),
]
"""A batch that clears blocks and stores them under another locality: the removal of sub-blocks is still held back."""

Key = tuple[Any, ...]
"""A block: its group, medium, locality and owner, and then its hash."""


def filed(key: Key, residencies: str) -> Key:
    group, medium, locality, owner, block = key
    if residencies == "one":
        return group, medium, block
    return group, medium, None if residencies == "worker" and locality == "LOCAL" else locality, owner, block


class Engine:
    """An engine that keeps a chain of blocks in several places, and counts the copies of each block in each place."""

    def __init__(self) -> None:
        self.copies = Counter[Key]()

    @property
    def live(self) -> set[Key]:
        return {key for key, count in self.copies.items() if count}

    def events(self, steps: Any) -> list[dict[str, Any]]:
        """Apply changes, and return the events that the engine sends for them."""
        sent: list[dict[str, Any]] = []
        for what, place, path in steps:
            if what == "clear":
                again = cleared() in sent
                sent.append(cleared())
                for key in [key for key in self.copies if (key[1] == "GPU") != again]:
                    del self.copies[key]
                continue
            group, medium, (locality, owner) = place
            names = {name: text for name, text in (("locality", locality), ("ownership", owner)) if text is not None}
            if what == "store":
                self.copies.update((group, medium, locality, owner, block) for block in path)
                tokens = [100 * block + at for block in path for at in range(SIZE)]
                parent = path[0] - 1 if path[0] else None
                sent.append(store(path, parent, tokens=tokens, block_size=SIZE, medium=medium, group=group, **names))
                continue
            held = [block for block in path if self.copies[group, medium, locality, owner, block]]
            self.copies.subtract((group, medium, locality, owner, block) for block in held)
            if held:
                sent.append(removed(held, medium=medium, group=group, **names))
        return sent


class Router:
    """A router that files blocks in one of three ways. It fails if it gets a store or removal twice."""

    def __init__(self, residencies: str) -> None:
        self.residencies = residencies
        self.blocks: set[Key] = set()

    def apply(self, payload: bytes) -> None:
        for event in events_of(payload):
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
                continue
            place = event.get("group_idx"), event["medium"], event.get("locality"), event.get("ownership")
            for block in event["block_hashes"]:
                key = filed((*place, block), self.residencies)
                stores = event["type"] == "BlockStored"
                assert (key in self.blocks) != stores, f"{event['type']} of {key}"
                (self.blocks.add if stores else self.blocks.remove)(key)


class Bus:
    """A relay with one output, its router, and an engine."""

    def __init__(self, profile: str, *, size: int | None = None, view: bool = False) -> None:
        rights = Rights(loras=".*") if view else Rights()
        self.profile = PROFILES[profile]
        self.source = SourceSpec(
            "engine", replay=False, probe_interval=0.0, on_lost="keep", clears="device", block_size=size
        )
        self.outputs = [OutputSpec("out", self.profile, [None], merged=True, heartbeat=0.0, rights=rights)]
        self.engine = Engine()
        self.router = Router(self.profile.residencies)
        self.seq = 0
        self.relay = self.started()
        self.relay.handle(SourceUp(0), 0.0)

    def started(self) -> Relay:
        relay = Relay([self.source], self.outputs)
        self.saved = list(dump(relay))
        relay.records = Records()
        return relay

    def say(self, steps: Any) -> None:
        events = self.engine.events(steps)
        if self.outputs[0].rights.loras:
            events = [each | ({"lora_name": "a"} if each["type"] == "BlockStored" else {}) for each in events]
        for command in self.relay.handle(BatchReceived(0, batch(self.seq, *events)), 0.0):
            if isinstance(command, Publish):
                self.router.apply(command.payload)
        self.seq += 1

    def restart(self, *, checkpoint: bool) -> None:
        """Continue with the relay of a new process, from a checkpoint or from the write-ahead log."""
        assert self.relay.records is not None
        body, payloads = self.relay.records.take()
        saved = list(dump(self.relay)) if checkpoint else self.saved
        log = [] if checkpoint else decode_records(body, b"".join(payloads))
        assert log is not None
        self.relay = self.started()
        loader = Loader(self.relay)
        for blob in saved:
            loader.feed(blob)
        for record in log:
            self.relay.apply_record(record, 0.0)
        self.saved = list(dump(self.relay))
        self.relay.recovery_finished(0.0)
        self.relay.handle(SourceUp(0), 0.0)

    def late(self) -> Router:
        """Return a router that has just subscribed, and got the state."""
        late = Router(self.profile.residencies)
        command = self.relay.handle(Subscribed(0, 0, (1,)), 0.0)[-1]
        assert isinstance(command, SendState)
        for message in command.transfer.batches():
            if message is not None:
                late.apply(message[1])
        return late

    def check(self, router: Router) -> None:
        wanted = {filed(key, self.profile.residencies) for key in self.engine.live}
        if self.profile.one_group:
            first = self.relay.sources[0].normalizer.first_group
            wanted = {(None, *key[1:]) for key in wanted if key[0] == first}
        assert router.blocks == wanted


FAMILIES = [("vllm", False), ("vllm", True), ("dynamo", False), ("sglang", True), ("llm-d", False), ("mooncake", False)]


@pytest.mark.parametrize(("profile", "view"), FAMILIES)
@given(steps=STEPS)
def test_routers_hold_the_residencies_of_the_engines_blocks(profile: str, view: bool, steps: Any) -> None:
    bus = Bus(profile, view=view)
    for at, step in enumerate(steps):
        if step == "restart":
            bus.restart(checkpoint=at % 2 == 0)
        elif step != "late":
            bus.say(step)
        bus.check(bus.router)
        bus.check(bus.late())


@pytest.mark.parametrize("profile", ["vllm", "dynamo", "llm-d"])
@given(steps=STEPS)
@example(steps=[CLEARED_AND_STORED_ELSEWHERE])
def test_routers_hold_the_residencies_of_sub_blocks(profile: str, steps: Any) -> None:
    """kvbus cuts each block into two sub-blocks, whose hashes it derives."""
    bus = Bus(profile, size=SIZE // 2)
    for at, step in enumerate(steps):
        if step == "restart":
            bus.restart(checkpoint=at % 2 == 0)
        elif step != "late":
            bus.say(step)
        assert bus.late().blocks == bus.router.blocks
        tables = bus.relay.sources[0].normalizer.index.tables
        named = [(*key, name) for key, table in tables.items() for name in table.refs]
        assert len(named) == 2 * len(bus.engine.live)
        # A block whose parent was unknown in one residency has other sub-blocks there than in another residency.
        assert bus.router.blocks == {filed(key, bus.profile.residencies) for key in named}
