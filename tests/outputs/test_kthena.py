"""Tests with recorded engine streams for which blocks kthena's sidecar stores if it reads an output with ``profile:
kthena``.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvbus.core.wire.profiles import fold
from tests.doubles.kthena import TOPIC, KthenaSidecar
from tests.golden.bus import GoldenBus
from tests.golden.cases import answer, frames
from tests.wire.captures import BY_PREFIX, CAPTURES, load, truth

OUTPUT: dict[str, Any] = {
    "profile": "kthena",
    "endpoint": "tcp://127.0.0.1:20000",
    "replay_endpoint": None,
    "layout": "merged",
    "heartbeat": 0,
}


def played(name: str) -> GoldenBus:
    """Return a bus that has relayed a complete capture to an output with `profile: kthena`."""
    source = {"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5658"}
    bus = GoldenBus({"http": None, "state_dir": None, "sources": [source], "outputs": [OUTPUT]})
    messages = load(name)
    bus.up(0)
    answer(bus, {0: []})
    for at, message in enumerate(messages):
        bus.live(0, frames(message))
        answer(bus, {0: messages[: at + 1]})
    bus.wait(2.0)
    return bus


SEVERAL_MEDIA = ("offload", "tiers", "hicache", "lmcache", "mooncake")
"""Words in the names of captures whose engines keep blocks on more than one medium."""


@pytest.mark.parametrize("name", CAPTURES)
def test_kthena_decodes_every_batch_and_holds_the_engines_blocks(name: str) -> None:
    bus = played(name)
    early, late = KthenaSidecar(), KthenaSidecar()
    for each in bus.published:
        early.take(each.topic, each.payload)
    for _, payload in bus.subscribe((0, 0)):
        late.take(TOPIC, payload)
    if any(part in name for part in SEVERAL_MEDIA):
        # kthena's sidecar deletes a block at its first removal, on whatever medium.
        assert early.blocks.items() <= late.blocks.items()
        return
    # kthena finds blocks by their tokens, so it forgets a block if another block with the same tokens is removed.
    assert {**early.blocks, **{block: of for block, of in late.blocks.items() if of in early.twins}} == late.blocks
    if name not in BY_PREFIX:
        assert set(late.blocks) == {fold(block) for _, _, block in truth(name) if not isinstance(block, str)}
