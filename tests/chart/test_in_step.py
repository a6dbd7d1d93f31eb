"""Tests that each file which `python helm/sync.py` generates from other files is up to date."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pytest
from ruamel.yaml import YAML

from tests.chart.charts import CHART, LIBRARY, ROOT, helm, render, script
from tests.chart.charts import load as read_yaml

VERSION: Final = version("kvbus")
MANIFESTS: Final = ROOT / "deploy" / "kubernetes"
sync = script("sync")


@pytest.mark.parametrize("path", sync.expected(), ids=lambda path: str(path.relative_to(ROOT)))
def test_each_generated_file_is_up_to_date(path: Path) -> None:
    assert path.read_text() == sync.expected()[path], "out of step: python helm/sync.py"


def test_the_copy_of_the_library_chart_has_the_same_files() -> None:
    copy = CHART / "charts" / "kvbus-lib"
    assert names(copy) == names(LIBRARY) - {"README.md"}


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_the_files_of_rules_and_dashboards_are_copied_to_the_chart() -> None:
    assert all(source.exists() for source in sync.COPIES)
    assert set(sync.COPIES.values()) <= sync.expected().keys()


def test_the_manifests_equal_the_output_of_the_chart() -> None:
    rendered = sync.manifests()
    folders = (MANIFESTS / "component", MANIFESTS / "inject")
    assert {path for each in folders for path in each.rglob("*.yaml")} <= rendered.keys()
    other = [str(path.relative_to(ROOT)) for path, text in rendered.items() if path.read_text() != text]
    assert other == [], "out of step: python helm/sync.py"


def test_the_generator_refuses_a_value_without_a_comment() -> None:
    with pytest.raises(ValueError, match=r"a\.b has no comment"):
        list(sync.described("a:\n  b: 1\n"))
    assert list(sync.described("# -- about\n# it\na:\n  b: 1\n")) == [("a", '`{"b": 1}`', "about it")]


def test_the_installed_version_is_the_version_of_the_project() -> None:
    """`kvbus --version` and the metrics show the installed version.

    The test fails in an environment that was installed before the project's version changed.
    """
    assert VERSION == sync.VERSION, "out of step: make setup"


def test_charts_and_images_have_the_version_of_the_project() -> None:
    charts = [read_yaml((chart / "Chart.yaml").read_text()) for chart in (LIBRARY, CHART)]
    assert {about[key] for about in charts for key in ("version", "appVersion")} == {sync.VERSION}
    (dependency,) = charts[1]["dependencies"]
    assert (dependency["version"], dependency["alias"]) == (sync.VERSION, "kvbus")
    assert render().kvbus["image"] == f"kvbus:{sync.VERSION}"
    folders = ("deploy", "docs", "helm")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    texts = [path.read_text() for path in files if path.suffix not in {".png", ".pyc"}]
    tags = {tag for text in texts for tag in re.findall(r"\bkvbus:([0-9]+\.[\w.]*)", text)}
    assert tags == {sync.VERSION}


def test_a_new_version_is_written_to_every_file_that_names_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {path for path in sync.expected() if sync.VERSION in path.read_text()}
    monkeypatch.setattr(sync, "VERSION", "98.7.6")
    files = sync.expected()
    changed = {path for path, text in files.items() if text != path.read_text()}
    copies = {CHART / "charts" / "kvbus-lib" / path.relative_to(LIBRARY) for path in changed if LIBRARY in path.parents}
    assert changed == {*named, *copies} - {CHART / "charts" / "kvbus-lib" / "README.md"}
    assert "ARG VERSION=98.7.6\n" in files[ROOT / "Dockerfile"]


def test_a_version_that_helm_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "VERSION", "1.0.0rc1")
    with pytest.raises(ValueError, match=r"version 1\.0\.0rc1 must be MAJOR\.MINOR\.PATCH"):
        sync.expected()


def test_the_chart_of_a_clone_can_be_packaged_with_its_dependency(tmp_path: Path) -> None:
    """A clone of the project can be installed without `helm dependency build`, because the chart's dependency is in
    charts/.
    """
    with helm.Chart.load(str(CHART)) as chart:
        archive = chart.save(str(tmp_path))
    with helm.Chart.load(archive) as chart:
        assert [each["name"] for each in chart.dependencies] == ["kvbus-lib"]
        assert "kvbus/templates/workload.yaml" in chart.render({}, name="demo", namespace="ns")


def test_the_chart_of_a_clone_can_be_installed() -> None:
    release = helm.Config(namespace="ns").install(str(CHART), "demo", {}, dry_run="client")
    assert "kind: Deployment" in release["manifest"]
    assert "port-forward" in release["notes"]


def documents() -> Iterator[tuple[str, Any]]:
    for path in sorted(MANIFESTS.glob("*.yaml")):
        for each in YAML(typ="safe", pure=True).load_all(path.read_text()):
            yield f"{path.name}: {each['kind']}", each


def test_the_manifests_are_valid_for_kubernetes() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    found = list(documents())
    assert len(found) >= 2 * 4
    for _, each in found:
        kubernetes.validate(each, "1.31", strict=True)
        assert "helm" not in str(each).lower(), "nothing in them is left of the tool that made them"
