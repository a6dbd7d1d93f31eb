"""Tests for the pages in docs about platforms such as KServe.

The pages show the files of deploy/ as they are. Their commands are run as far as that is possible without a cluster.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
from ruamel.yaml import YAML

from kvbus.config import load
from tests.chart.definitions import mistakes, needs_platforms

ROOT: Final = Path(__file__).parents[2]
PLATFORMS: Final = sorted((ROOT / "docs" / "platforms").glob("*.md"))
PAGES: Final = [*PLATFORMS, *sorted((ROOT / "docs" / "routers").glob("[a-z]*.md"))]
ENGINE: Final = ("tcp://127.0.0.1:15557", "tcp://127.0.0.1:15657")
"""The addresses at which every sidecar receives its engine's events and requests replays."""
_FENCE: Final = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fences(page: Path, language: str) -> list[str]:
    return [text for kind, text in _FENCE.findall(page.read_text()) if kind == language]


def test_each_platform_has_a_page_in_the_navigation() -> None:
    named = re.findall(r'"platforms/([\w-]+)\.md"', (ROOT / "docs" / "site" / "zensical.toml").read_text())
    assert sorted(named) == [page.stem for page in PLATFORMS]
    known = {page.stem for page in PAGES}
    assert {path.name for path in (ROOT / "deploy" / "kubernetes" / "platforms").iterdir()} <= known


@pytest.mark.parametrize("page", PLATFORMS, ids=lambda page: page.stem)
def test_a_platform_page_has_the_required_sections(page: Path) -> None:
    text = page.read_text()
    assert "## What you see\n" in text
    assert "## What is not possible\n" in text
    assert "## What was tested\n" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_existing_files_with_their_content(page: Path) -> None:
    for text in fences(page, "yaml"):
        name, _, shown = text.partition("\n")
        if name.startswith("# deploy/"):
            assert shown == (ROOT / name.removeprefix("# ")).read_text(), name
    for path in re.findall(r"\bdeploy/kubernetes/[\w./-]*\w", page.read_text()):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_engine_on_a_page_publishes_to_kvbus(page: Path) -> None:
    for text in re.findall(r"\{[^{}]*\"publisher\"[^{}]*\}", page.read_text()):
        flag: dict[str, Any] = json.loads(text)
        if "*" not in flag["endpoint"]:  # an engine that binds its endpoint has no sidecar
            assert (flag["endpoint"], flag["replay_endpoint"]) == ENGINE


