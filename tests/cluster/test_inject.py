"""Tests for the admission policy that adds kvbus to new pods, in a real API server.

A pod that fulfils the restricted Pod Security Standard still fulfils it afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.chart.test_inject import ROUTERS, documents, injected_as, of_the_chart, pod
from tests.cluster.api import RESTRICTED, Api, Object, RefusedError, placed
from tests.cluster.control_plane import PATIENCE, ApiServer


@pytest.fixture(scope="module")
def policy_namespace(server: ApiServer) -> Iterator[str]:
    """The name of a namespace in which the admission policy is in force."""
    api = server.api
    namespace = api.namespace()
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    api.apply(
        placed({**account, "automountServiceAccountToken": False}, namespace)
    )  # otherwise the server adds a mount of the token to each container
    policy = documents("policy.yaml")
    for each in policy:
        api.apply(each)
    until = time.monotonic() + PATIENCE
    while "initContainers" not in create(api, pod(), namespace)["spec"]:
        assert time.monotonic() < until, "the policy is not in force"
        time.sleep(0.05)
    yield namespace
    for each in policy:
        api.delete(each)


def create(api: Api, of: Object, namespace: str) -> Object:
    """Return the object as the server would create it, with the changes of the admission policy."""
    return api.create(in_namespace(of, namespace), dry_run=True)


def in_namespace(of: Object, namespace: str) -> Object:
    return {**of, "metadata": {**of["metadata"], "namespace": namespace}}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_admission_policy_adds_the_same_sidecar_as_the_chart(
    router: str, ranks: int, api: Api, policy_namespace: str
) -> None:
    theirs = of_the_chart(router, ranks)
    spec = {key: value for key, value in theirs["spec"].items() if key != "serviceAccountName"}
    chart = create(
        api, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "theirs"}, "spec": spec}, policy_namespace
    )
    made = create(api, pod(router=router, model="qwen", ranks=str(ranks)), policy_namespace)
    injected_as(chart, made, router)


def test_the_admission_policy_does_not_change_a_pod_without_the_label(api: Api, policy_namespace: str) -> None:
    plain = pod()
    plain["metadata"]["labels"] = {"kvbus/inject": "false"}
    assert "initContainers" not in create(api, plain, policy_namespace)["spec"]


def test_the_admission_policy_does_not_change_a_pod_that_contains_kvbus(api: Api, policy_namespace: str) -> None:
    stored = api.create(in_namespace(pod(), policy_namespace))
    (kvbus,) = stored["spec"]["initContainers"]
    again = pod()
    again["spec"] = {key: stored["spec"][key] for key in ("containers", "initContainers", "volumes")}
    again["metadata"]["name"] = "again"
    (same,) = create(api, again, policy_namespace)["spec"]["initContainers"]
    assert same == kvbus
    api.delete(stored)


def test_the_admission_policy_refuses_an_unknown_router(api: Api, policy_namespace: str) -> None:
    with pytest.raises(RefusedError, match="no such key: llmd"):
        create(api, pod(router="llmd"), policy_namespace)


def test_a_restricted_pod_stays_restricted_after_kvbus_is_added(api: Api, policy_namespace: str) -> None:
    """A pod that fulfils the restricted Pod Security Standard still fulfils it after kvbus was added.

    The pod of the other tests does not fulfil it, so this test changes the engine's container.
    """
    namespace = api.namespace(RESTRICTED)
    with pytest.raises(RefusedError, match=r'violates PodSecurity.*container \\"engine\\" must set') as refused:
        create(api, pod(), namespace)
    assert '\\"kvbus\\"' not in str(refused.value)
    good = pod()
    good["spec"]["containers"][0]["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert [each["name"] for each in create(api, good, namespace)["spec"]["initContainers"]] == ["kvbus"]


@pytest.mark.parametrize("switched", [{}, {"automountServiceAccountToken": False}], ids=["by default", "off"])
def test_an_added_sidecar_mounts_the_pods_token_unless_automount_is_off(
    switched: Object, api: Api, policy_namespace: str
) -> None:
    plain = pod()
    plain["spec"].update(switched)
    (kvbus,) = create(api, plain, api.namespace())["spec"]["initContainers"]
    mounts = {each["mountPath"] for each in kvbus["volumeMounts"]}
    assert ("/var/run/secrets/kubernetes.io/serviceaccount" in mounts) == (not switched)
