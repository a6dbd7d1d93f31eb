"""Tests that docs/SUPPORT.md names the same tested versions as the classifiers, the charts, the lock files and the
modules.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[2]
ROWS: Final = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|", (ROOT / "docs" / "SUPPORT.md").read_text(), re.MULTILINE))
PINNED: Final = {
    "Dynamo": (".ci/dynamo.lock", "ai-dynamo-runtime=="),
    "llm-d-kv-cache": ("tests/interop/llmd/go.mod", "github.com/llm-d/llm-d-kv-cache v"),
    "AIBrix": ("tests/interop/aibrix/go.mod", "github.com/vllm-project/aibrix v"),
    "vLLM router": (".ci/vllm-router.lock", "vllm-router=="),
    "SMG relay": (".ci/smg.lock", "smg-grpc-servicer=="),
}


def project() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("router", PINNED)
def test_the_support_page_names_the_tested_version_of_each_router(router: str) -> None:
    file, before = PINNED[router]
    found = re.findall(re.escape(before) + r"([\d.]+\d)", (ROOT / file).read_text())
    assert set(found) == {ROWS[router]}


def test_the_lock_file_of_dynamos_frontend_has_the_supported_release() -> None:
    assert re.findall(r"^ai-dynamo==([\d.]+\d)", (ROOT / ".ci" / "dynamo-frontend.lock").read_text(), re.MULTILINE) == [
        ROWS["Dynamo"]
    ]


def test_the_support_page_names_exactly_the_python_versions_of_the_classifiers() -> None:
    assert ROWS["Python"].split(", ") == re.findall(r"Python :: (3\.\d+)", " ".join(project()["classifiers"]))


def test_the_support_page_names_the_kubernetes_versions_of_charts_and_schemas() -> None:
    oldest, newest = ROWS["Kubernetes"].split(" to ")
    for chart in ("kvbus", "kvbus-lib"):
        assert f'kubeVersion: ">={oldest}.0-0"' in (ROOT / "helm" / chart / "Chart.yaml").read_text()
    assert f"\nkubernetes-validate=={newest}." in (ROOT / ".ci" / "tools.lock").read_text()
    assert f"\tk8s.io/kubernetes v{newest}." in (ROOT / "tests" / "cluster" / "server" / "go.mod").read_text()


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
def test_the_support_page_names_the_engine_versions_of_the_dialect_table(engine: str) -> None:
    oldest, newest = ROWS[engine].split(" to ")
    protocol = (ROOT / "docs" / "PROTOCOL.md").read_text()
    rows = [
        re.findall(r"[\d.]*\d", each)
        for each in re.findall(rf"^\| {engine} ([\d., \u2013]+) \|", protocol, re.MULTILINE)
    ]
    assert rows[0][0].startswith(oldest)
    assert rows[-1][-1] == newest
