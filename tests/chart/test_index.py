"""Tests for the chart's option to run a kvbus index beside an aggregator.

They check its container, its port, and the values that exclude an index.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvbus.cli.index import command
from tests.chart.charts import CASES, Values, container, helm, render

INDEX: Values = CASES["index"]


def test_the_index_follows_the_kvbus_of_its_pod_with_its_token_file() -> None:
    release = render(INDEX)
    index, kvbus = container(release.pod, "index"), release.kvbus
    assert index["image"] == kvbus["image"]
    assert index["securityContext"] == kvbus["securityContext"]
    name, *args = index["args"]
    params = command.make_context(name, args).params
    assert (name, params["sources"]) == ("index", ("http://127.0.0.1:9477",))
    assert params["listen"] == "0.0.0.0:9478"
    (mount,) = index["volumeMounts"]
    assert str(params["tokens_file"]) == f"{mount['mountPath']}/tokens"
    (volume,) = (each for each in release.pod["spec"]["volumes"] if each["name"] == mount["name"])
    assert volume["secret"]["secretName"] == "kvbus-tokens"
    for probe, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        assert index[probe]["httpGet"] == {"path": path, "port": "kvbus-index"}


def test_the_service_has_the_index_port_and_only_routers_reach_it() -> None:
    values = {**INDEX, "index": {"enabled": True, "port": 9999}, "networkPolicy": {"enabled": True}}
    release = render(values)
    ports = {each["name"]: each["port"] for each in release.one("Service")["spec"]["ports"]}
    assert ports["kvbus-index"] == 9999
    rule = release.one("NetworkPolicy")["spec"]["ingress"][0]
    assert {"protocol": "TCP", "port": 9999} in rule["ports"]
    assert container(release.pod, "index")["ports"] == [{"name": "kvbus-index", "containerPort": 9999}]
    assert "port-forward deploy/demo 9999" in release.notes


def test_a_release_without_the_index_has_no_container_or_port_of_it() -> None:
    release = render({**INDEX, "index": {"enabled": False}})
    assert [each["name"] for each in release.pod["spec"]["containers"]] == ["kvbus"]
    assert "index" not in release.notes
    assert {each["name"] for each in release.one("Service")["spec"]["ports"]}.isdisjoint({"kvbus-index"})


SOURCES = {"config": {"sources": [{"name": "a", "endpoint": "tcp://a:5557", "replay_endpoint": "tcp://a:5558"}]}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "set mode to deployment or daemonset"),
    ({"mode": "deployment", "kvbus": {**SOURCES, "http": {"tlsSecret": "t"}}}, "which no certificate"),
    ({"mode": "deployment", "kvbus": {**SOURCES, "curve": {"existingSecret": "c"}}}, "has no key of its own"),
    ({"mode": "deployment", "kvbus": SOURCES, "index": {"port": 9477}}, "both need port 9477"),
]


@pytest.mark.parametrize(("values", "why"), REFUSED)
def test_values_that_contradict_the_index_are_refused(values: Values, why: str) -> None:
    with pytest.raises(helm.HelmError, match=why):
        render({**values, "index": {"enabled": True, **values.get("index", {})}})
