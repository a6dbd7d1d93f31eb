"""Tests for the files in .github and .ci that a code forge such as GitHub runs.

They check make targets, Python versions, minimal permissions and pinned actions.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from ruamel.yaml import YAML

from tools.release import ARCHITECTURES

ROOT: Final = Path(__file__).parents[2]
GITHUB: Final = ROOT / ".github"
WORKFLOWS: Final = sorted((GITHUB / "workflows").glob("*.yml"))
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PREREQUISITES: Final = {"setup", "tools"}
"""Make targets that other targets run as prerequisites."""

FOR_OTHERS: Final = GITHUB / "workflows" / "conform.yml"
"""The workflow that is only for other repositories, which call it.

It uses no make target of kvbus, and its runs do not wait for each other.
"""

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def read(path: Path) -> Any:
    return YAML(typ="safe", pure=True).load(path.read_text())


def jobs(path: Path) -> dict[str, Any]:
    return dict(read(path)["jobs"])


def commands(path: Path) -> Iterator[str]:
    for job in jobs(path).values():
        yield from (step["run"] for step in job.get("steps", ()) if "run" in step)


def targets_of(text: str) -> set[str]:
    """Return the make targets that the commands of a shell text name."""
    calls = re.findall(
        r"""(?:^|[\s(])make((?: +(?:--silent|[A-Z]+=(?:"[^"]*"|\S+)|[a-z][a-z-]*))+)""", text, re.MULTILINE
    )
    return {word for call in calls for word in re.findall(r" ([a-z][a-z-]*)", re.sub(r'"[^"]*"', "", call))}


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_forge_has_the_expected_workflows() -> None:
    assert [path.name for path in WORKFLOWS] == [
        "ci.yml",
        "conform.yml",
        "newest.yml",
        "nightly.yml",
        "release.yml",
        "site.yml",
    ]


@each_workflow
def test_every_make_target_exists(path: Path) -> None:
    found = targets_of("\n".join(commands(path)))
    assert found or path == FOR_OTHERS
    assert found <= targets()


def test_the_forge_runs_the_make_targets_of_the_local_run() -> None:
    local = targets_of((ROOT / ".ci" / "run").read_text())
    assert {"lint", "test", "wheel", "dockerfile"} <= local <= targets()
    assert local - PREREQUISITES <= targets_of("\n".join(commands(GITHUB / "workflows" / "ci.yml")))


def test_the_forge_tests_exactly_the_python_versions_of_the_classifiers() -> None:
    said = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: Python :: 3\.\d+$", each)]
    tested = jobs(GITHUB / "workflows" / "ci.yml")["test"]["strategy"]["matrix"]["python"]
    assert tested == said
    assert PROJECT["requires-python"] == f">={said[0]}"


def test_the_image_is_built_on_each_architecture_and_pushed_without_a_new_build() -> None:
    built = jobs(GITHUB / "workflows" / "ci.yml")["image"]["strategy"]["matrix"]["include"]
    assert [each["architecture"] for each in built] == list(ARCHITECTURES)
    assert len({each["machine"] for each in built}) == len(built)
    pushed = "\n".join(commands(GITHUB / "workflows" / "release.yml"))
    assert re.findall(r"for architecture in (.+); do", pushed) == [" ".join(ARCHITECTURES)]
    assert "make image" not in pushed


@each_workflow
def test_actions_are_pinned_by_commit_with_their_version_in_a_comment(path: Path) -> None:
    uses = re.findall(r"uses: (.+)$", path.read_text(), re.MULTILINE)
    for each in uses:
        assert re.fullmatch(r"\./\S+|[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each), each
    assert len(uses) == sum("uses" in step for job in jobs(path).values() for step in (job, *job.get("steps", ())))


def test_each_action_has_the_same_version_in_all_workflows() -> None:
    pins = {each for path in WORKFLOWS for each in re.findall(r"uses: (\S+@[0-9a-f]{40} # \S+)", path.read_text())}
    assert len({pin.partition("@")[0] for pin in pins}) == len(pins)


@each_workflow
def test_only_publishing_jobs_of_a_workflow_have_write_permission(path: Path) -> None:
    assert read(path)["permissions"] == {"contents": "read"}
    given = {
        (name, right)
        for name, job in jobs(path).items()
        for right, how in job.get("permissions", {}).items()
        if how == "write"
    }
    publishing = {
        "release.yml": {
            *{("registry", right) for right in ("packages", "id-token", "attestations")},
            *{("forge", right) for right in ("contents", "id-token", "attestations")},
            ("pypi", "id-token"),
        },
        "site.yml": {("publish", "id-token"), ("publish", "pages")},
    }
    assert given == publishing.get(path.name, set())
    checkouts = [
        step
        for job in jobs(path).values()
        for step in job.get("steps", ())
        if step.get("uses", "").startswith("actions/checkout@")
    ]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


@each_workflow
def test_workflows_have_time_limits_and_do_not_run_twice_on_a_branch(path: Path) -> None:
    for name, job in jobs(path).items():
        assert "uses" in job or 0 < job["timeout-minutes"] <= 60, name
    # In a workflow that another repository calls, github.workflow is the caller's name. If the concurrency group had that
    # name, runs of different callers would wait for each other.
    if path == FOR_OTHERS:
        assert list(read(path)["on"]) == ["workflow_call"]
        return
    assert read(path)["concurrency"]["group"] == f"{path.stem}-${{{{ github.ref }}}}"


def test_a_release_is_published_only_after_its_tests() -> None:
    release = jobs(GITHUB / "workflows" / "release.yml")
    assert release["ci"] == {"needs": "check", "uses": "./.github/workflows/ci.yml"}
    assert release["assemble"]["needs"] == "ci"
    assert {name for name, job in release.items() if "permissions" in job} == {"pypi", "registry", "forge"}
    assert release["pypi"]["needs"] == release["registry"]["needs"] == "assemble"
    assert release["forge"]["needs"] == ["pypi", "registry"]


def test_a_release_uses_no_secret_and_signs_its_artifacts() -> None:
    text = (GITHUB / "workflows" / "release.yml").read_text()
    assert "secrets." not in text
    release = jobs(GITHUB / "workflows" / "release.yml")
    for name in ("registry", "forge"):
        uses = " ".join(step.get("uses", "") for step in release[name]["steps"])
        assert "sigstore/cosign-installer@" in uses
        assert "actions/attest-build-provenance@" in uses
    signed = "\n".join(commands(GITHUB / "workflows" / "release.yml"))
    assert re.findall(r"cosign (\S+) --yes", signed) == ["sign", "attest", "sign", "sign-blob"]


def test_a_workflow_tests_kvbus_with_the_newest_engines_and_routers() -> None:
    found = jobs(GITHUB / "workflows" / "newest.yml")
    described = (ROOT / ".ci" / "routers.sh").read_text().split("# NAME is ", 1)[1].split("The default", 1)[0]
    routers = found["routers"]["strategy"]["matrix"]["router"]
    assert sorted(routers) == sorted(re.findall(r"\b(llmd|aibrix|vllm-router|smg|dynamo)\b", described))
    assert any(".ci/engines.sh" in step.get("run", "") for step in found["engines"]["steps"])
    assert found["engines"]["env"] == {"NEWEST": "1"}


@each_workflow
def test_no_script_of_a_workflow_contains_an_expression(path: Path) -> None:
    """A script may not contain an expression (`${{ … }}`): the forge would insert its value, such as a branch's
    name, as code.

    A script may use the expression's value as an environment variable, because that value is not run as code.
    """
    assert not [text for text in commands(path) if "${{" in text]


def test_make_version_prints_the_projects_version() -> None:
    done = subprocess.run(
        ["make", "--silent", "version"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"{PROJECT['version']}\n"


def test_the_pre_commit_hooks_run_the_same_commands_as_make_lint() -> None:
    (local,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    lint = (ROOT / "Makefile").read_text().split("\nlint:", 1)[1].split("\n\n", 1)[0]
    hooks = {hook["entry"].removeprefix(".venv/bin/").replace(" --force-exclude", "") for hook in local["hooks"]}
    wanted = re.findall(r"@\$\(BIN\)/(.+)", lint)
    assert hooks == {each.replace(" --check", "").removesuffix(" .") for each in wanted}


def test_issue_forms_have_the_fields_that_a_forge_requires() -> None:
    for name in ("bug", "feature"):
        form = read(GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml")
        assert form.keys() == {"name", "description", "labels", "body"}
        asked = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in asked}) == len(asked)
        assert all(field["attributes"]["label"] for field in asked)
        assert any(field.get("validations", {}).get("required") for field in asked)
    assert read(GITHUB / "ISSUE_TEMPLATE" / "config.yml") == {"blank_issues_enabled": False}


def test_dependabot_watches_every_file_that_names_dependencies() -> None:
    ecosystems = {
        "pyproject.toml": "pip",
        "Dockerfile": "docker",
        "go.mod": "gomod",
        "pom.xml": "maven",
        "Cargo.toml": "cargo",
    }
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    named = {
        (ecosystems[path.name], "/" + str(path.parent).removeprefix("."))
        for path in map(Path, listed)
        if path.name in ecosystems
    }
    watched = [(each["package-ecosystem"], each["directory"]) for each in read(GITHUB / "dependabot.yml")["updates"]]
    assert sorted(watched) == sorted(named | {("github-actions", "/")})
