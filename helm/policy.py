# ruff: noqa: INP001 - a script's part
"""Generate a MutatingAdmissionPolicy that adds kvbus to every pod with a label.

It contains the chart's sidecar and presets, written in the expression language CEL.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from textwrap import indent
from typing import Any, Final

from ruamel.yaml import YAML

ROUTERS: Final = ("generic", "dynamo", "llm-d", "aibrix", "mooncake", "sglang", "smg", "kthena", "vllm-router")
_CONTAINER: Final = "spec.initContainers"
_MAPS: Final = ("limits", "requests")

_ABOUT: Final = """\
# Adds kvbus to every pod with the label kvbus/inject=true, whatever created the pod. It needs Kubernetes 1.36, but no
# webhook and no certificates. In Kubernetes 1.34 and 1.35, write v1beta1 in both objects, and enable the API server's
# feature gate MutatingAdmissionPolicy and the API admissionregistration.k8s.io/v1beta1. The policy does not
# configure the engine: set the engine's endpoints so that it publishes to kvbus.
#
#   sed 's|kvbus:0.1.0|REGISTRY/kvbus:0.1.0|' policy.yaml | kubectl apply -f -
#
# Annotations of the pod: kvbus/model, kvbus/ranks, kvbus/events-port, kvbus/replay-port, kvbus/topic,
# kvbus/serving-port and kvbus/router, a preset of the chart: ROUTERS.
# A pod with another kvbus/router is refused.
"""

_VARIABLES: Final = {
    "annotations": "object.metadata.?annotations.orValue({})",
    "router": 'variables.annotations[?"kvbus/router"].orValue("generic")',
    "preset": "PRESETS[variables.router]",
    "model": 'variables.annotations[?"kvbus/model"].orValue("")',
    "ranks": 'variables.annotations[?"kvbus/ranks"].orValue("1")',
    "serving": 'variables.annotations[?"kvbus/serving-port"].orValue("8000")',
    "events": 'variables.annotations[?"kvbus/events-port"].orValue(variables.preset[1])',
    "replay": (
        'variables.annotations[?"kvbus/replay-port"].orValue(string(int(variables.events) + '
        '(variables.preset[2] == "merged" || variables.ranks == "1" ? 1 : 100)))'
    ),
    "topic": 'variables.annotations[?"kvbus/topic"].orValue(variables.preset[3])',
}


class Cel(str):
    """A CEL expression that stands for a value."""

    __slots__ = ()


def written(value: Any, path: str) -> str:
    """Return a value as CEL. The type name of an object depends on its path in the pod."""
    if isinstance(value, Cel):
        return value
    if isinstance(value, list):
        return "[" + ", ".join(written(each, path) for each in value) + "]"
    if isinstance(value, dict):
        if path.rpartition(".")[2] in _MAPS:
            return json.dumps(value)
        fields = ", ".join(f"{key}: {written(each, f'{path}.{key}')}" for key, each in value.items())
        return f"Object.{path}{{{fields}}}"
    return json.dumps(value)


def policy(render: Callable[[Mapping[str, Any]], str]) -> str:
    """Return the policy and its binding as YAML.

    Args:
        render: renders the chart's workload with these values of ``kvbus``.
    """
    presets = {router: _preset(render, router) for router in ROUTERS}
    table = "{" + ",\n ".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in presets.items()) + "}"
    variables = {**_VARIABLES, "preset": f"{table}[variables.router]"}
    listed = "".join(
        f"    - name: {name}\n      expression: |-\n{indent(text, ' ' * 8)}\n" for name, text in variables.items()
    )
    return f"""{_ABOUT.replace("ROUTERS", ", ".join(ROUTERS))}\
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicy
metadata:
  name: kvbus-inject
spec:
  matchConstraints:
    resourceRules:
      - {{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}}
    objectSelector: {{matchLabels: {{kvbus/inject: "true"}}}}
  matchConditions:
    - name: not-yet-there
      expression: "!object.spec.?initContainers.orValue([]).exists(c, c.name == 'kvbus')"
  failurePolicy: Fail
  reinvocationPolicy: IfNeeded
  variables:
{listed}  mutations:
    - patchType: JSONPatch
      jsonPatch:
        expression: |-
{indent(_patch(render), " " * 10)}
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicyBinding
metadata:
  name: kvbus-inject
spec:
  policyName: kvbus-inject
