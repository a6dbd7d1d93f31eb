"""Tests for the Kubernetes admission policy that adds kvbus to the pods of other projects.

The API server's own code evaluates the policy. The changed objects are validated by the definitions of their projects.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
from ruamel.yaml import YAML

from kvbus.config import load
from tests.chart.charts import ROOT, container, containers, environment, render, script
from tests.chart.definitions import PLATFORMS, mistakes, needs_platforms

HERE: Final = ROOT / "deploy" / "kubernetes" / "inject"
needs_policy = pytest.mark.skipif(
    not Path(PLATFORMS or "", "policy").is_file(),
    reason="the API server's CEL is not built (make platforms)",
)
ROUTERS: Final = script("policy").ROUTERS


def documents(name: str) -> list[Any]:
    return list(YAML(typ="safe", pure=True).load_all((HERE / name).read_text()))


def labels(router: str) -> dict[str, str]:
    """Return the labels that the chart sets on a pod for this router, without the labels that name the release."""
    found = render({"kvbus": {"router": router, "model": "qwen"}}).pod["metadata"]["labels"]
    return {name: value for name, value in found.items() if not name.startswith("app.kubernetes.io/")}


def test_the_admission_policy_and_its_binding_are_valid_for_kubernetes() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    policy, binding = documents("policy.yaml")
    for each in (policy, binding):
        kubernetes.validate(each, "1.37", strict=True)
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    with pytest.raises(kubernetes.utils.ValidationError):
        kubernetes.validate(policy | {"spec": policy["spec"] | {"mutation": []}}, "1.37", strict=True)


@pytest.mark.parametrize("router", ROUTERS)
def test_the_presets_of_the_policy_equal_the_presets_of_the_chart(router: str) -> None:
    policy, _ = documents("policy.yaml")
    (table,) = (each["expression"] for each in policy["spec"]["variables"] if each["name"] == "preset")
    outputs, events, layout, topic = json.loads(table.removesuffix("[variables.router]"))[router]
    filled = outputs.replace("@EVENTS@", events).replace("@REPLAY@", str(int(events) + 1))
    (output,) = json.loads(filled.replace("@TOPIC@", json.dumps(topic or None)))
    chart = render({"kvbus": {"router": router, "model": "qwen", "configFrom": "environment"}})
    (expected,) = json.loads(chart.environment()["KVBUS_OUTPUTS"])
    assert output == {"topic": None, **expected}
    assert layout == expected["layout"]


def applied(pod: Any) -> Any:
    """Return a pod as the API server would change it by the admission policy that adds kvbus to pods.

    The policy is run by the API server's own code, without a server.
    """
    command = [str(Path(PLATFORMS or "", "policy")), str(HERE / "policy.yaml")]
    done = subprocess.run(command, input=json.dumps(pod), capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise ValueError(done.stderr)
    return json.loads(done.stdout)


def pod(**annotations: str) -> dict[str, Any]:
    named = {f"kvbus/{name.replace('_', '-')}": value for name, value in annotations.items()}
    metadata = {"name": "engine-0", "namespace": "ns", "labels": {"kvbus/inject": "true"}, "annotations": named}
    spec = {"containers": [{"name": "engine", "image": "vllm:1"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def of_the_chart(router: str, ranks: int) -> Any:
    """Return the pod that the chart renders for this router.

    The tests compare it with a pod that the policy changed.
    """
    values = {"router": router, "model": "qwen", "configFrom": "environment", "dataParallelSize": ranks}
    return render({"kvbus": values | {"engineEvents": {"replayPort": 15657}}}).pod


def injected_as(chart: Any, made: Any, router: str) -> None:
    """Check that the admission policy gave a pod the same sidecar, labels and volume as the chart gives its own pod."""
    (ours,) = made["spec"]["initContainers"]
    theirs = container(chart, "kvbus")
    given = [load(None, env=without_place(each), overrides={}) for each in (environment(ours), environment(theirs))]
    assert given[0].model_copy(update={"worker": given[1].worker}) == given[1]
    for key in theirs.keys() - {"env", "ports"}:
        assert ours[key] == theirs[key], key
    wanted = {each["containerPort"] for each in theirs["ports"]}
    assert {each["containerPort"] for each in ours["ports"]} <= wanted, "of several ranks the first one's"
    assert labels(router).items() <= made["metadata"]["labels"].items()
    assert [each["name"] for each in made["spec"]["volumes"]] == ["kvbus-state"]


@needs_policy
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_policy_adds_the_same_sidecar_as_the_chart(router: str, ranks: int) -> None:
    made = applied(pod(router=router, model="qwen", ranks=str(ranks)))
    injected_as(of_the_chart(router, ranks), made, router)
    assert made["spec"]["containers"] == pod()["spec"]["containers"]
    assert applied(made) == made, "once"


def without_place(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith("KVBUS_")}


@needs_policy
def test_the_policy_uses_annotations_and_keeps_the_containers_of_the_pod() -> None:
    there = pod(events_port="6000", topic="kv@{worker}@x", serving_port="9000")
    there["spec"] |= {"initContainers": [{"name": "fetch", "image": "f:1"}], "volumes": [{"name": "w", "emptyDir": {}}]}
    made = applied(there)
    assert [each["name"] for each in containers(made["spec"])] == ["kvbus", "fetch", "engine"]
    assert [each["name"] for each in made["spec"]["volumes"]] == ["w", "kvbus-state"]
    env = environment(made["spec"]["initContainers"][0])
    (output,) = load(None, env=without_place(env) | {"KVBUS_MODEL": "m"}, overrides={}).outputs
    assert (output.endpoint, output.replay_endpoint, output.topic) == (
        "tcp://*:6000",
        "tcp://*:6001",
        "kv@{worker}@x",
    )
    assert env["KVBUS_WORKER"] == "10.1.2.3:9000"
    assert "KVBUS_MODEL" not in env


@needs_policy
def test_the_policy_refuses_an_unknown_router() -> None:
    with pytest.raises(ValueError, match="no such key: llmd"):
        applied(pod(router="llmd"))


# -- objects of others


@needs_platforms
def test_the_kserve_configuration_is_valid_for_its_resource_definition() -> None:
    (each,) = documents("kserve.yaml")
    assert mistakes(each) == []
    each["spec"]["templat"] = {}
    (mistake,) = mistakes(each)
    assert "templat" in mistake, "an unknown field would be seen"


def test_the_engine_of_the_kserve_configuration_publishes_to_its_sidecar() -> None:
    (each,) = documents("kserve.yaml")
    template = each["spec"]["template"]
    (sidecar,) = template["initContainers"]
    env = environment(sidecar)
    assert env["KVBUS_MODEL"] == "{{ .Spec.Model.Name }}"
    (source,) = load(None, env=without_place(env) | {"KVBUS_MODEL": "qwen"}, overrides={}).sources
    engine = template["containers"][0]
    events = json.loads(engine["args"][engine["args"].index("--kv-events-config") + 1])
    assert (events["endpoint"], events["replay_endpoint"]) == (source.endpoint, source.replay_endpoint)
    assert {each["name"] for each in template["volumes"]} == {mount["name"] for mount in sidecar["volumeMounts"]}
