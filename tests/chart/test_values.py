"""Tests that the chart refuses wrong values.

An error of the schema names the key. An error of a template says what to change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from kvbus.config.limits import Limits
from kvbus.config.models import Config
from kvbus.config.outputs import OutputConfig
from kvbus.config.sources import SourceConfig
from tests.chart.charts import CHART, LIBRARY, Values, helm, load, render


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"mode": "sidecar"}, "/mode"),
        ({"replicas": -1}, "/replicas"),
        ({"replicas": "3"}, "/replicas"),
        ({"repliacs": 2}, "repliacs"),
        ({"kvbus": {"prots": {}}}, "prots"),
        ({"kvbus": {"router": "trtllm"}}, "/router"),
        ({"kvbus": {"ports": {"events": 70000}}}, "/ports/events"),
        ({"kvbus": {"ports": {"http": None}}}, "http"),
        ({"kvbus": {"dataParallelSize": 0}}, "/dataParallelSize"),
        ({"kvbus": {"state": {"sizeLimit": "lots"}}}, "/state/sizeLimit"),
        ({"kvbus": {"image": {"digest": "sha256:1"}}}, "/image/digest"),
        ({"kvbus": {"config": {"on_lots": "keep"}}}, "on_lots"),
        ({"kvbus": {"config": {"on_lost": "kepe"}}}, "/config/on_lost"),
        ({"kvbus": {"config": {"limits": {"max_frames": 2}}}}, "/config/limits/max_frames"),
        ({"kvbus": {"config": {"block_size": 0}}}, "/config/block_size"),
        ({"kvbus": {"config": {"sources": [{"endpiont": "tcp://a:1"}]}}}, "endpiont"),
        ({"kvbus": {"config": {"outputs": [{"profile": "vlm"}]}}}, "/config/outputs/0/profile"),
        ({"kvbus": {"securityContext": {"runAsRoot": True}}}, "runAsRoot"),
        ({"service": {"type": "ExternalName"}}, "/service/type"),
        ({"monitoring": {"prometheusRule": {"alerts": {"KvbusDown": 0}}}}, "/alerts/KvbusDown"),
        ({"monitoring": {"prometheusRule": {"runbookUrl": "docs"}}}, "/runbookUrl"),
        ({"kvbus": {"resources": {"limit": {}}}}, "limit"),
        ({"networkPolicy": {"routers": [{}]}}, "/networkPolicy/routers/0"),
        ({"podLabels": {"a": 1}}, "/podLabels/a"),
        ({"tolerations": [{"keys": "x"}]}, "keys"),
    ],
)
def test_the_values_schema_names_the_wrong_key(values: Values, named: str) -> None:
    with pytest.raises(helm.HelmError, match=named):
        render(values)


SOURCE = {"endpoint": "tcp://a:5557", "replay_endpoint": "tcp://a:5558"}
FRONT = {"listen": "0.0.0.0:8000", "engine": "http://127.0.0.1:8001"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kvbus": {"ports": {"events": 15557}}}, "both need port 15557"),
        ({"kvbus": {"ports": {"events": 9477}}}, "kvbus.ports.http and kvbus.ports.events both need port 9477"),
        ({"kvbus": {"ports": {"http": 8000}}}, "kvbus.servingPort and kvbus.ports.http both need port 8000"),
        ({"kvbus": {"dataParallelSize": 2, "ports": {"replay": 5658}}}, "both need port 5658"),
        ({"kvbus": {"engineEvents": {"replayPort": 15558}, "dataParallelSize": 2}}, "both need port 15558"),
        ({"kvbus": {"ports": {"events": 65535}, "dataParallelSize": 2}}, "65536 is no port"),
        ({"kvbus": {"config": {"http": "0.0.0.0:1"}}}, "kvbus.config.http: set kvbus.ports.http"),
        ({"kvbus": {"config": {"state_dir": "/x"}}}, "kvbus.config.state_dir: set kvbus.state"),
        ({"kvbus": {"config": {"model": "m"}}}, "kvbus.config.model: set kvbus.model"),
        (
            {"mode": "deployment", "kvbus": {"dataParallelSize": 2, "config": {"sources": [SOURCE]}}},
            "set data_parallel_size in the source",
        ),
        ({"kvbus": {"ports": {"events": 1}, "config": {"outputs": [{}]}}}, "set the endpoint in the output"),
        ({"kvbus": {"router": "aibrix", "model": "m", "ports": {"events": 5657}}}, "5557 and 5558 only"),
        ({"kvbus": {"router": "aibrix", "model": "a/b"}}, "cannot be one"),
        ({"kvbus": {"config": {"interpose": {}}}}, "set kvbus.interpose"),
        ({"kvbus": {"interpose": True, "config": {"outputs": [{}]}}}, "set interpose in the output"),
        ({"kvbus": {"interpose": True, "ports": {"events": 1}}}, "routers dial kvbus.engineEvents.port"),
        ({"kvbus": {"interpose": True, "router": "llm-d"}}, "needs the ports of its own"),
        ({"kvbus": {"interpose": True, "curve": {"existingSecret": "s"}}}, "there is no CURVE"),
        ({"kvbus": {"env": [{"name": "KVBUS_HTTP", "value": "x"}]}}, "set it in kvbus.config"),
        ({"kvbus": {"config": {"worker": "$(POD)"}}}, r"nothing fills in \$\(POD\)"),
        ({"kvbus": {"state": {"enabled": False, "existingClaim": "c"}}}, "no effect"),
        ({"kvbus": {"state": {"existingClaim": "c"}}, "replicas": 2}, "a state belongs to one kvbus"),
        ({"kvbus": {"state": {"existingClaim": "c"}}, "replicas": None}, "a state belongs to one kvbus"),
        ({"kvbus": {"config": {"sources": [SOURCE]}}}, "set mode=deployment to relay these engines"),
        ({"kvbus": {"router": "vllm-router", "config": {"front": FRONT}}}, "front has no effect"),
        ({"mode": "deployment"}, "mode=deployment needs kvbus.config.sources"),
        ({"mode": "daemonset"}, "mode=daemonset needs kvbus.config.sources"),
        ({"mode": "deployment", "kvbus": {"router": "llm-d", "config": {"sources": [SOURCE]}}}, "as a sidecar"),
        (
            {"mode": "daemonset", "podDisruptionBudget": {"enabled": True}, "kvbus": {"config": {"sources": [SOURCE]}}},
            "no effect with mode=daemonset",
        ),
        ({"service": {"type": "LoadBalancer"}, "replicas": 2}, "several pods behind one address"),
        ({"service": {"type": "LoadBalancer"}, "replicas": None}, "several pods behind one address"),
        ({"podLabels": {"app.kubernetes.io/name": "x"}}, "how the chart finds its pods"),
        ({"kvbus-lib": {"router": "dynamo"}}, "found under kvbus"),
    ],
)
def test_the_error_for_contradictory_values_names_the_change_to_make(values: Values, said: str) -> None:
    with pytest.raises(helm.HelmError, match=said):
        render(values)


@pytest.mark.parametrize("chart", [LIBRARY, CHART], ids=lambda path: path.name)
def test_every_object_of_the_values_schema_refuses_unknown_keys(chart: Path) -> None:
    """The values schema refuses unknown keys in every object, except in maps whose keys the operator chooses.

    Such maps, for example labels and quantities, define the type of their values. `global` may have any keys, because
    other charts use it.
    """
    schema = json.loads((chart / "values.schema.json").read_text())
    open_ones = {where for where, node in objects(schema, "") if node.get("additionalProperties", True) is True}
    free = {"/global"} if chart == LIBRARY else {"/global", "/kvbus/global", "/kvbus-lib"}
    # The Kubernetes API validates affinities and types of volumes. A copy of its schema in this chart would become outdated.
    free |= {f"/affinity/{kind}" for kind in ("nodeAffinity", "podAffinity", "podAntiAffinity")}
    free |= {"#volume/*", "#kvbus.volume/*"}
    free |= {"/monitoring/podMonitor/endpoint"}
    assert open_ones <= free


def objects(node: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, list):
        for each in node:
            yield from objects(each, where)
    if not isinstance(node, dict):
        return
    if node.get("type") == "object" or "properties" in node:
        yield where, node
    for name, each in node.get("properties", {}).items():
        yield from objects(each, f"{where}/{name}")
    for name, each in node.get("definitions", {}).items():
        yield from objects(each, f"#{name}")
    for key in ("items", "anyOf", "additionalProperties"):
        yield from objects(node.get(key), f"{where}/*")


def test_the_values_schema_has_every_key_of_the_kvbus_configuration() -> None:
    definitions = json.loads((LIBRARY / "values.schema.json").read_text())["definitions"]
    models: dict[str, type[BaseModel]] = {
        "config": Config,
        "configSourceConfig": SourceConfig,
        "configOutputConfig": OutputConfig,
        "configLimits": Limits,
    }
    for name, model in models.items():
        assert definitions[name]["properties"].keys() == model.model_fields.keys()
        assert definitions[name]["additionalProperties"] is False


def test_values_yaml_is_short_enough_to_read_completely() -> None:
    text = (CHART / "values.yaml").read_text()
    assert len(text.splitlines()) <= 200
    assert leaves(load(text)) <= 70


def leaves(node: Any) -> int:
    return sum(map(leaves, node.values())) if isinstance(node, dict) and node else 1
