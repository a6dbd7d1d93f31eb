"""Tests for a pod of kvbus and an engine that podman runs from the image: routers rebuild the engine's exact blocks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.doubles.bus import eventually
from tests.image.conftest import IMAGE, Podman
from tests.wire.captures import DATA, load, truth

pytestmark = [pytest.mark.slow]

ANY_HOST: Final = "tcp://127.0.0.1:"

Key = tuple[int | None, str, int | str]


HARDENED: Final = {
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
SOURCE: Final = ("--endpoint=tcp://127.0.0.1:15557", "--replay-endpoint=tcp://127.0.0.1:15657")


def pod_of(name: str, *engine: str) -> dict[str, Any]:
    """Return a pod with kvbus, and with a second container as its engine.

    ``engine`` is the engine's kvbus command line.
    """
    settings = ["sources[0].bind=true", "http=127.0.0.1:9477", "state_dir=/var/lib/kvbus"]
    listen = ["--source", "tcp://127.0.0.1:15557,tcp://127.0.0.1:15657", "--output", "tcp://*:5657,tcp://*:5658"]
    run = ["run", *listen, *(f"--set={setting}" for setting in settings)]
    both = {"image": IMAGE, "imagePullPolicy": "Never", "securityContext": HARDENED}
    state = {"name": f"{name}-state", "mountPath": "/var/lib/kvbus"}
    captures = {"name": "captures", "mountPath": "/captures", "readOnly": True}
    containers = [
        {"name": "kvbus", "args": run, "volumeMounts": [state], **both},
        {"name": "engine", "args": list(engine), "volumeMounts": [captures], **both},
    ]
    # podman keeps an emptyDir as a volume of its name, even after the pod is removed, so each pod has another name.
    volumes = [{"name": f"{name}-state", "emptyDir": {}}, {"name": "captures", "hostPath": {"path": str(DATA)}}]
    spec = {"containers": containers, "volumes": volumes, "terminationGracePeriodSeconds": 60}
    spec["securityContext"] = {"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


class Pod:
    """A pod with its own network. It is not reachable from outside, so the tests run their commands inside."""

    def __init__(self, podman: Podman, directory: Path, pod: dict[str, Any]) -> None:
        self._podman = podman
        self.name = pod["metadata"]["name"]
        self.file = directory / "pod.yaml"
        self.file.write_text(json.dumps(pod))

    def start(self) -> None:
        self._podman("play", "kube", "--network", "none", str(self.file))

    def end(self) -> None:
        """Stop the pod. podman keeps the exit codes of both containers until they are removed."""
        self._podman("pod", "stop", "--time", "20", self.name)

    def exit_code(self, container: str) -> int:
        format_ = "{{.State.ExitCode}}"
        return int(self._podman("inspect", "--format", format_, f"{self.name}-{container}").stdout)

    def said(self, container: str) -> str:
        done = self._podman("logs", f"{self.name}-{container}")
        return done.stdout + done.stderr

    def kvbus(self, *args: str) -> str:
        """Run a `kvbus` command in the pod, and return its output."""
        return self._podman("exec", f"{self.name}-kvbus", "kvbus", *args).stdout

    def source(self) -> dict[str, Any]:
        code = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9477/sources').read().decode())"
        done = self._podman("exec", f"{self.name}-kvbus", "python", "-c", code, check=False)
        return dict(json.loads(done.stdout)[0]) if done.returncode == 0 else {}

    def blocks(self, endpoint: str, *options: str) -> set[Key]:
        """Return the blocks that a newly started router rebuilds with a replay request from seq 0."""
        lines = [
            json.loads(line)
            for line in self.kvbus("dump", "--replay-endpoint", endpoint, "--json", *options).splitlines()
        ]
        return {(line["group_idx"], line["medium"], line["hash"]) for line in lines}

    def until(self, condition: Callable[[], object], what: str) -> None:
        with asyncio.Runner() as runner:
            runner.run(eventually(condition, f"{what}: {self.said('kvbus')}"))


@pytest.fixture
def pod(podman: Podman, name: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pod]:
    made = Pod(podman, tmp_path, request.param(name))
    made.start()
    yield made
    podman("pod", "rm", "--force", "--time", "0", name)
    podman("volume", "rm", "--force", f"{name}-state")


def with_simulated_engine(name: str) -> dict[str, Any]:
    """Return the pod with a simulated engine, which stops publishing after a number of simulated requests."""
    return pod_of(name, "sim", *SOURCE, "--requests=60", "--rate=200", "--subscribers=1")


CAPTURE: Final = "vllm033_map_int"


def with_capture(name: str) -> dict[str, Any]:
    """Return the pod with an engine that plays the capture of a real engine."""
    return pod_of(name, "play", f"/captures/{CAPTURE}.jsonl", *SOURCE, "--subscribers=1", "--rate=2000")


@pytest.mark.parametrize("pod", [with_capture], indirect=True)
def test_a_router_is_exact_after_a_capture_through_the_pod(pod: Pod) -> None:
    last = load(CAPTURE)[-1].seq
    pod.until(lambda: (s := pod.source()) and s["last_seq"] == last and s["state"] == "live", "every batch relayed")
    assert pod.blocks(f"{ANY_HOST}5658") == truth(CAPTURE)
    assert pod.source()["counts"]["rejected"] == {}
    pod.end()
    assert pod.exit_code("kvbus") == 0


@pytest.mark.parametrize("pod", [with_simulated_engine], indirect=True)
def test_a_router_of_the_pod_has_the_blocks_of_the_simulated_engine(pod: Pod) -> None:
    engine = pod.source()
    pod.until(lambda: engine.update(pod.source()) or engine.get("counts", {}).get("batches", 0) > 20, "batches")
    previous: list[set[Key]] = []

    def idle() -> bool:
        now = pod.blocks(engine["replay_endpoint"], "--copies")
        previous.append(now)
        return len(previous) > 1 and previous[-2] == now

    pod.until(idle, "an engine that is idle")
    assert previous[-1]
    pod.until(lambda: pod.blocks(f"{ANY_HOST}5658") == previous[-1], "the same blocks on both sides")
    pod.end()
    assert pod.exit_code("kvbus") == 0
