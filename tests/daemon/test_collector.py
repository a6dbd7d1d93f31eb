"""The garbage collector looks at new objects once a burst is on its way, and at what that leaves every few times."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from kvbus.daemon.collector import AGAIN, NEWEST, collect_behind, rest_collector


class Passes:
    """The passes that begin, each by its generation, and what is sent."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def began(self, phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            self.seen.append(f"pass over {about['generation']}")

    def flush(self) -> None:
        self.seen.append("sent")


@pytest.fixture
def passes() -> Iterator[Passes]:
    """All passes of the test, with an automatic one out of reach; each collector's threshold as it was afterwards."""
    before = gc.get_threshold(), gc.isenabled()
    gc.enable()
    gc.collect()
    gc.set_threshold(1_000_000, 20, 100)
    watching = Passes()
    gc.callbacks.append(watching.began)
    yield watching
    gc.callbacks.remove(watching.began)
    gc.set_threshold(*before[0])
    if not before[1]:
        gc.disable()


def test_what_is_there_at_the_start_is_never_looked_at_again(passes: Passes):
    try:
        rest_collector()
        assert passes.seen == ["pass over 2"]
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() == (1000, 20, 500)
    finally:
        gc.unfreeze()


async def test_a_pass_comes_behind_what_is_sent(passes: Passes):
    drained = collect_behind(passes.flush)
    kept = [[n] for n in range(2 * NEWEST)]
    drained()
    drained()  # another source's
    assert passes.seen == ["sent", "sent"]
    await asyncio.sleep(0)
    assert passes.seen == ["sent", "sent", "pass over 0"]
    assert len(kept) == 2 * NEWEST


async def test_a_few_new_objects_wait(passes: Passes):
    gc.collect()
    passes.seen.clear()
    collect_behind(passes.flush)()
    await asyncio.sleep(0)
    assert passes.seen == ["sent"]


async def test_what_passes_have_left_is_looked_at_every_few_times(passes: Passes):
    drained = collect_behind(passes.flush)
    kept = []
    for _ in range(2 * AGAIN + 2):
        kept.append([[n] for n in range(2 * NEWEST)])
        drained()
        await asyncio.sleep(0)
    assert [each for each in passes.seen if each != "sent"] == 2 * [*AGAIN * ["pass over 0"], "pass over 1"]


async def test_no_pass_comes_while_somebody_waits(passes: Passes):
    waiting = [True]
    drained = collect_behind(passes.flush, lambda: bool(waiting))
    kept = [[n] for n in range(2 * NEWEST)]
    drained()
    await asyncio.sleep(0)
    assert passes.seen == ["sent"]
    waiting.clear()
    drained()
    await asyncio.sleep(0)
    assert passes.seen == ["sent", "sent", "pass over 0"]
    assert len(kept) == 2 * NEWEST
