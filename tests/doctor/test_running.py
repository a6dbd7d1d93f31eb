"""A bus that runs with a mistake says so by itself: the first finding in its log names the cause and the key."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from kvbus.common.errors import BindError
from kvbus.config import ConfigError, load
from kvbus.daemon import unreachable
from kvbus.daemon.daemon import Daemon
from kvbus.daemon.files import look
from tests.doctor import mistakes
from tests.doctor.mistakes import HOST, Scene, made
from tests.doubles.bus import eventually
from tests.doubles.payloads import payload, store
from tests.ports import free_port


async def index_full(scene: Scene) -> None:
    scene.over["limits"] = {"max_blocks": 3}
    await scene.engine(what=lambda n: [store([n + 1])])


async def trimmed(scene: Scene) -> None:
    engine = await scene.engine(buffer_steps=2, silent=True)
    for n in range(9):
        engine.publish(payload(store([n + 1])))


async def no_prefix(scene: Scene) -> None:
    await scene.engine(what=lambda n: [store([n + 1], group=1, kv_cache_spec_kind="sliding_window")])


async def two_topics(scene: Scene) -> None:
    engine = await scene.engine(silent=True, topic=b"one")

    async def publish() -> None:
        for n in range(10**9):
            for topic in (b"one", b"two"):
                engine.send_frames(topic, n.to_bytes(8, "big"), payload(store([n + 1])))
            await asyncio.sleep(0.02)

    scene.stack.callback(asyncio.ensure_future(publish()).cancel)


RUNNING = [
    (mistakes.nobody, "nothing_listens", "sources[0].endpoint"),
    (mistakes.name, "host_unknown", "sources[0].endpoint"),
    (mistakes.swapped, "swapped_ports", "sources[0].endpoint"),
    (mistakes.both_dial, "both_dial", "sources[0].bind"),
    (mistakes.nobody_dials, "no_engine_dialled_in", "sources[0].bind"),
    (mistakes.http, "not_zeromq", "sources[0].endpoint"),
    (mistakes.tls, "not_zeromq", "sources[0].endpoint"),
    (mistakes.ssh, "not_zeromq", "sources[0].endpoint"),
    (mistakes.silent, "silent_port", "sources[0].endpoint"),
    (mistakes.a_router, "endpoint_is_subscriber", "sources[0].endpoint"),
    (mistakes.a_service, "endpoint_is_other", "sources[0].endpoint"),
    (mistakes.curve_there, "curve_one_side", "sources[0].curve_secret_key_file"),
    (mistakes.curve_here, "curve_one_side", "sources[0].curve_secret_key_file"),
    (mistakes.curve_other, "curve_keys_differ", "sources[0].curve_server_key_file"),
    (mistakes.no_replay, "replay_silent", "sources[0].replay_endpoint"),
    (mistakes.mute_replay, "replay_silent", "sources[0].replay_endpoint"),
    (mistakes.ranks_missing, "ranks_missing", "sources[0].data_parallel_size"),
    (mistakes.topic, "topic", "sources[0].topic"),
    (mistakes.size, "block_size", "block_size"),
    (mistakes.unnumbered, "not_events", "sources[0].endpoint"),
    (mistakes.no_events, "not_events", "sources[0].endpoint"),
    (mistakes.too_large, "frame_too_large", "limits.max_frame_bytes"),
    (mistakes.two_dial, "conflict", "sources[0].endpoint"),
    (mistakes.clock, "clock_off", "sources[0].endpoint"),
    (mistakes.other_topic, "router_topic", "outputs[0].topic"),
    (index_full, "index_full", "limits.max_blocks"),
    (trimmed, "history_trimmed", "sources[0].replay_endpoint"),
    (no_prefix, "no_prefix", "groups"),
    (two_topics, "other_topic", "sources[0].topic"),
]


@pytest.mark.parametrize(("make", "found", "key"), RUNNING, ids=[make.__name__ for make, _, _ in RUNNING])
async def test_the_first_finding_of_a_running_bus_names_the_cause_and_the_key(
    make: Any, found: str, key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(unreachable, "AFTER", 0.5)

    def findings() -> list[tuple[str, str]]:
        said = [record for record in caplog.records if re.search(r" \[[^ ]+\]: ", record.getMessage())]
        return [(vars(each)["reason"], each.getMessage()) for each in said if "reason" in vars(each)]

    async with made(make, tmp_path) as scene:
        daemon = Daemon(load(None, env={}, overrides={**scene.config(), "probe_interval": 0.2, "replay_timeout": 1.0}))
        await daemon.start()
        try:
            await eventually(findings, "a finding", 60)
        finally:
            await daemon.close(drain=0)
    id_, line = findings()[0]
    assert (id_, f"[{key}]: " in line) == (found, True), line


@pytest.mark.parametrize(
    ("make", "key"), [(mistakes.both_bind, "sources[0].bind"), (mistakes.port_taken, "outputs[0].endpoint")]
)
async def test_a_port_that_is_taken_is_named_with_its_key(make: Any, key: str, tmp_path: Path) -> None:
    async with made(make, tmp_path) as scene:
        daemon = Daemon(load(None, env={}, overrides=scene.config()))
        with pytest.raises(BindError, match=rf"cannot listen on tcp://.*Address already in use \[{re.escape(key)}\]: "):
            await daemon.start()


@pytest.mark.parametrize(
    ("over", "key"),
    [
        ({"http": "PORT"}, "http"),
        ({"front": {"listen": "PORT", "engine": "http://127.0.0.1:1"}}, "front.listen"),
        ({"front_grpc": {"listen": "PORT", "engine": "127.0.0.1:1"}}, "front_grpc.listen"),
        ({"interpose": {"endpoint": "tcp://PORT"}}, "interpose.endpoint"),
    ],
    ids=["http", "front", "front_grpc", "interpose"],
)
async def test_an_address_that_is_taken_is_named_with_the_reason_and_its_key(over: dict[str, Any], key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        config = json.loads(
            json.dumps({"http": f"127.0.0.1:{free_port()}", "state_dir": None} | over).replace("PORT", place)
        )
        if key != "interpose.endpoint":
            config["sources"] = [{"endpoint": f"{HOST}:{free_port()}"}]
            config["outputs"] = [{"endpoint": f"{HOST}:{free_port()}"}]
        daemon = Daemon(load(None, env={}, overrides=config))
        with pytest.raises(BindError, match=rf"cannot listen on .*{place}: Address already in use \[{key}\]: "):
            await daemon.start()


REFUSED = [
    ("a misspelt key", {"sorces": []}, "sorces"),
    ("an unknown key of a source", {"sources.0.topics": "kv@"}, "sources[0].topics"),
    ("IPv6 without brackets", {"sources.0.endpoint": "tcp://::1:5557"}, "sources[0].endpoint"),
    ("kafka:// as an endpoint", {"outputs.0.endpoint": "kafka://host:9092"}, "outputs[0].endpoint"),
    ("a profile that is none", {"outputs.0.profile": "nobody"}, "outputs[0].profile"),
    ("the same port twice", {"outputs.0.replay_endpoint": "tcp://*:5657"}, "outputs[0]"),
    ("a topic of 5,000 characters", {"sources.0.topic": "x" * 5000}, "sources[0].topic"),
    ("a state_dir that is a file", {"state_dir": "FILE"}, "state_dir"),
    ("a state_dir that cannot be made", {"state_dir": "/proc/kvbus"}, "state_dir"),
]


@pytest.mark.parametrize(("what", "change", "key"), REFUSED, ids=[what for what, _, _ in REFUSED])
def test_a_configuration_that_cannot_work_is_refused_with_the_key(
    what: str, change: dict[str, Any], key: str, tmp_path: Path
) -> None:
    del what
    path = tmp_path / "file"
    path.write_text("")
    config: dict[str, Any] = {
        "sources": [{"name": "engine", "endpoint": f"{HOST}:{free_port()}"}],
        "outputs": [{"name": "routers", "endpoint": "tcp://*:5657"}],
        "state_dir": None,
    }
    for name, value in change.items():
        *way, last = name.split(".")
        node: Any = config
        for piece in way:
            node = node[int(piece) if piece.isdigit() else piece]
        node[last] = str(path) if value == "FILE" else value
    with pytest.raises(ConfigError) as refused:
        load(None, env={}, overrides=config, look=lambda read: look(read)[1])
    (problem,) = refused.value.problems
    assert problem.key.startswith(key)
    assert len(str(refused.value)) < 1000