"""


def _pod(render: Callable[[Mapping[str, Any]], str], router: str) -> dict[str, Any]:
    text = render({"router": router, "model": "model", "configFrom": "environment"})
    pod: dict[str, Any] = YAML(typ="safe", pure=True).load(text)["spec"]["template"]["spec"]
    return pod


def _sidecar(render: Callable[[Mapping[str, Any]], str], router: str) -> dict[str, Any]:
    (container,) = _pod(render, router)["initContainers"]
    return dict(container)


def _preset(render: Callable[[Mapping[str, Any]], str], router: str) -> list[str]:
    """Return a router's preset: the outputs with placeholders, the port of the events, the layout, and the topic.

    An empty topic means the engine's own topic.
    """
    container = _sidecar(render, router)
    outputs = next(each["value"] for each in container["env"] if each["name"] == "KVBUS_OUTPUTS")
    (output,) = json.loads(outputs)
    events = output["endpoint"].rpartition(":")[2]
    topic = output.get("topic", "")
    output |= {"endpoint": "tcp://*:@EVENTS@", "replay_endpoint": "tcp://*:@REPLAY@", "topic": "@TOPIC@"}
    return [json.dumps([output]).replace('"@TOPIC@"', "@TOPIC@"), events, output["layout"], topic]


def _patch(render: Callable[[Mapping[str, Any]], str]) -> str:
    container = _sidecar(render, "generic")
    given = {each["name"]: each["value"] for each in container["env"]}
    sources = json.dumps(given["KVBUS_SOURCES"].replace('"data_parallel_size":1', '"data_parallel_size":@RANKS@'))
    values: dict[str, str] = {
        "KVBUS_HTTP": given["KVBUS_HTTP"],
        "KVBUS_STATE_DIR": given["KVBUS_STATE_DIR"],
        "KVBUS_SOURCES": Cel(f'{sources}.replace("@RANKS@", variables.ranks)'),
        "KVBUS_OUTPUTS": Cel(
            'variables.preset[0].replace("@EVENTS@", variables.events).replace("@REPLAY@", variables.replay)'
            '.replace("@TOPIC@", variables.topic == "" ? "null" : "\\"" + variables.topic + "\\"")'
        ),
        "KVBUS_WORKER": Cel('"$(POD_IP):" + variables.serving'),
    }
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    env = written([address, *({"name": name, "value": value} for name, value in values.items())], f"{_CONTAINER}.env")
    model = written([{"name": "KVBUS_MODEL", "value": Cel("variables.model")}], f"{_CONTAINER}.env")
    container["env"] = Cel(f'{env} + (variables.model == "" ? [] : {model})')
    http, *ports = container["ports"]
    numbers = {"kv-events": Cel("int(variables.events)"), "kv-replay": Cel("int(variables.replay)")}
    container["ports"] = [http, *({**port, "containerPort": numbers[port["name"]]} for port in ports)]
    volume = next(each for each in _pod(render, "generic")["volumes"] if each["name"] == "kvbus-state")
    fields = ",\n    ".join(f"{key}: {written(value, f'{_CONTAINER}.{key}')}" for key, value in container.items())
    labels = {
        "kvbus/sidecar": ('"true"', "true"),
        "llm-d.ai/inference-serving": ('"true"', 'variables.router == "llm-d"'),
        "model.aibrix.ai/kv-events-enabled": ('"true"', 'variables.router == "aibrix"'),
        "model.aibrix.ai/name": ("variables.model", 'variables.router == "aibrix"'),
        "model.aibrix.ai/port": ("variables.serving", 'variables.router == "aibrix"'),
    }
    return "\n".join(
        [
            *(
                f'(has(object.spec.{name}) ? [] : [JSONPatch{{op: "add", path: "/spec/{name}", value: []}}]) +'
                for name in ("initContainers", "volumes")
            ),
            f'[JSONPatch{{op: "add", path: "/spec/initContainers/0", value: Object.{_CONTAINER}{{\n    {fields}}}}},',
            f' JSONPatch{{op: "add", path: "/spec/volumes/-", value: {written(volume, "spec.volumes")}}}]',
            *(
                f'+ ({when} && !({json.dumps(name)} in object.metadata.labels) ? [JSONPatch{{op: "add", '
                f'path: "/metadata/labels/{name.replace("/", "~1")}", value: {value}}}] : [])'
                for name, (value, when) in labels.items()
            ),
        ]
    )
