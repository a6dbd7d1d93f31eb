"""The chart's pod, run by podman: kvbus and its engine as rendered, and what the engine published comes out exact."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from ruamel.yaml import YAML

from tests.doubles.bus import eventually
from tests.image.conftest import IMAGE, Podman
from tests.wire.captures import DATA, load, truth

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed (.ci/run installs it from .ci/tools.lock)")
pytestmark = [pytest.mark.slow]

HELM: Final = Path(__file__).parents[2] / "helm"
VALUES: Final = HELM / "kvbus" / "ci" / "podman-values.yaml"
ANY_HOST: Final = "tcp://127.0.0.1:"

Key = tuple[int | None, str, int | str]


def rendered(name: str, **engine: Any) -> dict[str, Any]:
    """The pod that the chart makes of the values kept for this, under a name of its own."""
    spec = importlib.util.spec_from_file_location("plain_pod", HELM / "plain_pod.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    values = YAML(typ="safe", pure=True).load(VALUES.read_text())
    values["engine"] |= engine
    pod: dict[str, Any] = module.plain_pod(values, name)
    # podman keeps an emptyDir as a volume of that name, pod or no pod
    return dict(json.loads(json.dumps(pod).replace("kvbus-state", f"{name}-state")))


class Pod:
    """A pod with a network of its own: nothing outside can reach it, so everything is asked from inside."""

    def __init__(self, podman: Podman, directory: Path, pod: dict[str, Any]) -> None:
        self._podman = podman
        self.name = pod["metadata"]["name"]
        self.file = directory / "pod.yaml"
        self.file.write_text(json.dumps(pod))

    def start(self) -> None:
        self._podman("play", "kube", "--network", "none", str(self.file))

    def end(self) -> None:
        """The exit codes of both containers are kept until they are removed."""
        self._podman("pod", "stop", "--time", "20", self.name)

    def exit_code(self, container: str) -> int:
        format_ = "{{.State.ExitCode}}"
        return int(self._podman("inspect", "--format", format_, f"{self.name}-{container}").stdout)

    def said(self, container: str) -> str:
        done = self._podman("logs", f"{self.name}-{container}")
        return done.stdout + done.stderr

    def kvbus(self, *args: str) -> str:
        """What a `kvbus` in the pod prints."""
        return self._podman("exec", f"{self.name}-kvbus", "kvbus", *args).stdout

    def source(self) -> dict[str, Any]:
        code = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9477/sources').read().decode())"
        done = self._podman("exec", f"{self.name}-kvbus", "python", "-c", code, check=False)
        return dict(json.loads(done.stdout)[0]) if done.returncode == 0 else {}

    def blocks(self, endpoint: str, *options: str) -> set[Key]:
        """What a router that begins now rebuilds by the standard replay."""
        lines = [json.loads(line) for line in self.kvbus("dump", endpoint, *options).splitlines()]
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
    """As it is, only that the engine falls idle after some requests."""
    return rendered(name, extraArgs=["--requests=60", "--rate=200", "--subscribers=1"])


CAPTURE: Final = "vllm033_map_int"


def with_capture(name: str) -> dict[str, Any]:
    """The same pod, whose engine plays what a real one once sent."""
    pod = rendered(name)
    (engine,) = [container for container in pod["spec"]["containers"] if container["name"] == "engine"]
    places = [arg for arg in engine["args"] if arg.startswith(("--endpoint=", "--replay-endpoint="))]
    assert len(places) == 2
    engine["args"] = ["play", f"/captures/{CAPTURE}.jsonl", *places, "--subscribers=1", "--rate=2000"]
    engine["volumeMounts"] = [{"name": "captures", "mountPath": "/captures", "readOnly": True}]
    pod["spec"].setdefault("volumes", []).append({"name": "captures", "hostPath": {"path": str(DATA)}})
    return pod


def test_it_is_the_image_under_test_and_the_restricted_kind_of_pod() -> None:
    pod = rendered("any")
    containers = {container["name"]: container for container in pod["spec"]["containers"]}
    assert {container["image"] for container in containers.values()} == {IMAGE}
    assert containers["kvbus"]["securityContext"]["readOnlyRootFilesystem"] is True
    assert containers["kvbus"]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("pod", [with_capture], indirect=True)
def test_a_capture_through_the_pod_comes_out_exact(pod: Pod) -> None:
    last = load(CAPTURE)[-1].seq
    pod.until(lambda: (s := pod.source()) and s["last_seq"] == last and s["state"] == "live", "every batch relayed")
    assert pod.blocks(f"{ANY_HOST}5658") == truth(CAPTURE)
    assert pod.source()["counts"]["rejected"] == {}
    pod.end()
    assert pod.exit_code("kvbus") == 0


@pytest.mark.parametrize("pod", [with_simulated_engine], indirect=True)
def test_kvbus_and_the_simulated_engine_agree(pod: Pod) -> None:
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
