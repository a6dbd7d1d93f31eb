# ruff: noqa: INP001 - a script
"""One plain pod from the application chart, for what runs pods without a cluster: ``podman play kube``.

    python helm/plain_pod.py -f helm/kvbus/ci/podman-values.yaml > pod.yaml

Left out is what only a cluster has: the workload around the pod, its service account, the list of ports (podman takes
it for mappings, and refuses those on the host's network) and the probes (podman would need a curl in the image).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

HERE: Final = Path(__file__).resolve().parent
_OF_A_CLUSTER: Final = ("serviceAccountName", "automountServiceAccountToken", "enableServiceLinks")
_OF_A_KUBELET: Final = ("startupProbe", "livenessProbe", "readinessProbe", "ports")


def plain_pod(values: dict[str, Any], name: str = "kvbus") -> dict[str, Any]:
    """The pod of a rendered workload as an object of its own.

    Args:
        values: The chart's values; ``kvbus.native: false`` and ``kvbus.configFrom: environment`` are wanted.
        name: The release's and the pod's.

    Raises:
        ValueError: The pod needs objects beside it, or has a native sidecar.
    """
    spec = importlib.util.spec_from_file_location("sync", HERE / "sync.py")
    if spec is None or spec.loader is None:
        raise ValueError("helm/sync.py is gone")
    sync = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sync)
    workload = YAML(typ="safe", pure=True).load(sync.render(values, name)["kvbus/templates/workload.yaml"])
    pod = workload["spec"]["template"]
    if "initContainers" in pod["spec"]:
        raise ValueError("a native sidecar takes a cluster: set kvbus.native=false")
    beside = [volume["name"] for volume in pod["spec"].get("volumes", []) if volume.keys() & {"configMap", "secret"}]
    if beside:
        raise ValueError(f"volumes {', '.join(beside)} need objects beside the pod: set kvbus.configFrom=environment")
    for key in _OF_A_CLUSTER:
        pod["spec"].pop(key, None)
    for container in pod["spec"]["containers"]:
        for key in _OF_A_KUBELET:
            container.pop(key, None)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": pod["metadata"]["labels"]},
        "spec": pod["spec"],
    }


def main() -> int:
    """Print it."""
    parser = argparse.ArgumentParser(description="One plain pod from the application chart.")
    parser.add_argument("-f", "--values", type=Path, required=True, help="values of the chart")
    parser.add_argument("--name", default="kvbus", help="name of the pod")
    args = parser.parse_args()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.dump(plain_pod(yaml.load(args.values.read_text()), args.name), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
