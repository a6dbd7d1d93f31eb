"""Tests for the chart's objects besides the workload: service account, network, monitoring, keys, tests and
upgrades.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.chart.charts import CASES, CHART, ROOT, Values, containers, helm, load, render
from tests.chart.test_render import loaded_config

SELECTOR = {"app.kubernetes.io/name": "kvbus", "app.kubernetes.io/instance": "demo"}
AGGREGATOR: Values = {
    "mode": "deployment",
    "kvbus": {"config": {"sources": [{"endpoint": "tcp://a:5557", "replay_endpoint": "tcp://a:5558"}]}},
}


@pytest.mark.parametrize("case", CASES)
def test_selectors_use_only_labels_that_no_upgrade_changes(case: str) -> None:
    release = render(CASES[case])
    assert release.workload["spec"]["selector"]["matchLabels"] == SELECTOR
    assert SELECTOR.items() <= release.pod["metadata"]["labels"].items()
    assert release.one("Service")["spec"]["selector"] == SELECTOR
    for kind in ("PodMonitor", "PodDisruptionBudget"):
        for each in release.all(kind):
            assert each["spec"]["selector"]["matchLabels"] == SELECTOR
    for policy in release.all("NetworkPolicy"):
        assert policy["spec"]["podSelector"]["matchLabels"] == SELECTOR
    for pod in release.all("Pod"):
        assert not SELECTOR.items() <= pod["metadata"]["labels"].items(), "a test is no worker"


def test_a_new_chart_version_does_not_change_the_pod(tmp_path: Path) -> None:
    newer = tmp_path / "kvbus"
    shutil.copytree(CHART, newer)
    file = newer / "Chart.yaml"
    file.write_text(re.sub(r"^version: .+$", "version: 9.9.9", file.read_text(), flags=re.MULTILINE))
    before, after = render(), render(chart=newer)
    assert after.workload["metadata"]["labels"]["helm.sh/chart"] == "kvbus-9.9.9"
    assert after.pod == before.pod


def test_a_changed_configuration_changes_the_pod() -> None:
    for how in ("configMap", "environment"):
        before = render({"kvbus": {"configFrom": how}})
        after = render({"kvbus": {"configFrom": how, "config": {"on_lost": "keep"}}})
        assert before.pod == render({"kvbus": {"configFrom": how}}).pod
        assert before.pod != after.pod


def test_kvbus_is_a_native_sidecar_that_starts_first() -> None:
    spec = render().pod["spec"]
    assert [each["name"] for each in spec["initContainers"]] == ["kvbus"]
    assert spec["initContainers"][0]["restartPolicy"] == "Always"
    assert [each["name"] for each in spec["containers"]] == ["engine"]


@pytest.mark.parametrize(("mode", "kind"), [("deployment", "Deployment"), ("daemonset", "DaemonSet")])
def test_an_aggregator_pod_has_only_the_kvbus_container(mode: str, kind: str) -> None:
    release = render({**AGGREGATOR, "mode": mode})
    assert release.workload["kind"] == kind
    assert [each["name"] for each in release.pod["spec"]["containers"]] == ["kvbus"]
    assert "initContainers" not in release.pod["spec"]
    headless = release.one("Service")["spec"].get("clusterIP") == "None"
    assert headless == (mode == "daemonset")


def test_an_update_never_runs_two_aggregators_for_the_same_stream() -> None:
    assert render(AGGREGATOR).workload["spec"]["strategy"] == {"type": "Recreate"}
    assert render({**AGGREGATOR, "mode": "daemonset"}).workload["spec"]["updateStrategy"] == {"type": "RollingUpdate"}


@pytest.mark.parametrize("replicas", [2, None])
def test_an_update_replaces_one_of_several_aggregators_at_a_time(replicas: int | None) -> None:
    """An update replaces one aggregator after the other, so that one of them always serves routers.

    The update starts no additional aggregator, because routers would not know its address.
    """
    release = render({**AGGREGATOR, "replicas": replicas})
    assert release.workload["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
    }
    assert release.one("Service")["spec"]["clusterIP"] == "None", "a router has to meet the same pod again"


def test_the_service_account_has_no_token_and_can_be_left_out() -> None:
    release = render()
    assert release.one("ServiceAccount")["automountServiceAccountToken"] is False
    assert release.pod["spec"]["serviceAccountName"] == release.one("ServiceAccount")["metadata"]["name"]
    none = render({"serviceAccount": {"create": False}})
    assert none.all("ServiceAccount") == []
    assert none.pod["spec"]["serviceAccountName"] == "default"


def test_the_network_policy_opens_exactly_the_ports_of_the_configuration() -> None:
    release = render(CASES["everything"])
    events, http = release.one("NetworkPolicy")["spec"]["ingress"]
    assert [rule["port"] for rule in events["ports"]] == [5657, 5658]
    assert events["from"] == [{"podSelector": {"matchLabels": {"app": "indexer"}}}], "with CURVE there is no test"
    assert [rule["port"] for rule in http["ports"]] == [9477]


def test_the_network_policy_has_a_rule_for_connecting_engines() -> None:
    source = {"endpoint": "tcp://*:6000", "replay_endpoint": "tcp://engine:6001", "bind": True}
    values = {"mode": "deployment", "kvbus": {"config": {"sources": [source]}}, "networkPolicy": {"enabled": True}}
    ingress = render(values).one("NetworkPolicy")["spec"]["ingress"]
    assert [[rule["port"] for rule in each["ports"]] for each in ingress] == [[5657, 5658], [6000]]


@pytest.mark.parametrize("case", [case for case in CASES if case != "everything"])
def test_a_network_policy_without_monitoring_closes_the_http_port(case: str) -> None:
    values = {**CASES[case], "networkPolicy": {"enabled": True}}
    release = render(values)
    (http,) = (port["containerPort"] for port in release.kvbus["ports"] if port["name"] == "kvbus-http")
    ingress = release.one("NetworkPolicy")["spec"]["ingress"]
    assert ingress, "routers may come"
    assert all(rule["ports"] for rule in ingress), "a rule without ports opens every port"
    assert http not in {rule["port"] for each in ingress for rule in each["ports"]}
    assert f"lets nobody to port {http}: networkPolicy.monitoring is empty" in release.notes


def test_the_network_policy_opens_the_http_port_only_to_named_monitoring() -> None:
    prometheus = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    release = render({"networkPolicy": {"enabled": True, "monitoring": prometheus}})
    rules = release.one("NetworkPolicy")["spec"]["ingress"]
    (http,) = (each for each in rules if {"protocol": "TCP", "port": 9477} in each["ports"])
    assert http == {"from": prometheus, "ports": [{"protocol": "TCP", "port": 9477}]}
    assert "lets nobody" not in release.notes
    assert "lets nobody" not in render().notes


def test_values_with_routers_render_a_network_policy_with_open_http() -> None:
    router = {"podSelector": {"matchLabels": {"app": "indexer"}}}
    events, http = render({"networkPolicy": {"routers": [router]}}).one("NetworkPolicy")["spec"]["ingress"]
    assert events["from"] == [router, {"podSelector": {"matchLabels": {"kvbus/test": "demo"}}}]
    assert http == {"ports": [{"protocol": "TCP", "port": 9477}]}
    assert render({"networkPolicy": {"enabled": False, "routers": [router]}}).all("NetworkPolicy") == []


def test_prometheus_rules_equal_the_rule_files_with_the_changes_of_the_operator() -> None:
    def rules(**values: Any) -> dict[str, Any]:
        release = render({"monitoring": {"prometheusRule": {"enabled": True, **values}}})
        found = [rule for group in release.one("PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
        return {rule["alert"]: rule for rule in found if "alert" in rule}

    names = ("kvbus", "kvbus-fleet")
    files = [load((ROOT / "deploy" / "prometheus" / f"{name}.rules.yml").read_text()) for name in names]
    release = render({"monitoring": {"prometheusRule": {"enabled": True}}})
    assert release.one("PrometheusRule")["spec"]["groups"] == [group for each in files for group in each["groups"]]
    every = rules()
    assert rules(alerts={"KvbusNoRouter": False, "KvbusDown": True}).keys() == every.keys() - {"KvbusNoRouter"}
    assert not any("runbook_url" in rule["annotations"] for rule in every.values()), "there is no URL"
    there = rules(runbookUrl="https://example.com/runbooks")
    assert there["KvbusDown"]["annotations"]["runbook_url"] == "https://example.com/runbooks#kvbusdown"
    assert all(rule["annotations"]["runbook_url"].startswith("https://example.com/") for rule in there.values())
    for alerts, wrong in (
        ({"KvbusDwon": False}, "there is no alert KvbusDwon"),
        ({"KvbusDown": 0}, "alerts/KvbusDown"),
    ):
        with pytest.raises(helm.HelmError, match=wrong):
            rules(alerts=alerts)


def test_the_default_release_has_no_optional_object() -> None:
    kinds = {each["kind"] for each in render().objects}
    assert kinds == {"ConfigMap", "Service", "ServiceAccount", "Deployment", "Pod"}
    assert render(AGGREGATOR).all("Pod") == [], "a release for others has no test unless somebody wants it"
    assert len(render({**AGGREGATOR, "helmTest": {"enabled": True}}).all("Pod")) == 1


def test_the_pod_monitor_scrapes_the_http_port_of_kvbus() -> None:
    wanted = {"enabled": True, "labels": {"release": "p"}, "endpoint": {"interval": "5s"}}
    release = render({"monitoring": {"podMonitor": wanted}})
    monitor = release.one("PodMonitor")
    assert monitor["spec"]["podMetricsEndpoints"] == [{"port": "kvbus-http", "path": "/metrics", "interval": "5s"}]
    assert monitor["metadata"]["labels"]["release"] == "p"
    assert "kvbus-http" in {port["name"] for port in release.kvbus["ports"]}


def test_the_dashboards_of_the_chart_equal_the_dashboards_of_the_repository() -> None:
    release = render({"monitoring": {"dashboard": {"enabled": True}}})
    (found,) = (each for each in release.all("ConfigMap") if "kvbus.json" in each["data"])
    files = {file.name: json.loads(file.read_text()) for file in (ROOT / "deploy/grafana").glob("*.json")}
    assert {name: json.loads(text) for name, text in found["data"].items()} == files
    assert len(files) == 3
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_curve_keys_are_mounted_files_that_kvbus_may_read() -> None:
    release = render({"kvbus": {"curve": {"existingSecret": "keys"}}})
    assert release.all("Secret") == []
    assert {"name": "kvbus-curve", "secret": {"secretName": "keys", "defaultMode": 0o440}} in release.pod["spec"][
        "volumes"
    ]
    assert release.pod["spec"]["securityContext"]["fsGroup"] == release.kvbus["securityContext"]["runAsGroup"]
    mount = next(each["mountPath"] for each in release.kvbus["volumeMounts"] if each["name"] == "kvbus-curve")
    (output,) = load(str(release.file()))["outputs"]
    assert output["curve_secret_key_file"] == f"{mount}/kvbus.key_secret"
    assert output["curve_client_keys"] == f"{mount}/routers.keys"


def test_platform_user_leaves_all_user_ids_out() -> None:
    release = render({"kvbus": {"platformUser": True}})
    contexts = [each["securityContext"] for spec in release.pods() for each in (spec, *containers(spec))]
    assert len(contexts) >= 5
    assert not any(context.keys() & {"runAsUser", "runAsGroup", "fsGroup"} for context in contexts)
    assert all("seccompProfile" in spec["securityContext"] for spec in release.pods())


def test_a_volume_claim_keeps_the_state_of_an_aggregator() -> None:
    volumes = render(CASES["deployment"]).pod["spec"]["volumes"]
    assert {"name": "kvbus-state", "persistentVolumeClaim": {"claimName": "kvbus-state"}} in volumes
    default: list[Any] = render().pod["spec"]["volumes"]
    assert {"name": "kvbus-state", "emptyDir": {"sizeLimit": "4Gi"}} in default


def test_the_helm_test_connects_to_the_service_of_routers() -> None:
    release = render({**CASES["deployment"], "helmTest": {"enabled": True}})
    (test,) = release.all("Pod")
    service = release.one("Service")
    assert (
        test["spec"]["containers"][0]["args"][1] == f"--replay-endpoint=tcp://{service['metadata']['name']}.ns.svc:5757"
    )
    assert 5757 in {port["port"] for port in service["spec"]["ports"]}
    annotations = test["metadata"]["annotations"]
    assert annotations == {"helm.sh/hook": "test", "helm.sh/hook-delete-policy": "before-hook-creation"}


def test_discovery_in_kubernetes_gets_only_the_right_to_list_and_watch_pods() -> None:
    release = render(CASES["discovery"])
    roles = {each["metadata"].get("namespace"): each["rules"] for each in release.all("Role")}
    verbs = ["list", "watch"]
    assert roles == {
        None: [{"apiGroups": [""], "resources": ["pods"], "verbs": verbs}],
        "elsewhere": [{"apiGroups": [""], "resources": ["pods"], "verbs": verbs}],
    }
    bindings = release.all("RoleBinding")
    assert [each["metadata"].get("namespace") for each in bindings] == list(roles)
    account = release.pod["spec"]["serviceAccountName"]
    for each in bindings:
        assert each["roleRef"]["name"] in {role["metadata"]["name"] for role in release.all("Role")}
        assert [subject["name"] for subject in each["subjects"]] == [account]


def test_discovery_by_dns_gets_no_kubernetes_rights() -> None:
    sources = [{"name": "workers", "discover": {"dns": {"name": "engines", "port": 5557}}}]
    release = render({"mode": "deployment", "kvbus": {"config": {"sources": sources}}})
    assert not release.all("Role")
    assert release.pod["spec"]["automountServiceAccountToken"] is False
    (output,) = load(release.file() or "")["outputs"]
    assert output["layout"] == "merged"


@pytest.mark.parametrize("where", ["the guide", "the notes of a simulation"])
def test_the_documented_helm_command_for_real_engines_works(where: str, tmp_path: Path) -> None:
    """The documented `helm install` command has quotes around values with brackets, because zsh reads brackets as a
    pattern.
    """
    text = render().notes if where != "the guide" else (ROOT / "docs" / "KUBERNETES.md").read_text()
    (command,) = re.findall(r"helm install bus ./helm/kvbus (--set mode(?:.*\\\n)*.*)", text)
    assert re.findall(r"--set [^'\s]*\[", command) == []
    sets = [word for word in shlex.split(command.replace("\\\n", " ")) if word != "--set"]
    release = render(helm.parse_set_string(",".join(sets)))
    (source,) = loaded_config(release, tmp_path).sources
    assert source.discover is not None
    settings = source.discover["kubernetes"]
    assert (settings["selector"], settings["port"], settings["replay_port"]) == ("app=ENGINE", "5557", "5558")
    assert release.notes.startswith("kvbus relays the streams of the engines that it discovers.")
    assert [each["rules"][0]["verbs"] for each in release.all("Role")] == [["list", "watch"]]
