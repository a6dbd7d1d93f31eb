"""Tests for the number of pods: the chart sets it, or leaves it to an autoscaler.

A chart upgrade must keep the number that an autoscaler has set.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.charts import CHART, Values, helm, load, render

SOURCE = {"endpoint": "tcp://a:5557", "replay_endpoint": "tcp://a:5558"}
SIMULATION: Values = {}
AGGREGATOR: Values = {"mode": "deployment", "kvbus": {"config": {"sources": [SOURCE]}}}


@pytest.mark.parametrize("values", [SIMULATION, AGGREGATOR], ids=["simulation", "deployment"])
@pytest.mark.parametrize("replicas", [0, 1, 7])
def test_the_chart_sets_the_number_of_replicas(values: Values, replicas: int) -> None:
    assert render({**values, "replicas": replicas}).workload["spec"]["replicas"] == replicas
    assert render(values).workload["spec"]["replicas"] == 1


@pytest.mark.parametrize("values", [SIMULATION, AGGREGATOR], ids=["simulation", "deployment"])
def test_replicas_null_renders_no_number_of_replicas(values: Values) -> None:
    """With `replicas: null`, the rendered workload does not have the key `replicas`.

    Kubernetes keeps the current number only if the key is absent; it reads the value null as 1 replica.
    """
    left_out, given = (render({**values, "replicas": replicas}).workload["spec"] for replicas in (None, 2))
    assert "replicas" not in left_out
    assert {**left_out, "replicas": 2} == given, "nothing else differs"


def test_a_daemonset_never_has_a_number_of_replicas() -> None:
    for replicas in (None, 1):
        values = {**AGGREGATOR, "mode": "daemonset", "replicas": replicas}
        assert "replicas" not in render(values).workload["spec"]


def test_a_workload_without_replicas_is_valid_for_kubernetes() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    kubernetes.validate(render({**SIMULATION, "replicas": None}).workload, "1.31", strict=True)


def installed(**values: Any) -> tuple[Any, str]:
    """Return the workload and the notes of a simulated `helm install` with these values merged over the chart's."""
    release = helm.Config(namespace="ns").install(str(CHART), "demo", {**SIMULATION, **values}, dry_run="client")
    (workload,) = (
        each for text in release["manifest"].split("\n---\n") if (each := load(text))["kind"] == "Deployment"
    )
    return workload, release["notes"]


def test_an_install_with_replicas_null_names_the_autoscaler_in_its_notes() -> None:
    workload, notes = installed(replicas=None)
    assert "replicas" not in workload["spec"]
    assert "as many pods as the autoscaler wants" in notes
    assert "HorizontalPodAutoscaler" in notes
    assert "scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: demo}" in notes


def test_the_notes_of_an_install_name_its_number_of_replicas() -> None:
    workload, notes = installed(replicas=2)
    assert workload["spec"]["replicas"] == 2
    assert "a simulated engine with kvbus as its sidecar: 2 pod(s)" in notes
    assert "HorizontalPodAutoscaler" not in notes
