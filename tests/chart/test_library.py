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


def test_it_takes_one_line() -> None:
    lines = (OTHER / "templates" / "engine.yaml").read_text().splitlines()
    assert [line.strip() for line in lines if "kvbus." in line] == [
        '{{- include "kvbus.pod" (list . (include "other.pod" .)) | nindent 4 }}'
    ]


def test_the_pod_has_kvbus_and_everything_it_had(chart: Path) -> None:
    pod = render(chart=chart).pod
    assert pod["metadata"]["labels"] == {"app": "demo", "kvbus/sidecar": "true"}
    assert pod["metadata"]["annotations"] == {"note": "mine"}
    assert [each["name"] for each in pod["spec"]["initContainers"]] == ["kvbus", "fetch"]
    assert [each["name"] for each in pod["spec"]["containers"]] == ["engine"]
    assert [each["name"] for each in pod["spec"]["volumes"]] == ["weights", "kvbus-state"]


def test_the_sidecar_needs_nothing_beside_the_pod(chart: Path) -> None:
    release = render({"kvbus": {"router": "llm-d"}}, chart=chart)
    assert {each["kind"] for each in release.objects} == {"StatefulSet"}
    config = load(None, env=release.environment(), overrides={})
    assert (config.model, config.worker) == ("Qwen/Qwen3-32B", "10.1.2.3:8000")
    assert config.outputs[0].profile == "llm-d"
    events = json.loads(release.engine["args"][1])
    assert events["endpoint"] == config.sources[0].endpoint


def test_parts_for_those_who_want_to_place_them(chart: Path) -> None:
    (pod,) = render({"parts": True}, chart=chart).all("Pod")
    kvbus = container(pod, "kvbus")
    assert load(None, env=environment(kvbus), overrides={}).sources
    assert {mount["name"] for mount in kvbus["volumeMounts"]} == {each["name"] for each in pod["spec"]["volumes"]}


def test_kubernetes_takes_it(chart: Path) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for each in render({"parts": True}, chart=chart).objects:
        kubernetes.validate(each, "1.31", strict=True)


def test_it_lints_strictly(chart: Path) -> None:
    assert helm.lint(str(chart), {"parts": True}, strict=True)["errors"] == []


def test_its_values_are_checked_there_too(chart: Path) -> None:
    with pytest.raises(helm.HelmError, match="rooter"):
        render({"kvbus": {"rooter": "llm-d"}}, chart=chart)


def test_without_the_alias_it_says_so(chart: Path) -> None:
    file = chart / "Chart.yaml"
    file.write_text(file.read_text().replace("    alias: kvbus\n", ""))
    with pytest.raises(helm.HelmError, match="alias: kvbus"):
        render(chart=chart)


def test_what_is_no_pod_template_is_refused(chart: Path) -> None:
    file = chart / "templates" / "_pod.tpl"
    file.write_text('{{- define "other.pod" -}}\nspec: none\n{{- end -}}\n')
    with pytest.raises(helm.HelmError, match="must be a pod template"):
        render(chart=chart)
