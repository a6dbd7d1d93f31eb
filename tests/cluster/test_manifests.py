"""Tests that a real API server accepts the manifests in deploy/kubernetes.

The server has the custom resource definitions of the other projects whose objects are in these manifests.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from ruamel.yaml import YAML

from tests.chart.charts import ROOT
from tests.cluster.api import RESTRICTED, Api, Object, RefusedError, placed

KUBERNETES: Final = ROOT / "deploy" / "kubernetes"
OTHERS: Final = {
    "inject/kserve.yaml": "serving.kserve.io",
    "platforms/kserve/service.yaml": "serving.kserve.io",
}
"""For each manifest, the API group of the other project's kind that it uses."""

BUILT: Final = {
    "example": None,
    "platforms/lws": "leaderworkerset.x-k8s.io",
    "platforms/aibrix": "orchestration.aibrix.ai",
}
"""For each folder with a kustomize component, the API group of the workload into which the tests build it."""

MANIFESTS: Final = sorted(
    str(path.relative_to(KUBERNETES))
    for path in KUBERNETES.rglob("*.yaml")
    if path.parent.name in {"kubernetes", "inject", "kserve"}
)


def documents(text: str) -> list[Any]:
    return [each for each in YAML(typ="safe", pure=True).load_all(text) if each is not None]


def pods(node: Any) -> list[Any]:
    """Return the specs of all pods that some Kubernetes objects contain at any depth."""
    if isinstance(node, list):
        return [spec for each in node for spec in pods(each)]
    if not isinstance(node, dict):
        return []
    return [node] if "containers" in node else [spec for each in node.values() for spec in pods(each)]


def accepted(api: Api, objects: list[Object], *, restricted: bool = True) -> None:
    """Check that the server stores the objects without a warning, and accepts the pods in them.

    Args:
        api: the server.
        objects: the objects to store.
        restricted: whether every container must fulfil the restricted Pod Security Standard. Otherwise only kvbus's
            container must.
    """
    namespace = api.namespace(RESTRICTED if restricted else None)
    for each in objects:
        api.apply(placed(each, namespace), dry_run=True)
        api.apply(placed(each, namespace))
    for each in pods(objects):
        engines = [{"image": "platform:1", **container} for container in each["containers"]]
        spec = {**each, "containers": engines}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one", "namespace": namespace}, "spec": spec}
        api.delete(api.create(pod))
        if not restricted:
            with pytest.raises(RefusedError, match=rf'violates PodSecurity.*\\"{engines[0]["name"]}\\"') as refused:
                api.create({**pod, "metadata": {"name": "one", "namespace": api.namespace(RESTRICTED)}})
            assert '\\"kvbus\\"' not in str(refused.value)
    for each in objects:
        api.delete(placed(each, namespace))


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_api_server_accepts_each_manifest_without_a_warning(
    name: str, api: Api, serve: Callable[[str], None]
) -> None:
    if name in OTHERS:
        serve(OTHERS[name])
    accepted(api, documents((KUBERNETES / name).read_text()), restricted=OTHERS.get(name) != "serving.kserve.io")


@pytest.mark.parametrize("name", BUILT)
def test_the_api_server_accepts_a_workload_with_the_component_without_a_warning(
    name: str, api: Api, serve: Callable[[str], None]
) -> None:
    """The API server accepts a workload into which the component's sidecar was built.

    The example engine in the workload does not fulfil the restricted Pod Security Standard; only the sidecar must.
    """
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: the kustomize component is not built")
    if (group := BUILT[name]) is not None:
        serve(group)
    command = ["kubectl", "kustomize", str(KUBERNETES / name)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    accepted(api, documents(made), restricted=False)


def test_the_api_server_refuses_an_unknown_field_of_another_projects_kind(
    api: Api, serve: Callable[[str], None]
) -> None:
    serve(OTHERS["platforms/kserve/service.yaml"])
    (each,) = documents(Path(KUBERNETES, "platforms/kserve/service.yaml").read_text())
    each["spec"]["modl"] = {}
    with pytest.raises(RefusedError, match="modl"):
        api.apply(placed(each, api.namespace()), dry_run=True)
