"""Tests that the chart's service accounts have the documented rights and no others, as the API server answers."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from typing import Final

import pytest

from tests.chart.charts import CASES, ROOT, render
from tests.cluster.api import Api, Object, RefusedError, placed
from tests.cluster.control_plane import PATIENCE
from tests.cluster.test_manifests import documents

AGGREGATOR: Final = ROOT / "deploy" / "kubernetes" / "aggregator.yaml"
RULES = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
SEES = ("list", "watch")


def rules(api: Api, namespace: str) -> set[tuple[str, str, str]]:
    """Return the rights in a namespace of the user as whom ``api`` sends requests.

    A right is a tuple: verb, API group and resource; or verb, an empty text and a URL path.
    """
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    status = api.post(RULES, review)["status"]
    assert not status["incomplete"]
    found = {
        (verb, group, resource)
        for each in status["resourceRules"]
        for verb in each["verbs"]
        for group in each["apiGroups"]
        for resource in each["resources"]
    }
    return found | {
        (verb, "", path)
        for each in status["nonResourceRules"]
        for verb in each["verbs"]
        for path in each["nonResourceURLs"]
    }


@pytest.fixture
def watched_namespace(api: Api, elsewhere: str) -> str:
    """A namespace with the service account and the roles of the chart's preset that discovers engines."""
    namespace = api.namespace()
    release = render(CASES["discovery"], namespace=namespace)
    for kind in ("ServiceAccount", "Role", "RoleBinding"):
        for each in release.all(kind):
            api.apply(placed(each, namespace))
    return namespace


@pytest.fixture
def account(api: Api, watched_namespace: str) -> Api:
    (made,) = render(CASES["discovery"]).all("ServiceAccount")
    return api.as_user(api.token_of(watched_namespace, made["metadata"]["name"]))


def test_a_discovering_service_account_may_only_see_pods_in_the_watched_namespaces(
    api: Api, account: Api, watched_namespace: str, elsewhere: str
) -> None:
    other = api.namespace()
    anybody = api.as_user(api.token_of(other, "default"))
    for namespace, more in (
        (watched_namespace, {(verb, "", "pods") for verb in SEES}),
        (elsewhere, {(verb, "", "pods") for verb in SEES}),
        (other, set()),
        ("kube-system", set()),
    ):
        assert rules(account, namespace) - rules(anybody, namespace) == more, namespace


@pytest.mark.parametrize(
    ("where", "what", "may"),
    [
        ("place", "/api/v1/namespaces/{}/pods", True),
        ("elsewhere", "/api/v1/namespaces/{}/pods", True),
        ("place", "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices", False),
        ("place", "/api/v1/namespaces/{}/secrets", False),
        ("place", "/api/v1/namespaces/{}/configmaps", False),
        ("place", "/api/v1/pods", False),
        ("place", "/api/v1/namespaces", False),
        ("place", "/api/v1/nodes", False),
    ],
)
def test_the_service_account_may_list_and_watch_only_the_permitted_resources(
    where: str, what: str, may: bool, account: Api, watched_namespace: str, elsewhere: str
) -> None:
    path = what.format(watched_namespace if where == "place" else elsewhere)
    for query in ("?limit=1", "?watch=true&timeoutSeconds=1"):
        if may:
            account.get(path + query)
        else:
            with pytest.raises(RefusedError, match="forbidden") as refused:
                account.get(path + query)
            assert refused.value.status == 403


def test_the_service_account_may_not_change_any_pod(account: Api, watched_namespace: str) -> None:
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "a", "namespace": watched_namespace},
        "spec": {},
    }
    path = f"/api/v1/namespaces/{watched_namespace}/pods"
    for method, at in (("POST", path), ("DELETE", f"{path}/a"), ("DELETE", path), ("PUT", f"{path}/a")):
        with pytest.raises(RefusedError, match="forbidden"):
            account.ask(method, at, pod)


# -- the manifest, which is for one namespace


@pytest.fixture
def in_default(api: Api) -> Iterator[None]:
    """The unchanged manifest of the aggregator, applied in the namespace `default`, for which it is written."""
    made = [placed(each, "default") for each in documents(AGGREGATOR.read_text())]
    for each in made:
        api.apply(each)
    yield
    for each in made:
        api.delete(each)


def as_aggregator(api: Api, namespace: str) -> Api:
    return api.as_user(api.token_of(namespace, "bus"))


def discovers(user: Api, namespace: str) -> bool:
    try:
        user.get(f"/api/v1/namespaces/{namespace}/pods?limit=1")
    except RefusedError as refused:
        if refused.status != 403:
            raise
        return False
    return True


def discovers_soon(user: Api, namespace: str) -> None:
    """Wait until the user may list engines: a role binding reaches the server's caches with a delay."""
    until = time.monotonic() + PATIENCE
    while not discovers(user, namespace):
        assert time.monotonic() < until, namespace
        time.sleep(0.05)


@pytest.mark.usefixtures("in_default")
def test_the_aggregator_discovers_in_another_namespace_after_its_documented_command(api: Api) -> None:
    discovers_soon(as_aggregator(api, "default"), "default")
    text = AGGREGATOR.read_text()
    unchanged, moved = api.namespace(), api.namespace()
    for each in documents(text):
        api.apply(placed(each, unchanged))
    discovers_soon(as_aggregator(api, "default"), unchanged)
    assert not discovers(as_aggregator(api, unchanged), unchanged)
    (command,) = re.findall(r"^# +(sed .*) \| kubectl apply -n NAMESPACE -f -$", text, re.MULTILINE)
    shell = ["sh", "-ec", command.replace("NAMESPACE", moved)]
    made = subprocess.run(shell, cwd=AGGREGATOR.parent, capture_output=True, text=True, check=True).stdout
    for each in documents(made):
        api.apply(placed(each, moved))
    discovers_soon(as_aggregator(api, moved), moved)
    assert not discovers(as_aggregator(api, "default"), moved)
