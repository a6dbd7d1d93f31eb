# ruff: noqa: INP001 - a script's part
"""kvbus in workloads with one label, as kustomize components: one for each preset, with the chart's sidecar.

The sidecar goes in by replacements and not by a patch. kustomize merges a patch's lists only into kinds that it knows;
it would replace the init containers of a LeaderWorkerSet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from ruamel.yaml import YAML

PRESETS: Final[dict[str, dict[str, Any]]] = {
    **{
        router: {"router": router}
        for router in ("generic", "dynamo", "llm-d", "aibrix", "mooncake", "sglang", "smg", "kthena", "vllm-router")
    },
    "interpose": {"router": "dynamo", "interpose": True},
}
"""Name of the component to values of ``kvbus``."""

_MODEL: Final = "metadata.annotations['kvbus/model']"
"""Where a pod that is not the chart's says what it serves: a model's name may have a slash, which no label may."""
_OF_THE_RELEASE: Final = ("app.kubernetes.io/", "model.aibrix.ai/name", "model.aibrix.ai/port")
"""Labels that the workload's own author gives: the model and its port are not the preset's."""

TARGETS: Final = (
    ("kind: Deployment", "enabled", "spec.template"),
    ("kind: StatefulSet", "enabled", "spec.template"),
    ("kind: LeaderWorkerSet", "enabled", "spec.leaderWorkerTemplate.leaderTemplate"),
    ("kind: LeaderWorkerSet", "workers", "spec.leaderWorkerTemplate.workerTemplate"),
    ("kind: StormService", "enabled", "spec.template.spec.roles.*.template"),
    ("kind: DynamoGraphDeployment", "enabled", "spec.components.[type=worker].podTemplate"),
)
"""Kind, value of the label ``kvbus``, and where the pod template is."""
_ENGINE: Final = ("group: ome.io, kind: InferenceService", "enabled", "spec.engine")
"""A pod's spec and its labels beside each other, without a template around them."""

_ABOUT: Final = """\
# kvbus for NAME in every workload with the label kvbus=enabled (a LeaderWorkerSet has it in its leaders, and with
# kvbus=workers in its workers). The engine publishes to tcp://127.0.0.1:15557 and serves replay at
# tcp://127.0.0.1:15657 (rank r at port + r). WHERE
"""
_WHERE: Final = "Routers find events at {0[kv-events]} and replay at {0[kv-replay]} of the pod."
_INTERPOSED: Final = "A program that derives its address from the engine's flag finds kvbus there, too."


_AND_THEN: Final = """\
# the template has served: in what is built of several kustomizations a second one of its name would be refused
transformers:
  - |
    apiVersion: builtin
    kind: PatchTransformer
    metadata: {name: without-the-template}
    patch: '{apiVersion: v1, kind: PodTemplate, metadata: {name: kvbus}, $patch: delete}'
"""


def components(render: Callable[[Mapping[str, Any]], str], dump: Callable[[Any], str]) -> dict[str, str]:
    """Path below ``component`` to text.

    Args:
        render: the chart's workload with these values of ``kvbus``.
        dump: an object as YAML.
    """
    files: dict[str, str] = {}
    for name, values in PRESETS.items():
        labels, pod = _sidecar(render({**values, "configFrom": "environment"}))
        (sidecar,) = pod["initContainers"]
        ports = {each["name"]: each["containerPort"] for each in sidecar["ports"]}
        where = _WHERE.format(ports) if "kv-events" in ports else _INTERPOSED
        about = _ABOUT.replace("NAME", name).replace("WHERE", where)
        files[f"{name}/kustomization.yaml"] = about + _component(labels)
        files[f"{name}/sidecar.yaml"] = dump(
            {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": "kvbus"},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            }
        )
    return files


def modelservice(render: Callable[[Mapping[str, Any]], str], dump: Callable[[Any], str]) -> str:
    """Values for llm-d-modelservice, which puts init containers, volumes and labels into its pods as they are."""
    labels, pod = _sidecar(render({**PRESETS["llm-d"], "configFrom": "environment"}))
    return dump({"modelArtifacts": {"labels": labels}, "decode": pod, "prefill": pod})


def _sidecar(workload: str) -> tuple[dict[str, str], dict[str, Any]]:
    """What the preset adds to a pod: labels, and of its spec the container and its volumes."""
    template = YAML(typ="safe", pure=True).load(workload)["spec"]["template"]
    labels, pod = template["metadata"]["labels"], template["spec"]
    (container,) = pod["initContainers"]
    model = {"name": "KVBUS_MODEL", "valueFrom": {"fieldRef": {"fieldPath": _MODEL}}}
    env = [model if each["name"] == "KVBUS_MODEL" else each for each in container["env"]]
    return {name: value for name, value in labels.items() if not name.startswith(_OF_THE_RELEASE)}, {
        "initContainers": [{**container, "env": env if model in env else [*env, model]}],
        "volumes": [volume for volume in pod["volumes"] if volume["name"].startswith("kvbus-")],
    }


def _component(labels: Iterable[str]) -> str:
    """A component whose replacements copy container, volume and labels into each target.

    A label is set twice. Into a field that it makes kustomize writes "true" without its quotes, which no label may be;
    where an object is, it puts the whole text. So an object comes first.
    """
    container, volume = "spec.initContainers.[name=kvbus]", "spec.volumes.[name=kvbus-state]"
    wanted = [_replacement(place, place, create=True) for place in (container, volume)]
    for label in labels:
        place = f"metadata.labels.{f'[{label}]' if '.' in label else label}"
        wanted += [_replacement(f"{volume}.emptyDir", place, create=True), _replacement(place, place, create=False)]
    head = "apiVersion: kustomize.config.k8s.io/v1alpha1\nkind: Component\nresources: [sidecar.yaml]\nreplacements:\n"
    return head + "".join(wanted) + _AND_THEN


def _replacement(source: str, path: str, *, create: bool) -> str:
    places = [(*each[:2], f"{each[2]}.{path}") for each in TARGETS]
    places.append((*_ENGINE[:2], f"{_ENGINE[2]}.{path.removeprefix('spec.').removeprefix('metadata.')}"))
    options = ", options: {create: true}" if create else ""
    targets = "".join(
        f"      - {{select: {{{kind}, labelSelector: kvbus={value}}}{options},\n         fieldPaths: ['{where}']}}\n"
        for kind, value, where in places
    )
    return f"  - source: {{kind: PodTemplate, name: kvbus, fieldPath: 'template.{source}'}}\n    targets:\n{targets}"
