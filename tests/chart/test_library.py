"""Tests for the library chart kvbus-lib, as the chart of another project uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbus.config import load
from tests.chart.charts import OTHER, container, environment, helm, other, render


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    return other(tmp_path)


def test_a_chart_needs_one_line_to_use_the_library() -> None:
    lines = (OTHER / "templates" / "engine.yaml").read_text().splitlines()
    assert [line.strip() for line in lines if "kvbus." in line] == [
        '{{- include "kvbus.pod" (list . (include "other.pod" .)) | nindent 4 }}'
    ]


def test_the_library_adds_kvbus_and_keeps_the_contents_of_the_pod(chart: Path) -> None:
    pod = render(chart=chart).pod
    assert pod["metadata"]["labels"] == {"app": "demo", "kvbus/sidecar": "true"}
    assert pod["metadata"]["annotations"] == {"note": "mine"}
    assert [each["name"] for each in pod["spec"]["initContainers"]] == ["kvbus", "fetch"]
    assert [each["name"] for each in pod["spec"]["containers"]] == ["engine"]
    assert [each["name"] for each in pod["spec"]["volumes"]] == ["weights", "kvbus-state"]


def test_the_sidecar_of_the_library_needs_no_other_object(chart: Path) -> None:
    release = render({"kvbus": {"router": "llm-d"}}, chart=chart)
    assert {each["kind"] for each in release.objects} == {"StatefulSet"}
    config = load(None, env=release.environment(), overrides={})
    assert (config.model, config.worker) == ("Qwen/Qwen3-32B", "10.1.2.3:8000")
    assert config.outputs[0].profile == "llm-d"
    events = json.loads(release.engine["args"][1])
    assert events["endpoint"] == config.sources[0].endpoint


def test_the_parts_of_the_library_make_a_consistent_pod(chart: Path) -> None:
    (pod,) = render({"parts": True}, chart=chart).all("Pod")
    kvbus = container(pod, "kvbus")
    assert load(None, env=environment(kvbus), overrides={}).sources
    assert {mount["name"] for mount in kvbus["volumeMounts"]} == {each["name"] for each in pod["spec"]["volumes"]}


def test_a_chart_with_the_library_is_valid_for_kubernetes(chart: Path) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for each in render({"parts": True}, chart=chart).objects:
        kubernetes.validate(each, "1.31", strict=True)


def test_a_chart_with_the_library_passes_strict_lint(chart: Path) -> None:
    assert helm.lint(str(chart), {"parts": True}, strict=True)["errors"] == []


def test_a_chart_with_the_library_refuses_unknown_values_of_kvbus(chart: Path) -> None:
    with pytest.raises(helm.HelmError, match="rooter"):
        render({"kvbus": {"rooter": "llm-d"}}, chart=chart)


def test_the_library_without_its_alias_fails_with_an_error(chart: Path) -> None:
    file = chart / "Chart.yaml"
    file.write_text(file.read_text().replace("    alias: kvbus\n", ""))
    with pytest.raises(helm.HelmError, match="alias: kvbus"):
        render(chart=chart)


def test_the_library_refuses_a_value_that_is_not_a_pod_template(chart: Path) -> None:
    file = chart / "templates" / "_pod.tpl"
    file.write_text('{{- define "other.pod" -}}\nspec: none\n{{- end -}}\n')
    with pytest.raises(helm.HelmError, match="must be a pod template"):
        render(chart=chart)
