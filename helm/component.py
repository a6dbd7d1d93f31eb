# ruff: noqa: INP001 - a script's part
"""Generate kustomize components that add kvbus to every workload with a label. Each chart preset has a component.

The component adds the chart's sidecar by replacements and not by a patch. kustomize merges the lists of a patch only in
kinds that it knows. In a LeaderWorkerSet, a patch would replace the init containers.
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
"""The values of ``kvbus`` in the chart for each component, by the component's name."""

_MODEL: Final = "metadata.annotations['kvbus/model']"
"""Annotation in which a pod outside the chart names its model.

It is not a label, because a label's value cannot have a slash, as names of models often do.
"""
_OF_THE_RELEASE: Final = ("app.kubernetes.io/", "model.aibrix.ai/name", "model.aibrix.ai/port")
"""Prefixes of labels that a component does not set.

The workload's author sets those that name the model and its port.
"""

TARGETS: Final = (
    ("kind: Deployment", "enabled", "spec.template"),
    ("kind: StatefulSet", "enabled", "spec.template"),
    ("kind: LeaderWorkerSet", "enabled", "spec.leaderWorkerTemplate.leaderTemplate"),
    ("kind: LeaderWorkerSet", "workers", "spec.leaderWorkerTemplate.workerTemplate"),
    ("kind: StormService", "enabled", "spec.template.spec.roles.*.template"),
    ("kind: DynamoGraphDeployment", "enabled", "spec.components.[type=worker].podTemplate"),
)
"""The targets of a component: kind, value of the label ``kvbus``, and path of the pod template in the object."""
_ENGINE: Final = ("group: ome.io, kind: InferenceService", "enabled", "spec.engine")
"""A target, as in ``TARGETS``, in which a pod's spec and its labels are side by side, without a template."""

_ABOUT: Final = """\
# Adds kvbus for NAME to every workload with the label kvbus=enabled. A LeaderWorkerSet with this label gets kvbus in
# its leaders, and one with kvbus=workers in its workers. The engine must publish to tcp://127.0.0.1:15557 and serve
# replay at tcp://127.0.0.1:15657 (rank r at port + r). WHERE
"""
_WHERE: Final = "Routers find events at {0[kv-events]} and replay at {0[kv-replay]} of the pod."
_INTERPOSED: Final = "A program that derives its address from the engine's flag finds kvbus there, too."


_AND_THEN: Final = """\
# Delete the PodTemplate, because the replacements above have copied its parts. If it stayed, kustomize would refuse a
# build with several of these components, whose templates have the same name.
transformers:
  - |
    apiVersion: builtin
    kind: PatchTransformer
    metadata: {name: without-the-template}
    patch: '{apiVersion: v1, kind: PodTemplate, metadata: {name: kvbus}, $patch: delete}'
"""


def components(render: Callable[[Mapping[str, Any]], str], dump: Callable[[Any], str]) -> dict[str, str]:
    """Return the texts of all components' files, by their path in the folder ``component``.

    Args:
        render: renders the chart's workload with these values of ``kvbus``.
        dump: returns an object as YAML.
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
    """Return values for llm-d-modelservice, which copies init containers, volumes and labels into its pods."""
    labels, pod = _sidecar(render({**PRESETS["llm-d"], "configFrom": "environment"}))
    return dump({"modelArtifacts": {"labels": labels}, "decode": pod, "prefill": pod})


def _sidecar(workload: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the labels that a preset adds to a pod, and the container and volumes that it adds to the pod's spec."""
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
    """Return a component whose replacements copy the container, the volume and the labels into each target.

    Each label is set twice. If kustomize creates the field of a label itself, it writes "true" without quotes, which
    Kubernetes does not accept as a label. If an object is in its place, kustomize writes the complete text. Therefore
    the first replacement writes an object.
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
