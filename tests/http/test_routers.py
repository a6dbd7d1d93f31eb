"""Tests for what kvbus shows about routers in ``/routers`` and in metrics.

It shows connections, waiting batches, and reasons for disconnections.
"""

import asyncio
import time

import pytest
import zmq

from tests.doubles.bus import eventually
from tests.doubles.payloads import payload, store
from tests.http.test_http import relayed, web, web_and_engine
from tests.transport.loops import read_all


class Subscribers:
    """SUB sockets of one output, which read only when the test calls them."""

    def __init__(self, endpoint):
        self._endpoint = endpoint
        self._context = zmq.Context()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._context.destroy(linger=0)

    def add(self, *topics, slow=False):
        made = self._context.socket(zmq.SUB)
        made.setsockopt(zmq.RCVHWM, 1 if slow else 0)
        if slow:
            made.setsockopt(zmq.RCVBUF, 4096)
        for topic in topics:
            made.setsockopt(zmq.SUBSCRIBE, topic)
        made.connect(self._endpoint)
        return made


async def wait_for_routers(client, condition, what):
    """Wait until the entries of ``/routers`` fulfil a condition, and return them."""
    for _ in range(3000):
        found = await client.json("/routers")
        if condition(found):
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"{what}: {found}")


async def test_routers_shows_a_router_from_its_connection_to_its_end():
    began = time.time()
    async with web_and_engine() as (client, engine):
        await engine.wait_for_subscriber(60)
        engine.publish(payload(store([1, 2])))
        await relayed(client, 1)
        assert await client.json("/routers") == []
        with Subscribers(client.bus.out) as subscribers:
            router = subscribers.add(b"", b"kv@")
            (entry,) = await wait_for_routers(client, lambda e: e and e[0]["state_sent"]["count"], "the state, sent")
            peer, since, at = entry.pop("peer"), entry.pop("since"), entry["state_sent"].pop("at")
            assert peer.startswith("127.0.0.1:")
            assert began <= since <= at <= time.time()
            assert sorted(entry.pop("topics")) == ["", "kv@"]
            assert entry.pop("state") in {"receiving", "live"}
            assert entry.pop("bytes") >= 0
            assert entry == {
                "output": "routers",
                "stream": 0,
                "name": "",
                "subscriptions": 2,
                "state_sent": {"count": 1},
                "queued": 0,
                "behind_seconds": 0.0,
                "dropped": {"batches": 0, "events": 0},
                "left": None,
                "left_at": None,
            }
            await wait_for_routers(client, lambda e: e[0]["state"] == "live", "the router, up to date")
            router.close(0)
            (entry,) = await wait_for_routers(client, lambda e: e[0]["left"], "the end")
            assert entry["peer"] == peer
            assert entry["left"] in {"left", "broken"}
            assert since <= entry["left_at"] <= time.time()
            assert (entry["subscriptions"], entry["state"], entry["state_sent"]["count"]) == (2, "live", 1)


async def test_routers_truncates_long_topics_and_long_lists_of_topics():
    async with web() as client:
        with Subscribers(client.bus.out) as subscribers:
            router = subscribers.add(b"\xff" + b"x" * 1000, *(b"topic %d" % i for i in range(100)))
            (entry,) = await wait_for_routers(
                client, lambda e: e and e[0]["subscriptions"] == 101, "every subscription"
            )
            assert len(entry["topics"]) == 8
            assert max(map(len, entry["topics"])) <= 4 * 64 + 1
            assert entry["state"] == "idle"
            router.close(0)


async def test_metrics_show_the_number_of_routers_and_their_lag():
    def gauge(samples, name):
        return samples[f"kvbus_output_{name}", ("output", "routers")]

    def ended(samples):
        return {
            dict(key[1:])["reason"]: value
            for key, value in samples.items()
            if key[0] == "kvbus_output_router_disconnects_total" and value
        }

    def sent(samples, reason):
        return samples["kvbus_output_states_sent_total", ("output", "routers"), ("reason", reason)]

    async with web_and_engine(output={"send_hwm": 10}) as (client, engine):
        await engine.wait_for_subscriber(60)
        samples = await client.metrics()
        assert gauge(samples, "routers") == gauge(samples, "router_queue_max") == 0
        assert gauge(samples, "router_behind_seconds") == 0.0
        with Subscribers(client.bus.out) as subscribers:
            healthy, slow = subscribers.add(b""), subscribers.add(b"", slow=True)
            await wait_for_routers(client, lambda e: [r["state"] for r in e] == ["live", "live"], "both, up to date")
            samples = await client.metrics()
            assert (gauge(samples, "routers"), sent(samples, "subscribed"), sent(samples, "lost")) == (2, 2, 0)

            stream, newest = client.bus.daemon.relay.outputs[0].streams[0], -1

            def level():
                nonlocal newest
                for _, seq, _ in read_all(healthy):
                    newest = int.from_bytes(seq, "big")
                return newest == stream.next_seq - 1

            number = worst = 0
            while not samples["kvbus_output_dropped_batches_total", ("output", "routers"), ("reason", "slow_router")]:
                for _ in range(5):
                    number += 1
                    engine.publish(payload(store(list(range(1000 * number, 1000 * number + 1000)))))
                await relayed(client, number)
                await eventually(level, "the healthy one level")
                samples = await client.metrics()
                worst = max(worst, gauge(samples, "router_queue_max"))
            assert 0 < worst <= 10
            assert gauge(samples, "router_behind_seconds") > 0
            entries = await client.json("/routers")
            assert sorted(entry["state"] for entry in entries) == ["live", "stalled"]
            (stalled,) = [entry for entry in entries if entry["state"] == "stalled"]
            dropped = stalled["dropped"]["batches"]
            assert dropped >= 10
            assert stalled["behind_seconds"] > 0

            def caught_up(entries):
                list(read_all(slow))
                return all(entry["state"] == "live" for entry in entries)

            entries = await wait_for_routers(client, caught_up, "the slow one, up to date again")
            assert all(entry["behind_seconds"] == 0 for entry in entries)
            samples = await client.metrics()
            assert (sent(samples, "subscribed"), sent(samples, "lost")) == (2, 1)
            assert gauge(samples, "router_behind_seconds") == 0.0
            assert ended(samples) == {}
        await wait_for_routers(client, lambda e: all(entry["left"] for entry in e), "the end of both")
        samples = await client.metrics()
        assert gauge(samples, "routers") == 0
        assert sum(ended(samples).values()) == 2


@pytest.mark.parametrize("output", [{}, {"layout": "per_topic", "topic": "kv@{source}@m", "replay_endpoint": None}])
async def test_the_timeline_shows_a_routers_connection_once_if_other_routers_follow(output):
    async with web_and_engine(output=output) as (client, engine):
        await engine.wait_for_subscriber(60)
        with Subscribers(client.bus.out) as subscribers:

            async def came():
                told = (await client.json("/overview"))["transitions"]
                return [each["text"] for each in told if (each["kind"], each["after"]) == ("router", "connected")]

            routers = []
            for count in range(1, 4):
                routers.append(subscribers.add(b""))
                seen = await wait_for_routers(client, lambda e, count=count: len(e) == count, "as many routers")
                while len(await came()) < count:  # noqa: ASYNC110 - it is looked at once a second
                    await asyncio.sleep(0.05)
            assert sorted(await came()) == sorted(f"router {each['peer']} connected" for each in seen)
