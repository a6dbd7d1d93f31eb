"""Tests for kvbus's function that ends asyncio tasks.

In these tests, tasks clean up, fail, or lose their cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time

import pytest

from kvbus.common import tasks
from kvbus.common.tasks import close_within, end_tasks
from tests.doubles.bus import eventually


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(tasks, "AGAIN", 0.05)


async def test_end_tasks_ends_waiting_failing_and_finished_tasks():
    async def fails_at_the_end():
        try:
            await asyncio.sleep(3600)
        finally:
            raise ValueError("at the end")

    each = [asyncio.create_task(asyncio.sleep(3600)), asyncio.create_task(fails_at_the_end()), None]
    ended = asyncio.create_task(asyncio.sleep(0))
    await ended
    await asyncio.sleep(0)
    await end_tasks([*each, ended])
    assert all(task is None or task.done() for task in each)
    await end_tasks([])


async def test_end_tasks_waits_for_the_cleanup_of_a_task(monkeypatch):
    monkeypatch.setattr(tasks, "AGAIN", 60.0)
    cleaned = []

    async def cleans_up():
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.1)
            cleaned.append(True)

    task = asyncio.create_task(cleans_up())
    await asyncio.sleep(0)
    await end_tasks([task])
    assert cleaned == [True]


async def test_end_tasks_cancels_a_task_again_if_it_ignores_a_cancellation():
    """kvbus cancels a task again if it does not end.

    `asyncio.wait_for` of Python 3.11 loses a cancellation if the awaited result arrives in the same loop iteration.
    """
    lost = 0

    async def asks_for_ever():
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                lost += 1
                if lost == 3:
                    raise

    task = asyncio.create_task(asks_for_ever())
    await asyncio.sleep(0)
    begin = time.monotonic()
    await asyncio.wait_for(end_tasks([task]), 60)
    assert lost == 3
    assert task.cancelled()
    assert time.monotonic() - begin >= 0.1


async def test_a_task_cancelled_twice_ends_its_own_tasks_first(monkeypatch):
    """Two nested tasks call `end_tasks` with the same patience.

    The outer call cancels its task again while that task still waits for the tasks that it started itself.
    """
    monkeypatch.setattr(tasks, "AGAIN", 0.5)
    done = []

    async def inner():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.05)
            done.append("inner")

    async def outer():
        looking = asyncio.create_task(inner())
        try:
            await asyncio.sleep(3600)
        finally:
            try:
                await end_tasks([looking])
            finally:
                done.append("outer")

    task = asyncio.create_task(outer())
    await asyncio.sleep(0.01)
    await asyncio.wait_for(end_tasks([task]), 60)
    assert done == ["inner", "outer"]
    assert task.cancelled()


async def test_a_cancelled_end_tasks_reports_no_unhandled_exception():
    said = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))

    async def fails():
        try:
            await asyncio.sleep(3600)
        finally:
            raise ValueError("at the end")

    async def stays():
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.2)

    each = [asyncio.create_task(fails()), asyncio.create_task(stays())]
    await asyncio.sleep(0)
    ending = asyncio.create_task(end_tasks(each))
    await asyncio.sleep(0.01)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert all(task.done() for task in each)
    each.clear()
    gc.collect()
    assert said == []


async def test_a_task_ends_if_its_result_arrives_with_its_cancellation():
    """A cancelled task ends, even if the result that it waits for arrives in the same iteration of the event loop.

    dnspython and nats-py wait with `asyncio.wait_for`. The test uses `asyncio.wait_for` of the running Python version.
    """
    answer = asyncio.get_running_loop().create_future()

    async def asks_again_and_again():
        await asyncio.wait_for(answer, 60)
        await asyncio.sleep(3600)

    task = asyncio.create_task(asks_again_and_again())
    await asyncio.sleep(0)
    answer.set_result(None)
    await asyncio.wait_for(end_tasks([task]), 60)
    assert task.cancelled()


async def test_close_within_completes_the_close_after_its_caller_is_cancelled():
    goes_on, closed = asyncio.Event(), []

    async def closes():
        await goes_on.wait()
        closed.append(True)

    waits = asyncio.create_task(close_within(closes(), 60.0))
    await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    goes_on.set()
    await eventually(lambda: closed, "the end of it")


async def test_close_within_ignores_failures_and_completes_the_close_after_its_timeout():
    async def fails():
        raise ValueError("at the end")

    goes_on, closed = asyncio.Event(), []

    async def closes():
        await goes_on.wait()
        closed.append(True)

    await asyncio.wait_for(close_within(fails(), 60.0), 30)
    await asyncio.wait_for(close_within(closes(), 0.01), 30)
    assert not closed
    goes_on.set()
    await eventually(lambda: closed, "the end of it")
