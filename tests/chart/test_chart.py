"""The Helm chart: lints strictly, renders to manifests Kubernetes accepts, and keeps the sidecar's promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from ruamel.yaml import YAML

helm = pytest.importorskip(
    "helm_python", reason="helm-python-sdk is not installed (.ci/run installs it from .ci/tools.lock)"
)

CHART: Final = Path(__file__).parents[2] / "helm" / "kvbus"
INFO: Final = 1
"""Lint severity below a warning."""

VALUES: Final[dict[str, dict[str, Any]]] = {
    "default": {},
    "two ranks": {
        "engine": {"dataParallelSize": 2, "events": {"replayPort": 5587}},
        "kvbus": {"ports": {"replay": 5757}},
    },
    "aibrix ports": {
        "engine": {"events": {"port": 15557, "replayPort": 15558}},
        "kvbus": {"ports": {"events": 5557, "replay": 5558}, "profile": "aibrix"},
    },
    "llm-d": {"kvbus": {"profile": "llm-d"}},
    "another engine": {
        "engine": {
            "args": ["serve", "--flag"],
            "extraArgs": ["--more"],
            "env": [{"name": "A", "value": "b"}],
            "resources": {"limits": {"nvidia.com/gpu": 1}},
        },
        "kvbus": {
            "image": {"repository": "mirror/kvbus", "digest": "sha256:" + "0" * 64},
            "extraConfig": {"on_lost": "keep"},
        },
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "pull"}],
    },
}


def load(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def render(values: dict[str, Any]) -> dict[str, Any]:
    """Manifests by kind, NOTES under its own name."""
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        rendered = chart.render(values, name="demo", namespace="ns")
    found: dict[str, Any] = {"NOTES": rendered.pop("kvbus/templates/NOTES.txt")}
    for text in rendered.values():
        if manifest := load(text):
            found[manifest["kind"]] = manifest
    return found


def sidecar(manifests: dict[str, Any]) -> dict[str, Any]:
    (container,) = manifests["Deployment"]["spec"]["template"]["spec"]["initContainers"]
    return container


def configuration(manifests: dict[str, Any]) -> dict[str, Any]:
    return load(manifests["ConfigMap"]["data"]["kvbus.yaml"])


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_lints_strictly(values: dict[str, Any]) -> None:
    report = helm.lint(str(CHART), values, strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > INFO] == []


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_kubernetes_accepts_the_manifests(values: dict[str, Any]) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    manifests = render(values)
    del manifests["NOTES"]
    assert set(manifests) == {"ConfigMap", "Deployment", "Service"}
    for manifest in manifests.values():
        kubernetes.validate(manifest, "1.31", strict=True)


def test_the_sidecar_is_native_and_its_probes_ask_kvbus_only() -> None:
    container = sidecar(render({}))
    assert container["restartPolicy"] == "Always"
    http = {"containerPort": 9477, "name": "kvbus-http"}
    assert http in container["ports"]
    paths = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {
        "startupProbe": {"path": "/livez", "port": "kvbus-http"},
        "livenessProbe": {"path": "/livez", "port": "kvbus-http"},
        "readinessProbe": {"path": "/readyz", "port": "kvbus-http"},
    }


def test_the_sidecar_meets_the_restricted_pod_security_standard() -> None:
    context = sidecar(render({}))["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] > 0
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_engine_and_kvbus_meet_on_loopback() -> None:
    manifests = render(VALUES["aibrix ports"])
    (engine,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    events = json.loads(engine["args"][engine["args"].index("--kv-events-config") + 1])
    (source,) = configuration(manifests)["sources"]
    assert source["bind"] is True
    assert (events["endpoint"], events["replay_endpoint"]) == (source["endpoint"], source["replay_endpoint"])
    assert source["endpoint"] == "tcp://127.0.0.1:15557"


def test_the_service_has_a_port_for_each_rank() -> None:
    manifests = render(VALUES["two ranks"])
    spec = manifests["Service"]["spec"]
    assert spec["clusterIP"] == "None"
    assert {port["name"]: port["port"] for port in spec["ports"]} == {
        "kv-events-0": 5657,
        "kv-events-1": 5658,
        "kv-replay-0": 5757,
        "kv-replay-1": 5758,
        "kvbus-http": 9477,
    }


def test_llm_d_finds_the_pod_and_the_model_in_the_topic() -> None:
    manifests = render(VALUES["llm-d"])
    assert configuration(manifests)["outputs"][0]["topic"] == "kv@{worker}@{model}"
    worker = {variable["name"]: variable.get("value") for variable in sidecar(manifests)["env"]}
    assert worker["KVBUS_WORKER"] == "$(POD_IP):8000"


def test_a_changed_configuration_restarts_the_pods() -> None:
    def checksum(values: dict[str, Any]) -> str:
        annotations = render(values)["Deployment"]["spec"]["template"]["metadata"]["annotations"]
        return annotations["checksum/kvbus-config"]

    assert checksum({}) == checksum({})
    assert checksum({}) != checksum({"kvbus": {"profile": "dynamo"}})


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_kvbus_accepts_the_configuration(values: dict[str, Any], tmp_path: Path) -> None:
    load_module = pytest.importorskip("kvbus.config.load")
    path = tmp_path / "kvbus.yaml"
    manifests = render(values)
    path.write_text(manifests["ConfigMap"]["data"]["kvbus.yaml"])
    config = load_module.load(path, env={}, overrides={})
    assert config.model == "Qwen/Qwen3-32B"
    assert config.outputs[0].profile == values.get("kvbus", {}).get("profile", "vllm")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"kvbus": {"prots": {}}}, "prots"),
        ({"kvbus": {"profile": "trtllm"}}, "profile"),
        ({"kvbus": {"ports": {"events": 70000}}}, "events"),
        ({"replicas": -1}, "replicas"),
        ({"model": ""}, "model"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm.HelmError, match=named):
        render(values)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"kvbus": {"ports": {"events": 5557}}}, "both need port 5557"),
        ({"engine": {"dataParallelSize": 2}}, "both need port 5658"),
        ({"kvbus": {"extraConfig": {"http": "0.0.0.0:1"}}}, "kvbus.extraConfig.http"),
    ],
)
def test_contradictions_are_refused_with_the_values_that_cause_them(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm.HelmError, match=named):
        render(values)


def test_the_notes_warn_where_a_router_would_not_find_the_port() -> None:
    assert "WARNING" in render({"kvbus": {"profile": "aibrix"}})["NOTES"]
    assert "WARNING" not in render(VALUES["aibrix ports"])["NOTES"]
