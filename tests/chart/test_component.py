"""Tests for the kustomize components that add the chart's kvbus sidecar to workloads of every kind."""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from ruamel.yaml import YAML

from kvbus.common.errors import ConfigError
from kvbus.config import load
from tests.chart.charts import ROOT, containers, environment, render, script
from tests.chart.definitions import PLATFORMS, mistakes, needs_platforms

KUBERNETES: Final = ROOT / "deploy" / "kubernetes"
POST_RENDERER: Final = KUBERNETES / "post-renderer" / "kvbus.sh"
PRESETS: Final = script("component").PRESETS
EXAMPLES: Final = sorted(
    path.parent for path in KUBERNETES.rglob("*/kustomization.yaml") if "component" not in path.parts
)
DEFINED: Final = {"lws", "aibrix"}
"""Example platforms whose resource definitions the tests can load, because a Go module contains them.

No Go module contains those of OME and of the Dynamo operator.
"""


def kustomize() -> str | None:
    """Return the command that builds a kustomize folder; None if no such program is installed."""
    own = Path(PLATFORMS or "", "kustomize")
    if own.is_file():
        return f"{own} build"
    return next(
        (f"{name} {verb}" for name, verb in (("kubectl", "kustomize"), ("kustomize", "build")) if shutil.which(name)),
        None,
    )


KUSTOMIZE: Final = kustomize()
needs_kustomize = pytest.mark.skipif(KUSTOMIZE is None, reason="neither kubectl nor kustomize is here (make platforms)")


def documents(text: str) -> list[Any]:
    return [each for each in YAML(typ="safe", pure=True).load_all(text) if each]


def read(path: Path) -> Any:
    (found,) = documents(path.read_text())
    return found


def variables(of: Any) -> dict[str, str]:
    return {name: value for name, value in environment(of).items() if name.startswith("KVBUS_")}


# -- the sidecar


@pytest.mark.parametrize("name", PRESETS)
def test_the_sidecar_of_a_component_equals_the_sidecar_of_the_chart(name: str) -> None:
    chart = render({"kvbus": {**PRESETS[name], "model": "qwen", "configFrom": "environment"}})
    template = read(KUBERNETES / "component" / name / "sidecar.yaml")["template"]
    (ours,), theirs = template["spec"]["initContainers"], chart.kvbus
    env = {**environment(ours), "KVBUS_MODEL": "qwen"}
    assert {**environment(theirs), "KVBUS_MODEL": "qwen"} == env
    assert {key: value for key, value in ours.items() if key != "env"} == {
        key: value for key, value in theirs.items() if key != "env"
    }
    given = chart.pod["metadata"]["labels"]
    assert template["metadata"]["labels"].items() <= given.items()
    of_the_author = {"model.aibrix.ai/name", "model.aibrix.ai/port"}
    left = {each for each in given.keys() - template["metadata"]["labels"].keys() if "app.kubernetes.io" not in each}
    assert left <= of_the_author


@pytest.mark.parametrize("name", PRESETS)
def test_a_sidecar_without_a_model_is_refused_only_for_topics_with_models(name: str) -> None:
    """If a pod has no annotation with the model's name, the kubelet sets KVBUS_MODEL to an empty string.

    kvbus refuses the empty name only if the router needs topics that contain the model's name.
    """
    (sidecar,) = read(KUBERNETES / "component" / name / "sidecar.yaml")["template"]["spec"]["initContainers"]
    env = variables(sidecar) | {"KVBUS_MODEL": ""}
    if name == "llm-d":
        with pytest.raises(ConfigError, match=r"uses \{model\}"):
            load(None, env=env, overrides={})
    else:
        assert load(None, env=env, overrides={}).model == ""


# -- where it goes


def pods(node: Any) -> Iterator[Any]:
    """Yield each pod spec with the kvbus sidecar that a Kubernetes object contains."""
    if isinstance(node, dict):
        if any(each.get("name") == "kvbus" for each in node.get("initContainers", [])):
            yield node
        for each in node.values():
            yield from pods(each)
    elif isinstance(node, list):
        for each in node:
            yield from pods(each)


@needs_kustomize
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_engine_of_each_example_publishes_to_its_sidecar(example: Path) -> None:
    found = [pod for each in built(example) for pod in pods(each)]
    assert found
    for pod in found:
        (sidecar,) = (each for each in pod["initContainers"] if each["name"] == "kvbus")
        assert sidecar["restartPolicy"] == "Always"
        assert sidecar["image"].startswith("registry.example.com/kvbus:")
        (source,) = load(None, env=variables(sidecar) | {"KVBUS_MODEL": "qwen"}, overrides={}).sources
        (flag,) = (json.loads(text) for text in texts(pod) if '"publisher"' in text)
        assert (flag["endpoint"], flag["replay_endpoint"]) == (source.endpoint, source.replay_endpoint)
        assert {"kvbus-state"} <= {each["name"] for each in pod["volumes"]}


def texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, (dict, list)):
        for each in node.values() if isinstance(node, dict) else node:
            yield from texts(each)


@functools.cache
def built(folder: Path) -> list[Any]:
    assert KUSTOMIZE is not None
    done = subprocess.run(
        [*shlex.split(KUSTOMIZE), str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def check_for_kubernetes(spec: Any) -> None:
    """Check that a pod spec is valid by Kubernetes' strict schema, and that each of its volume mounts has a volume."""
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    kubernetes.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": spec}, "1.37", strict=True
    )
    mounted = {each["name"] for one in containers(spec) for each in one.get("volumeMounts", [])}
    assert mounted <= {each["name"] for each in spec.get("volumes", [])}


def pod_specs(node: Any) -> Iterator[Any]:
    """Return every pod spec in an object, with or without the kvbus sidecar."""
    if isinstance(node, dict):
        # OME's engine object has the fields of a pod's spec next to its own, and calls its container "runner".
        if "runner" in node:
            own = {"runner", "minReplicas", "maxReplicas", "labels", "annotations"}
            yield {**{key: value for key, value in node.items() if key not in own}, "containers": [node["runner"]]}
        elif "containers" in node:
            yield node
        else:
            for each in node.values():
                yield from pod_specs(each)
    elif isinstance(node, list):
        for each in node:
            yield from pod_specs(each)


@needs_kustomize
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_pod_of_an_example_is_valid_for_kubernetes(example: Path) -> None:
    found = [spec for each in built(example) for spec in pod_specs(each)]
    assert found
    for spec in found:
        check_for_kubernetes(spec)


def test_the_check_refuses_a_misspelled_field_or_a_missing_volume() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    with pytest.raises(kubernetes.utils.ValidationError):
        check_for_kubernetes({"containers": [{"name": "a", "image": "a:1", "volumeMount": []}]})
    mount = {"name": "metrics-volume", "mountPath": "/.config"}
    with pytest.raises(AssertionError):
        check_for_kubernetes({"containers": [{"name": "a", "image": "a:1", "volumeMounts": [mount]}]})


def test_leader_and_workers_of_the_set_start_engines_with_equal_arguments() -> None:
    """The leader and the workers of a LeaderWorkerSet have the same arguments except for their ranks.

    Otherwise vLLM's processes would not find each other.
    """
    (engine,) = documents((KUBERNETES / "platforms" / "lws" / "engine.yaml").read_text())
    template = engine["spec"]["leaderWorkerTemplate"]
    (leader,), (worker,) = (template[each]["spec"]["containers"] for each in ("leaderTemplate", "workerTemplate"))
    events = leader["args"].index("--kv-events-config")
    assert [*leader["args"][:events], *leader["args"][events + 2 :]] == [
        each if each != "--headless" else "--enable-prefix-caching" for each in worker["args"]
    ]
    assert {key: leader[key] for key in ("image", "command", "resources", "volumeMounts")} == {
        key: worker[key] for key in ("image", "command", "resources", "volumeMounts")
    }
    (size,) = (int(each.partition("=")[2]) for each in worker["args"] if each.startswith("--tensor-parallel-size="))
    assert size == template["size"] * worker["resources"]["limits"]["nvidia.com/gpu"]


@needs_platforms
@pytest.mark.parametrize("example", [each for each in EXAMPLES if each.name in DEFINED], ids=lambda path: path.name)
def test_built_examples_are_valid_for_the_resource_definitions_of_their_projects(example: Path) -> None:
    for each in built(example):
        assert mistakes(each) == []


@needs_platforms
def test_the_service_is_valid_for_the_resource_definition_of_kserve() -> None:
    assert mistakes(read(KUBERNETES / "platforms" / "kserve" / "service.yaml")) == []


WORKLOADS: Final = """
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: labelled, labels: {kvbus: enabled}}
spec:
  template:
    metadata: {labels: {kvbus/sidecar: "false", app: engine}}
    spec:
      initContainers: [{name: kvbus, image: dropped:1, command: [old]}, {name: fetch, image: fetch:1}]
      containers: [{name: engine, image: engine:1}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: another}
spec: {template: {spec: {containers: [{name: other, image: other:1}]}}}
---
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {name: flat, labels: {kvbus: workers}}
spec: {leaderWorkerTemplate: {size: 1, workerTemplate: {spec: {containers: [{name: engine, image: engine:1}]}}}}
---
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: of-kserve, labels: {kvbus: enabled}}
spec: {predictor: {containers: [{name: kserve-container, image: engine:1}]}}
"""


def folder(place: Path, workloads: str) -> Path:
    """Write a kustomize folder with these workloads and with llm-d's component, as an operator would."""
    shutil.copytree(KUBERNETES / "component" / "llm-d", place / "component")
    (place / "workloads.yaml").write_text(workloads)
    about = {"resources": ["workloads.yaml"], "components": ["component"]}
    (place / "kustomization.yaml").write_text(json.dumps(about))
    return place


@needs_kustomize
def test_the_component_adds_the_sidecar_only_to_labelled_workloads(tmp_path: Path) -> None:
    made = {each["metadata"]["name"]: each for each in built(folder(tmp_path, WORKLOADS))}
    labelled, another, flat, of_kserve = (made[name] for name in ("labelled", "another", "flat", "of-kserve"))
    template = labelled["spec"]["template"]
    assert [each["name"] for each in template["spec"]["initContainers"]] == ["kvbus", "fetch"]
    assert "command" not in template["spec"]["initContainers"][0], "the whole container is the component's"
    assert template["metadata"]["labels"] == {
        "kvbus/sidecar": "true",
        "llm-d.ai/inference-serving": "true",
        "app": "engine",
    }
    assert [another, of_kserve] == [
        each for each in documents(WORKLOADS) if each["metadata"]["name"] in {"another", "of-kserve"}
    ]
    (pod,) = pods(flat)
    assert pod == flat["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]


@needs_kustomize
def test_one_build_may_contain_two_copies_of_the_component(tmp_path: Path) -> None:
    """One kustomize build may include two folders that each have a model and their own copy of the component."""
    for name in ("one", "two"):
        folder(tmp_path / name, WORKLOADS.split("---")[0].replace("name: labelled", f"name: {name}"))
    (tmp_path / "kustomization.yaml").write_text(json.dumps({"resources": ["one", "two"], "namespace": "models"}))
    made = built(tmp_path)
    assert [(each["kind"], each["metadata"]["name"], each["metadata"]["namespace"]) for each in made] == [
        ("StatefulSet", "one", "models"),
        ("StatefulSet", "two", "models"),
    ]
    assert len([pod for each in made for pod in pods(each)]) == 2


# -- charts of others

DROPPED: Final = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: vllm-qwen-deployment-vllm, labels: {model: qwen}}
spec:
  selector: {matchLabels: {model: qwen}}
  template:
    metadata: {labels: {model: qwen}}
    spec:
      initContainers: [{name: kvbus, image: kvbus:1, env: [{name: RELEASE_NAME, value: vllm}]}]
      containers: [{name: vllm, image: vllm:1}]
---
apiVersion: v1
kind: Service
metadata: {name: vllm-router, labels: {model: qwen}}
"""


def post_rendered(manifests: str, **said: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "KUSTOMIZE": KUSTOMIZE or "", **said}
    return subprocess.run(
        [str(POST_RENDERER)], input=manifests, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@needs_kustomize
def test_the_post_renderer_adds_a_sidecar_to_the_output_of_another_chart() -> None:
    done = post_rendered(DROPPED, KVBUS_SELECT="model", KVBUS_ROUTER="dynamo", KVBUS_IMAGE="registry.example.com/kvbus")
    assert done.returncode == 0, done.stderr
    service, deployment = documents(done.stdout)
    assert service == documents(DROPPED)[1], "only workloads are touched"
    (sidecar,) = deployment["spec"]["template"]["spec"]["initContainers"]
    wanted = read(KUBERNETES / "component" / "dynamo" / "sidecar.yaml")["template"]["spec"]["initContainers"][0]
    assert sidecar == {**wanted, "image": f"registry.example.com/{wanted['image']}"}
    assert deployment["spec"]["template"]["metadata"]["labels"] == {"model": "qwen", "kvbus/sidecar": "true"}
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    kubernetes.validate(deployment, "1.37", strict=True)


@needs_kustomize
@pytest.mark.parametrize(
    ("said", "why"), [({}, "no workload of the chart"), ({"KVBUS_ROUTER": "llmd"}, "there are aibrix dynamo")]
)
def test_the_post_renderer_fails_if_it_cannot_add_kvbus(said: dict[str, str], why: str) -> None:
    done = post_rendered(DROPPED, **said)
    assert (done.returncode, done.stdout) == (1, "")
    assert why in done.stderr


def test_values_for_the_llm_d_chart_contain_the_sidecar_of_the_component() -> None:
    values = read(KUBERNETES / "platforms" / "llm-d" / "modelservice-values.yaml")
    template = read(KUBERNETES / "component" / "llm-d" / "sidecar.yaml")["template"]
    labels, pod = template["metadata"]["labels"], template["spec"]
    assert values == {"modelArtifacts": {"labels": labels}, "decode": pod, "prefill": pod}
