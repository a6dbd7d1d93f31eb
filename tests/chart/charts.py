"""Render kvbus's Helm chart as Helm does, and return the rendered Kubernetes objects to tests."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import pytest
from ruamel.yaml import YAML

helm = pytest.importorskip(
    "helm_python", reason="helm-python-sdk is not installed (.ci/run installs it from .ci/tools.lock)"
)

ROOT: Final = Path(__file__).parents[2]
LIBRARY: Final = ROOT / "helm" / "kvbus-lib"
CHART: Final = ROOT / "helm" / "kvbus"
OTHER: Final = Path(__file__).parent / "data" / "other"
RELEASE: Final = "demo"
NAMESPACE: Final = "ns"
OF_THE_POD: Final = {
    "POD_NAME": "demo-0",
    "POD_NAMESPACE": NAMESPACE,
    "POD_IP": "10.1.2.3",
    "NODE_NAME": "node-a",
    "HOST_IP": "10.9.9.9",
}
"""Values of environment variables that Kubernetes would fill in from the pod's fields."""

Values = dict[str, Any]
CASES: Final[dict[str, Values]] = {
    "default": {},
    **{
        path.name.removesuffix("-values.yaml"): YAML(typ="safe", pure=True).load(path.read_text())
        for path in sorted((CHART / "ci").glob("*-values.yaml"))
    },
}
"""Sets of chart values by name: the defaults, and every file in helm/kvbus/ci."""


def load(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


class Release(NamedTuple):
    """The notes and the Kubernetes objects of a chart that was rendered with some values."""

    notes: str
    objects: list[Any]

    def all(self, kind: str) -> list[Any]:
        return [each for each in self.objects if each["kind"] == kind]

    def one(self, kind: str) -> Any:
        (found,) = (each for each in self.all(kind) if "helm.sh/hook" not in each["metadata"].get("annotations", {}))
        return found

    @property
    def workload(self) -> Any:
        (found,) = self.all("Deployment") + self.all("DaemonSet") + self.all("StatefulSet")
        return found

    @property
    def pod(self) -> Any:
        """The pod template of the workload that the chart rendered."""
        return self.workload["spec"]["template"]

    @property
    def kvbus(self) -> Any:
        """The kvbus container of the pod template, whether it is a sidecar or a normal container."""
        return container(self.pod, "kvbus")

    @property
    def engine(self) -> Any:
        return container(self.pod, "engine")

    def pods(self) -> Iterator[Any]:
        """Return the specs of all pods of the release, including the pods of `helm test`."""
        yield self.pod["spec"]
        for pod in self.all("Pod"):
            yield pod["spec"]

    def environment(self, of: Any | None = None) -> dict[str, str]:
        """Return the environment variables of a container with the values that its process would see.

        Without an argument, the container is kvbus's.
        """
        return environment(self.kvbus if of is None else of)

    def file(self) -> str | None:
        """Return the text of kvbus.yaml in the release's ConfigMap; None if the release has no such file."""
        maps = [each for each in self.all("ConfigMap") if "kvbus.yaml" in each["data"]]
        return maps[0]["data"]["kvbus.yaml"] if maps else None


def container(pod: Any, name: str) -> Any:
    (found,) = (each for each in containers(pod["spec"]) if each["name"] == name)
    return found


def containers(spec: Any) -> list[Any]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def environment(of: Any) -> dict[str, str]:
    """Return a container's environment variables, with ``$(NAME)`` replaced by earlier variables as in Kubernetes."""
    known: dict[str, str] = {}
    for variable in of.get("env", []):
        value = variable.get("value", OF_THE_POD.get(variable["name"], ""))
        for name, text in known.items():
            value = value.replace(f"$({name})", text)
        known[variable["name"]] = value
    return known


@functools.cache
def _chart(path: Path) -> Any:
    return helm.Chart.load(str(path))


def render(
    values: Values | None = None, *, chart: Path = CHART, release: str = RELEASE, namespace: str = NAMESPACE
) -> Release:
    texts: dict[str, str] = _chart(chart).render(values or {}, name=release, namespace=namespace)
    notes, objects = "", []
    for name, text in texts.items():
        if name.endswith("NOTES.txt"):
            notes = text
        else:
            objects += [each for each in YAML(typ="safe", pure=True).load_all(text) if each is not None]
    return Release(notes, objects)


def other(tmp_path: Path) -> Path:
    """Copy the example chart in data/other, with kvbus-lib in its charts/ folder as after `helm dependency build`.

    Return the path of the copy.
    """
    place = tmp_path / "other"
    shutil.copytree(OTHER, place)
    shutil.copytree(LIBRARY, place / "charts" / "kvbus-lib")
    return place


def script(name: str) -> ModuleType:
    """Import one of the scripts in helm/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "helm" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
