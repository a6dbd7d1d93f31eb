"""Tests for discovered workers on one output endpoint, where each worker has its own topic.

Workers join and leave, and keep their ranks.
"""

from __future__ import annotations

from collections import Counter

from tests.discovery.fleet import DiscoveringBus, Worker, write
from tests.discovery.test_daemon import file_discovery
from tests.doubles.bus import eventually
from tests.doubles.socket_routers import TopicRouter
from tests.ports import free_port


def bus_of(file, endpoint, **settings):
    output = {"endpoint": endpoint, "layout": "per_topic", "topic": "kv@{source}@m", "heartbeat": 0.2}
    bus = DiscoveringBus(file_discovery(file), outputs=[output], **settings)
    bus.router.close()  # this router would read a merged stream
    return bus


async def test_discovered_workers_have_their_own_topics_on_one_endpoint(tmp_path):
    file = tmp_path / "engines.json"
    workers = [Worker(f"pod-{n}", n) for n in range(10)]
    for worker in workers:
        await worker.start()
    write(file, [worker.entry for worker in workers[:3]])
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    bus = bus_of(file, endpoint)
    await bus.daemon.start()
    router = TopicRouter(endpoint)
    seqs: Counter[bytes] = Counter()
    try:
        for step in (workers[:3], workers[::-1], workers[1:3], workers[:5]):
            write(file, [worker.entry for worker in step])
            await bus.sources(*(worker.name for worker in step))
            for worker in step:
                await worker.rest()
            truth = {f"kv@{worker.name}@m".encode(): worker.stored for worker in step}
            await eventually(lambda truth=truth: router.held == truth, "the router exact")
            assert router.violations == []
            assert all(router.next[topic] >= seq for topic, seq in seqs.items())
            seqs.update({topic: router.next[topic] - seqs[topic] for topic in router.next})
            for worker in step:
                worker.go_on()
        assert all(bus.source(worker.name).stats.restarts == 0 for worker in workers[1:3])
    finally:
        router.close()
        await bus.daemon.close(drain=0)
        for worker in workers:
            await worker.stop()


async def test_ranks_that_would_share_a_topic_do_not_become_sources(tmp_path):
    file = tmp_path / "engines.json"
    one = Worker("pod-1", 1)
    await one.start()
    write(file, [{**one.entry, "name": "ranked", "endpoint": "tcp://10.0.0.1:1", "data_parallel_size": 2}, one.entry])
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    bus = bus_of(file, endpoint)
    await bus.daemon.start()
    try:
        await bus.sources("pod-1")
        assert +Counter(bus.stats.left_out) == {"same_topic": 1}
    finally:
        await bus.daemon.close(drain=0)
        await one.stop()