def shell_commands(page: Path) -> list[str]:
    return [line for text in fences(page, "sh") for line in text.splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_read_existing_files(page: Path) -> None:
    """Each file that a command of the page reads is in the repository, or the page shows it, or an earlier command
    writes it.

    The test runs each ``sed`` command. A folder that ``kubectl apply -k`` reads must have a kustomization.yaml.
    """
    known = {text.partition("\n")[0].removeprefix("# ").partition(",")[0] for text in fences(page, "yaml")}
    for line in shell_commands(page):
        if line.startswith("sed "):
            command, _, written = line.partition(" > ")
            done = subprocess.run(
                ["sh", "-ec", command.partition(" | kubectl")[0]], cwd=ROOT, capture_output=True, text=True, check=True
            )
            assert "image: registry.example.com/kvbus:" in done.stdout
            assert "image: kvbus:" not in done.stdout
            known.add(written)
        for folder in re.findall(r"apply -k (\S+)", line):
            file = str(Path(folder, "kustomization.yaml"))
            assert file in known or (ROOT / file).is_file(), file
        for file in re.findall(r" -f (\S+\.yaml)", line):
            assert file in known or (ROOT / file).is_file(), file


def yaml_block(name: str, first: str) -> Any:
    """Return the parsed YAML of the page's code block whose first line is the comment ``# FIRST``."""
    (text,) = (each for each in fences(ROOT / "docs" / name, "yaml") if each.startswith(f"# {first}\n"))
    return YAML(typ="safe", pure=True).load(text)


def test_the_values_of_llm_ds_page_and_of_kvbus_make_one_valid_pod() -> None:
    """The values that docs/routers/llm-d.md shows and kvbus's values file for llm-d make a valid pod together.

    The test merges them as llm-d-modelservice does: the pod's fields come from kvbus's file, the container and the
    annotations from the page.
    """
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    own = yaml_block("routers/llm-d.md", "my-values.yaml")
    path = ROOT / "deploy" / "kubernetes" / "platforms" / "llm-d" / "modelservice-values.yaml"
    ours = YAML(typ="safe", pure=True).load(path.read_text())
    assert own["prefill"] == {"create": False}, "the chart's own containers mount a volume that our list leaves out"
    annotations = own["decode"]["podAnnotations"]
    assert annotations == {"kvbus/model": own["modelArtifacts"]["name"]}, "the chart serves it under this name"
    assert not own["decode"].keys() & ours["decode"].keys(), "Helm would replace one list by the other"
    (engine,) = own["decode"]["containers"]
    container = {key: value for key, value in engine.items() if key != "modelCommand"}
    metadata = {"name": "a", "labels": ours["modelArtifacts"]["labels"], "annotations": annotations}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
    kubernetes.validate(pod | {"spec": {**ours["decode"], "containers": [container]}}, "1.37", strict=True)


def test_production_stacks_page_names_the_served_model_in_its_annotation() -> None:
    (model,) = yaml_block("platforms/production-stack.md", "my-values.yaml")["servingEngineSpec"]["modelSpec"]
    assert model["podAnnotations"] == {"kvbus/model": model["modelURL"]}


def test_the_command_for_aibrixs_gateway_sets_the_values_on_its_page() -> None:
    page = (ROOT / "docs" / "routers" / "aibrix.md").read_text()
    setting, typed = re.findall(
        r"^```\w*\n((?:(?!```).*\n)*AIBRIX(?:(?!```).*\n)*|kubectl set env(?:(?!```).*\n)*)```", page, re.MULTILINE
    )
    wanted, given = (dict(re.findall(r"(AIBRIX_\w+)=(\S+)", text)) for text in (setting, typed))
    endpoint = "AIBRIX_PREFIX_CACHE_REMOTE_TOKENIZER_ENDPOINT"
    assert len(wanted) == 5
    assert {**given, endpoint: wanted[endpoint]} == wanted
    path = ROOT / "deploy" / "kubernetes" / "platforms" / "aibrix" / "engine.yaml"
    service = YAML(typ="safe", pure=True).load(path.read_text())
    assert given[endpoint] == f"http://{service['metadata']['name']}.default:8000", "AIBrix names its Service so"


@needs_platforms
def test_kserves_definition_accepts_the_service_and_scheduler_of_its_page() -> None:
    path = ROOT / "deploy" / "kubernetes" / "platforms" / "kserve" / "service.yaml"
    service = YAML(typ="safe", pure=True).load(path.read_text())
    service["spec"]["router"] = yaml_block("platforms/kserve.md", "spec.router of service.yaml")
    assert mistakes(service) == []
    (producer,) = (
        each["parameters"]["kvEventsConfig"]
        for each in service["spec"]["router"]["scheduler"]["config"]["inline"]["plugins"]
        if "parameters" in each
    )
    config = YAML(typ="safe", pure=True).load((ROOT / "deploy" / "kubernetes" / "inject" / "kserve.yaml").read_text())
    (sidecar,) = config["spec"]["template"]["initContainers"]
    env = {each["name"]: each.get("value", "") for each in sidecar["env"] if each["name"].startswith("KVBUS_")}
    (output,) = load(None, env=env | {"KVBUS_MODEL": "m", "KVBUS_WORKER": "w:8000"}, overrides={}).outputs
    assert producer["podDiscoveryConfig"] == {
        "socketPort": int(output.endpoint.rpartition(":")[2]),
        "replaySocketPort": int(str(output.replay_endpoint).rpartition(":")[2]),
    }
    assert str(output.topic).startswith(producer["topicFilter"])
