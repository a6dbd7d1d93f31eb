"""Tests for how ``kvbus top`` reads a bus over its HTTP port."""

from __future__ import annotations

import aiohttp
import pytest

from kvbus.tools.top.moment import moment, read
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.http.test_http import relayed, web_and_engine
from tests.top.moments import router


async def test_top_reads_the_complete_state_of_a_running_bus():
    async with web_and_engine() as (client, engine), aiohttp.ClientSession() as session:
        first = await read(session, client.base)
        engine.publish(batch(store([1, 2])))
        engine.publish(b"no batch")
        await relayed(client, 2)
        seen = await read(session, client.base)
        assert [(s["name"], s["state"], s["blocks"]) for s in seen.sources] == [("engine", "live", {"GPU": 2})]
        (output,) = seen.outputs
        assert output.batches > first.outputs[0].batches
        assert seen.reasons["rejected: batch_shape (engine)"] == 1
        assert (seen.started, seen.version) == (first.started, first.version)
        assert seen.memory > 1e6
        assert -1 <= seen.age < 3600
        assert seen.at >= first.at


def test_top_omits_disconnected_routers():
    there, left = router("10.0.0.1:4711"), router("10.0.0.2:4711", left="left")
    seen = moment([], [there, left], [], 'kvbus_build_info{version="1"} 1.0\n', 1.0, 50.0)
    assert seen.routers == [there]
    assert (seen.outputs, seen.started, seen.age) == ([], 50.0, 0.0)


async def test_a_server_without_kvbus_metrics_is_not_a_bus():
    with pytest.raises(ValueError, match="no kvbus_build_info"):
        moment([], [], [], "", 1.0, 50.0)
