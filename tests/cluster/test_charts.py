"""Tests for every preset of the chart at a real API server: install, upgrade, roll back and uninstall.

The server must accept each object without a warning, and nothing must remain after the uninstallation.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.chart.charts import CASES, CHART, RELEASE, Release, helm, render
from tests.cluster.api import RESTRICTED, Api, Object, RefusedError, placed
from tests.cluster.control_plane import HELM, ApiServer

OLDER: Final = os.environ.get("TEST_UPGRADE_FROM")


@pytest.fixture(scope="module")
def of_the_cluster(server: ApiServer, serve: Callable[[str], None], elsewhere: str) -> None:
    """Create the objects in the cluster that the presets need, such as a PriorityClass."""
    serve("monitoring.coreos.com")
    ready: list[Object] = [
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "serving"}, "value": 1000},
        {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"},
    ]
    for each in ready:
        server.api.create(each)


@pytest.fixture
def restricted_namespace(api: Api, of_the_cluster: None) -> str:
    """The name of a new namespace that enforces the restricted Pod Security Standard."""
    return api.namespace(RESTRICTED)


@pytest.fixture
def installer(api: Api, restricted_namespace: str, tmp_path: Path) -> Iterator[Any]:
    """Helm with an administrator's token of its own, and with a configuration that names no other cluster."""
    (tmp_path / "kubeconfig").write_text("apiVersion: v1\nkind: Config\n")
    with helm.Config(
        kubeconfig_path=tmp_path / "kubeconfig",
        kube_apiserver=api.url,
        kube_token=HELM,
        kube_ca_file=api.ca_file,
        namespace=restricted_namespace,
        qps=1000.0,
        burst_limit=1000,
    ) as made:
        yield made


def pod_of(release: Release, namespace: str) -> Object:
    """Return the pod that a controller would create from the workload's template."""
    metadata = {**release.pod["metadata"], "name": "one", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": release.pod["spec"]}


@pytest.mark.parametrize("case", CASES)
def test_the_api_server_accepts_every_object_of_a_preset_without_a_warning(
    case: str, api: Api, restricted_namespace: str
) -> None:
    """The API server accepts every object of a preset.

    It would refuse objects with unknown fields, and pods that violate the restricted Pod Security Standard.
    """
    release = render(CASES[case], namespace=restricted_namespace)
    for each in release.objects:
        api.apply(placed(each, restricted_namespace), dry_run=True)
    if (account := release.pod["spec"].get("serviceAccountName", "default")) != "default":
        api.create(
            placed({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}}, restricted_namespace)
        )
    api.create(pod_of(release, restricted_namespace), dry_run=True)


@pytest.mark.parametrize("case", CASES)
def test_a_helm_release_is_installed_upgraded_rolled_back_and_removed_completely(
    case: str, api: Api, server: ApiServer, restricted_namespace: str, installer: Any
) -> None:
    values = CASES[case]
    release = render(values, namespace=restricted_namespace)
    before, asked = api.inventory(restricted_namespace), len(server.asked("helm"))
    installer.install(str(CHART), RELEASE, values)
    wanted = [placed(each, restricted_namespace) for each in release.objects if "helm.sh/hook" not in hooks(each)]
    first = {api.path(each): spec(api.read(each)) for each in wanted}
    pod = api.create(pod_of(release, restricted_namespace))
    workload = placed(release.workload, restricted_namespace)
    note = {"podAnnotations": {**values.get("podAnnotations", {}), "example.com/changed": "yes"}}
    installer.upgrade(str(CHART), RELEASE, {**values, **note})
    annotations = api.read(workload)["spec"]["template"]["metadata"]["annotations"]
    assert annotations["example.com/changed"] == "yes"
    installer.rollback(RELEASE)
    assert {api.path(each): spec(api.read(each)) for each in wanted} == first
    api.delete(pod)
    installer.uninstall(RELEASE)
    assert api.inventory(restricted_namespace) == before
    requests = server.asked("helm")[asked:]
    assert requests
    said = {
        name
        for each in requests
        for name in each.get("annotations", {})
        if "audit-violations" in name or "deprecated" in name
    }
    assert said == set()


