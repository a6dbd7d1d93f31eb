"""The pod for podman: the chart's own, without what only a cluster has."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest

from kvbus.config import load
from tests.chart.charts import CASES, CHART, ROOT, container, environment, render, script
from tests.chart.charts import load as read_yaml

plain_pod = script("plain_pod").plain_pod


def test_both_containers_are_those_of_the_chart() -> None:
    pod = plain_pod(CASES["podman"], "demo")
    assert (pod["kind"], pod["metadata"]["name"]) == ("Pod", "demo")
    rendered = render(CASES["podman"])
    for name in ("engine", "kvbus"):
        whole = container(rendered.pod, name)
        assert container(pod, name) == {
            key: value for key, value in whole.items() if key != "ports" and not key.endswith("Probe")
        }
    config = load(None, env=environment(container(pod, "kvbus")), overrides={})
    assert f"--endpoint={config.sources[0].endpoint}" in container(pod, "engine")["args"]


def test_kubernetes_would_take_it_too() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    kubernetes.validate(plain_pod(CASES["podman"], "demo"), "1.31", strict=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"native": True}, "kvbus.native=false"),
        ({"configFrom": "configMap"}, "kvbus.configFrom=environment"),
    ],
)
def test_what_takes_a_cluster_is_refused(change: dict[str, Any], said: str) -> None:
    values = copy.deepcopy(CASES["podman"])
    values["kvbus"] |= change
    with pytest.raises(ValueError, match=said):
        plain_pod(values)


def test_the_script_prints_it() -> None:
    command = [sys.executable, str(ROOT / "helm" / "plain_pod.py"), "-f", str(CHART / "ci" / "podman-values.yaml")]
    done = subprocess.run([*command, "--name=demo"], capture_output=True, text=True, timeout=60, check=True)
    assert read_yaml(done.stdout) == plain_pod(CASES["podman"], "demo")
