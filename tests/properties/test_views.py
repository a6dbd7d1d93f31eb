"""Tests for routers with limited rights: each router ends with its tenant's blocks, and gets no data of another tenant.

Each of two tenants has a tree of blocks in the same engines. The relay serves a view for each tenant, and an output
with all blocks (the witness). A model of sets follows the witness: a store belongs to a view if it names the tenant, or
if its parent belongs to the view. Routers join and leave, lose batches and request replays, engines restart, and kvbus
restarts with its state.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.core.blocks.announce import announce
from kvbus.core.checkpoint import Loader, dump
from kvbus.core.commands import Publish
from kvbus.core.outputs.spec import OutputSpec, Rights
from kvbus.core.relay import Relay
from kvbus.core.types import medium_key
from kvbus.core.wire.profiles import Profile, Wire
from tests.doubles.payloads import cleared, plain_all, removed, store, unpack
from tests.doubles.stage import Checking, FromZero, Place, Stage, Trusting, cut_states
from tests.properties.test_state_on_subscription import SLICE, specs

TENANTS = ("a", "b")
SIZE = 4
Node = tuple[str, int]


def name(node: Node) -> int:
    return (TENANTS.index(node[0]) * 1000 + node[1] + 1) * 0x9E3779B97F4A7C15 % 2**64


def tokens(node: Node) -> list[int]:
    first = 10_000 * TENANTS.index(node[0]) + 100 * node[1]
    return list(range(first, first + SIZE))


def parent_of(node: Node) -> Node | None:
    tenant, n = node
    return (tenant, (n - 1) // 2) if n else None


NODES = 15
OWNER = {name((tenant, n)): tenant for tenant in TENANTS for n in range(NODES)}
TOKENS = {token: tenant for tenant in TENANTS for n in range(NODES) for token in tokens((tenant, n))}


@st.composite
def paths(draw: st.DrawFn) -> list[Node]:
    """Draw some blocks of one tenant, on a downward path of its tree."""
    tenant = draw(st.sampled_from(TENANTS))
    path = [draw(st.integers(0, NODES - 1))]
    while len(path) < 3 and 2 * path[-1] + 2 < NODES and draw(st.booleans()):
        path.append(2 * path[-1] + draw(st.integers(1, 2)))
    return [(tenant, n) for n in path]


MEDIA = st.sampled_from(["GPU", "GPU", None, "CPU"])
EVENTS = st.one_of(
    st.tuples(st.just("store"), MEDIA, paths()),
    st.tuples(st.just("store"), MEDIA, paths()),
    st.tuples(
        st.just("remove"),
        MEDIA,
        st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, NODES - 1)), min_size=1, max_size=5),
    ),
    st.tuples(st.just("clear"), st.none(), st.none()),
)


def says(dialect: str, path: list[Node]) -> dict[str, Any]:
    """Return the event fields in which an engine with this dialect names the tenant of a store.

    ``path`` has the blocks of the store, each as a pair of tenant and number.
    """
    tenant, n = path[0]
    if dialect == "lora":
        return {"lora_name": tenant, "lora_id": 1}
    if dialect == "sglang":
        return {"cache_salt": tenant}
    return {"extra_keys": [[tenant] if not n else None, *[None] * (len(path) - 1)]}


def wire_events(dialect: str, wanted: list[Any]) -> list[dict[str, Any]]:
    events = []
    for what, medium, detail in wanted:
        if what == "clear":
            events.append(cleared())
        elif what == "remove":
            events.append(removed([name(node) for node in detail], medium=medium))
        else:
            parent = parent_of(detail[0])
            body = [token for node in detail for token in tokens(node)]
            events.append(
                store(
                    [name(node) for node in detail],
                    None if parent is None else name(parent),
                    tokens=body,
                    block_size=SIZE,
                    medium=medium,
                    **says(dialect, detail),
                )
            )
    return events


def rights(dialect: str, tenant: str) -> Rights:
    return Rights(loras=tenant) if dialect == "lora" else Rights(salts=frozenset({tenant}))


class Shown:
    """A model of the blocks in a tenant's view.

    It is computed from the batches of the witness, an output with all blocks.
    """

    def __init__(self, tenant: str, *, inherits: bool) -> None:
        self.tenant = tenant
        self.inherits = inherits
        self.blocks: set[tuple[int, None, str, int]] = set()

    def take(self, slot: int, payload: bytes) -> None:
        for event in unpack(payload)[1]:
            if event["type"] == "AllBlocksCleared":
                self.blocks = {key for key in self.blocks if key[0] != slot}
                continue
            names = event["block_hashes"]
            keys = {(slot, None, medium_key(event["medium"]) or "", block) for block in names}
            if event["type"] == "BlockRemoved":
                self.blocks -= keys
                continue
            known = {key[3] for key in self.blocks if key[0] == slot}
            parent = event["parent_block_hash"]
            decided = not self.inherits or parent is None or parent in known or names[0] in known
            if decided and OWNER[names[0]] == self.tenant:
                self.blocks |= keys


class Views(Stage):
    """A stage with engines, a relay with a view for each tenant, and an output that has the blocks of all tenants."""

    def __init__(self, dialect: str, sources: int, journal: int, *, merged: bool, filled: bool) -> None:
        self.dialect = dialect
        self.merged = merged
        self.shown = {tenant: Shown(tenant, inherits=dialect == "vllm") for tenant in TENANTS}
        self.sent: dict[Place, list[tuple[int, bytes]]] = {}

        def output(tenant: str | None) -> OutputSpec:
            more: dict[str, Any] = {} if tenant is None else {"rights": rights(dialect, tenant)}
            return OutputSpec(
                tenant or "all",
                Profile(Wire(), "4", filled),
                [None] if merged else [None] * sources,
                merged=merged,
                heartbeat=0.0,
                journal_batches=journal,
                **more,
            )

        super().__init__(specs(sources, ranked=True), [output(None), *(output(tenant) for tenant in TENANTS)])

    def published(self, command: Publish) -> None:
        sent = self.sent.setdefault((command.output, command.stream), [])
        assert command.seq == (sent[-1][0] + 1 if sent else command.seq), "the numbers are dense"
        sent.append((command.seq, command.payload))
        if not command.output:
            for shown in self.shown.values():
                shown.take(unpack(command.payload)[2], command.payload)

    def say(self, source: int, wanted: Any) -> None:
        i = source % len(self.said)
        self.send(i, *wire_events(self.dialect, wanted), rank=i)

    def restart(self, _: int) -> None:
        """Restart kvbus: load its saved state into a new relay."""
        relay = Relay(*self.specs)
        loader = Loader(relay)
        for blob in list(dump(self.relay)):
            loader.feed(blob)
        assert loader.complete
        before, self.relay = self.held(), relay
        assert self.held() == before

    def held(self) -> list[Any]:
        """Return the blocks of each view and source, in the order in which a state announces them."""
        views = [output.view for output in self.relay.outputs if output.view is not None]
        return [[plain_all(announce(view.index(slot))) for slot in range(len(self.said))] for view in views]

    def truth(self, tenant: str) -> set[Any]:
        return {key for key in self.shown[tenant].blocks if self.merged or key[0] == 0}


class Tenant:
    """A router of one tenant. It checks that no batch of its stream has blocks or tokens of another tenant."""

    place: Place

    def apply(self, payload: bytes) -> None:
        for event in unpack(payload)[1]:
            owners = {OWNER[block] for block in event.get("block_hashes", ())}
            owners |= {TOKENS[token] for token in event.get("token_ids", ())}
            assert owners <= {TENANTS[self.place[0] - 1]}
        super().apply(payload)  # type: ignore[misc]


class ApplyingTenant(Tenant, Trusting):
    """A router of a tenant that applies every batch."""


class CheckingTenant(Tenant, Checking):
    """A router of a tenant that requests missing batches."""


class TenantFromZero(Tenant, FromZero):
    """A router of a tenant that requests a replay whenever it connects, the first time from 0."""


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(0, 1), st.lists(EVENTS, max_size=6)),
        st.tuples(st.just("say"), st.integers(0, 1), st.lists(EVENTS, max_size=6)),
        st.tuples(st.sampled_from(["restart_engine", "lose_batch"]), st.integers(0, 1), st.none()),
        st.tuples(st.sampled_from(["connect", "cut", "lose", "new"]), st.integers(0, 5), st.none()),
        st.tuples(st.sampled_from(["take", "break"]), st.integers(0, 5), st.integers(0, 6)),
        st.tuples(st.sampled_from(["send", "beat", "restart"]), st.integers(0, 5), st.none()),
    ),
    min_size=5,
    max_size=50,
)


def location_of(tenant: str) -> Place:
    return 1 + TENANTS.index(tenant), 0


@settings(max_examples=400)
@given(
    STEPS,
    st.sampled_from(["vllm", "sglang", "lora"]),
    st.integers(1, 2),
    st.sampled_from([1, 3, 10_000]),
    st.booleans(),
    st.booleans(),
)
def test_a_tenant_gets_exactly_its_own_blocks(
    steps: Any, dialect: str, sources: int, journal: int, merged: bool, filled: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut_states(patch, SLICE, SLICE)
        stage = Views(dialect, sources, journal, merged=merged, filled=filled)
        routers: list[Any] = [
            kind(location_of(tenant)) for tenant in TENANTS for kind in (ApplyingTenant, CheckingTenant, TenantFromZero)
        ]
        stage.play(routers, steps)
        stage.connect_all(routers)
        stage.say(0, [("store", "GPU", [(tenant, 0)]) for tenant in TENANTS])
        stage.read_all(routers)
        for router in routers:
            router.holds(stage.truth(TENANTS[router.place[0] - 1]))


def of_tenant(wanted: list[Any], tenant: str) -> list[Any]:
    """Return the changes of a batch that concern one tenant, without those of other tenants."""
    found: list[Any] = []
    for what, medium, detail in wanted:
        own = None if detail is None else [node for node in detail if node[0] == tenant]
        if own is None or own:
            found.append((what, medium, own))
    return found


@settings(max_examples=200)
@given(
    st.lists(st.lists(EVENTS.filter(lambda event: event[1] != "CPU"), max_size=6), min_size=1, max_size=12),
    st.sampled_from(["vllm", "sglang", "lora"]),
)
def test_the_batches_of_a_tenant_do_not_depend_on_other_tenants(history: list[Any], dialect: str) -> None:
    """A tenant gets the same seqs, and the same blocks after each seq, as if the other tenant did not exist."""
    together, alone = (Views(dialect, 1, 100, merged=False, filled=True) for _ in range(2))
    for wanted in history:
        together.say(0, wanted)
        alone.say(0, of_tenant(wanted, "a"))
    assert course(together) == course(alone)


def course(stage: Views) -> list[Any]:
    """Return the seqs of the stream of tenant a, each with the blocks that tenant a's router holds after it."""
    router, found = ApplyingTenant(location_of("a")), []
    for seq, payload in stage.sent.get((1, 0), []):
        router.apply(payload)
        found.append((seq, frozenset(router.views.blocks)))
    return found


def test_the_model_distinguishes_tenants() -> None:
    stage = Views("vllm", 1, 100, merged=False, filled=True)
    stage.say(0, [("store", "GPU", [("a", 0), ("a", 1)]), ("store", "GPU", [("b", 0)]), ("store", "GPU", [("b", 1)])])
    assert {tenant: len(stage.truth(tenant)) for tenant in TENANTS} == {"a": 2, "b": 2}
    counts = Counter(event["type"] for _, payload in stage.sent[1, 0] for event in unpack(payload)[1])
    assert counts == {"BlockStored": 1}
