"""Test the kustomize component for llm-d.

Its sidecar runs with the environment variables of a pod, and a subscriber with llm-d's topic filter receives its
batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
from ruamel.yaml import YAML

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.ports import free_ports

KUBERNETES: Final = Path(__file__).parents[2] / "deploy" / "kubernetes"
PORTS: Final = {"engine": "15557", "engine_replay": "15657", "events": "5657", "replay": "5658", "http": "9477"}
POD_IP: Final = "10.1.2.3"
BATCHES: Final = 60
END: Final = b"\xff" * 8


def read(path: str) -> Any:
    return YAML(typ="safe", pure=True).load((KUBERNETES / path).read_text())


def pod_annotations() -> dict[str, str]:
    """Return the annotations of the pods in the example engine's manifest."""
    return dict(read("example/engine.yaml")["spec"]["template"]["metadata"]["annotations"])


def sidecar_environment(said: dict[str, str], ports: dict[str, int], directory: Path) -> dict[str, str]:
    """Return the sidecar's environment variables as the kubelet would set them from the pod's annotations.

    Ports and directories are replaced by ``ports`` and ``directory``, which exist on this machine.
    """
    (sidecar,) = read("component/llm-d/sidecar.yaml")["template"]["spec"]["initContainers"]
    assert sidecar["args"] == ["run"]
    fields = {"status.podIP": POD_IP} | {f"metadata.annotations['{key}']": value for key, value in said.items()}
    known: dict[str, str] = {}
    for variable in sidecar["env"]:
        value = variable.get("value")
        if value is None:
            value = fields.get(variable["valueFrom"]["fieldRef"]["fieldPath"], "")
        for name, text in known.items():
            value = value.replace(f"$({name})", text)
        known[variable["name"]] = value
    there = {PORTS[name]: str(number) for name, number in ports.items()}
    moved = {
        name: re.sub(r"(?<=:)\d+\b", lambda port: there.get(port[0], port[0]), text) for name, text in known.items()
    }
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")}
    return {**clean, **moved, "KVBUS_STATE_DIR": str(directory / "state"), "XDG_RUNTIME_DIR": str(directory)}


@contextlib.contextmanager
def sidecar(env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "kvbus", "run"], env=env, stderr=file)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(60)


@contextlib.contextmanager
def connected(kind: int, port: int, *options: tuple[int, bytes]) -> Iterator[Callable[[], list[list[bytes]]]]:
    """Connect a router's socket, and yield a function that returns all messages that it has received so far."""
    context = zmq.Context()
    socket = context.socket(kind)
    for option, value in options:
        socket.setsockopt(option, value)
    socket.connect(f"tcp://127.0.0.1:{port}")
    if kind == zmq.DEALER:
        socket.send_multipart([b"", bytes(8)])
    got: list[list[bytes]] = []

    def received() -> list[list[bytes]]:
        while socket.poll(0):
            got.append(socket.recv_multipart())
        return got

    try:
        yield received
    finally:
        socket.close(0)
        context.term()


def hashes(messages: list[list[bytes]]) -> list[int]:
    """Return the block hashes of the messages, in order. A heartbeat has no block."""
    return [
        block
        for frames in messages
        if frames[-2] != END
        for event in msgspec.msgpack.decode(frames[-1])[1]
        for block in event.get("block_hashes", ())
    ]


def test_the_component_reaches_a_router_that_subscribes_as_llm_d_does(tmp_path: Path) -> None:
    async def main() -> None:
        ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        topic = f"kv@{POD_IP}:8000@Qwen/Qwen3-32B".encode()
        log = tmp_path / "kvbus.log"
        engine = EnginePublisher(
            f"tcp://127.0.0.1:{ports['engine']}", f"tcp://127.0.0.1:{ports['engine_replay']}", bind=False
        )
        with (
            sidecar(sidecar_environment(pod_annotations(), ports, tmp_path), log),
            connected(zmq.SUB, ports["events"], (zmq.SUBSCRIBE, b"kv@")) as heard,
        ):
            await eventually(heard, f"a heartbeat: {log.read_text()}")
            async with engine:
                for block in range(BATCHES):
                    engine.publish(batch(store([block])))
                await eventually(lambda: len(hashes(heard())) >= BATCHES, "the whole stream")
                with connected(zmq.DEALER, ports["replay"]) as replayed:
                    await eventually(lambda: replayed() and replayed()[-1][-2] == END, "the whole replay")
                    answer = replayed()[:-1]
            live = heard()
        assert hashes(live) == hashes(answer) == list(range(BATCHES))
        assert {frames[0] for frames in live} == {frames[1] for frames in answer} == {topic}
        seqs = [int.from_bytes(frames[1], "big") for frames in live]
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))

    asyncio.run(main())


def test_the_sidecar_ends_with_an_error_without_the_annotation_of_the_model(tmp_path: Path) -> None:
    """Without the annotation with the model's name, the sidecar ends with an error.

    llm-d would index the pod's blocks under an empty name, and would not find them by the real one.
    """
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    log = tmp_path / "kvbus.log"
    with sidecar(sidecar_environment({}, ports, tmp_path), log) as process:
        assert process.wait(60) == 78
    assert "model = '': outputs[0].topic uses {model}" in log.read_text()