@pytest.mark.skipif(not OLDER, reason="TEST_UPGRADE_FROM names no commit: TEST_UPGRADE_FROM=HEAD~1, as .ci/run does")
def test_an_upgraded_release_of_an_older_commit_keeps_its_volume_claim(
    api: Api, restricted_namespace: str, installer: Any, tmp_path: Path
) -> None:
    """The upgrade command of docs/OPERATIONS.md keeps the values of a release and changes the tag of its image.

    The pod keeps its volume claim, and the old and the new pod never use the claim at the same time.
    """
    command = ["git", "archive", str(OLDER), "helm"]
    archive = subprocess.run(command, cwd=CHART.parents[1], capture_output=True, check=True)
    subprocess.run(["tar", "x", "-C", tmp_path], input=archive.stdout, check=True)
    values = CASES["deployment"]
    newer = {**values, "kvbus": {**values["kvbus"], "image": {"tag": "NEW"}}}
    installer.install(str(tmp_path / "helm" / "kvbus"), RELEASE, values)
    workload = placed(render(values, namespace=restricted_namespace).workload, restricted_namespace)
    before = api.read(workload)
    installer.upgrade(str(CHART), RELEASE, newer)
    after = api.read(workload)
    assert after["metadata"]["uid"] == before["metadata"]["uid"], "it was changed, not made again"
    assert after["spec"]["selector"] == before["spec"]["selector"]
    assert after["spec"]["strategy"] == {"type": "Recreate"}
    pods = [each["spec"]["template"]["spec"] for each in (before, after)]
    claims = [[volume.get("persistentVolumeClaim") for volume in pod["volumes"]] for pod in pods]
    assert claims[0] == claims[1]
    assert {"claimName": "kvbus-state"} in claims[1]
    assert [pod["containers"][0]["image"].rpartition(":")[2] for pod in pods][1] == "NEW"
    installer.rollback(RELEASE)
    assert spec(api.read(workload)) == spec(before)


def test_a_patch_changes_the_image_of_a_sidecar_in_a_running_pod(api: Api, restricted_namespace: str) -> None:
    """The patch of docs/OPERATIONS.md changes kvbus's image. The pod and its engine keep running."""
    release = render(namespace=restricted_namespace)
    api.apply(placed(release.one("ServiceAccount"), restricted_namespace))
    before = api.create(pod_of(release, restricted_namespace))
    page = (CHART.parents[1] / "docs" / "OPERATIONS.md").read_text()
    (body,) = re.findall(r"^kubectl patch pod POD --type=strategic -p '(.+)'$", page, re.MULTILINE)
    after = api.ask("PATCH", api.path(before), json.loads(body), "application/strategic-merge-patch+json")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    (old,), (new,) = (each["spec"]["initContainers"] for each in (before, after))
    assert new == {**old, "image": "REGISTRY/kvbus:NEW"}
    assert after["spec"]["containers"] == before["spec"]["containers"]


def hooks(each: Object) -> Object:
    return dict(each["metadata"].get("annotations") or {})


def spec(each: Object) -> Object:
    """Return a Kubernetes object without its metadata and status."""
    return {key: value for key, value in each.items() if key not in {"metadata", "status"}}


def test_the_tests_api_server_refuses_unrestricted_pods_and_unknown_fields(api: Api, restricted_namespace: str) -> None:
    """The tests' server really checks objects.

    It refuses a pod that violates the restricted Pod Security Standard, and an object with an unknown field.
    """
    release = render(namespace=restricted_namespace)
    api.apply(placed(release.one("ServiceAccount"), restricted_namespace))
    pod = pod_of(release, restricted_namespace)
    with pytest.raises(RefusedError, match=r'violates PodSecurity \\"restricted:latest\\": host namespaces'):
        api.create({**pod, "spec": {**pod["spec"], "hostNetwork": True}}, dry_run=True)
    with pytest.raises(RefusedError, match=r'unknown field \\"spec.hostNetwrk\\"'):
        api.create({**pod, "spec": {**pod["spec"], "hostNetwrk": True}}, dry_run=True)
    workload = placed(release.workload, restricted_namespace)
    workload["spec"]["template"]["spec"]["hostNetwork"] = True
    api.apply(workload, dry_run=True)
    (warning,) = api.warnings
    assert "would violate PodSecurity" in warning
    api.warnings.clear()
