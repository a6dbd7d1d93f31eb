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


def made(text: str) -> set[str]:
    """Return the make targets that the commands of a shell text name."""
    calls = re.findall(
        r"""(?:^|[\s(])make((?: +(?:--silent|[A-Z]+=(?:"[^"]*"|\S+)|[a-z][a-z-]*))+)""", text, re.MULTILINE
    )
    return {word for call in calls for word in re.findall(r" ([a-z][a-z-]*)", re.sub(r'"[^"]*"', "", call))}


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_there_are_workflows() -> None:
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
    found = made("\n".join(commands(path)))
    assert found or path == FOR_OTHERS
    assert found <= targets()


def test_the_forge_makes_what_the_local_run_makes() -> None:
    local = made((ROOT / ".ci" / "run").read_text())
    assert {"lint", "test", "wheel", "dockerfile"} <= local <= targets()
    assert local - PREREQUISITES <= made("\n".join(commands(GITHUB / "workflows" / "ci.yml")))


def test_every_python_of_the_classifiers_is_tested_and_no_other() -> None:
    said = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: Python :: 3\.\d+$", each)]
    tested = jobs(GITHUB / "workflows" / "ci.yml")["test"]["strategy"]["matrix"]["python"]
    assert tested == said
    assert PROJECT["requires-python"] == f">={said[0]}"


def test_the_image_is_built_on_both_architectures_and_pushed_as_it_was_built() -> None:
    built = jobs(GITHUB / "workflows" / "ci.yml")["image"]["strategy"]["matrix"]["include"]
    assert [each["architecture"] for each in built] == list(ARCHITECTURES)
    assert len({each["machine"] for each in built}) == len(built)
    pushed = "\n".join(commands(GITHUB / "workflows" / "release.yml"))
    assert re.findall(r"for architecture in (.+); do", pushed) == [" ".join(ARCHITECTURES)]
    assert "make image" not in pushed


@each_workflow
def test_actions_are_pinned_by_commit_with_their_version_beside(path: Path) -> None:
    uses = re.findall(r"uses: (.+)$", path.read_text(), re.MULTILINE)
    for each in uses:
        assert re.fullmatch(r"\./\S+|[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each), each
    assert len(uses) == sum("uses" in step for job in jobs(path).values() for step in (job, *job.get("steps", ())))


def test_one_action_has_one_version() -> None:
    pins = {each for path in WORKFLOWS for each in re.findall(r"uses: (\S+@[0-9a-f]{40} # \S+)", path.read_text())}
    assert len({pin.partition("@")[0] for pin in pins}) == len(pins)


@each_workflow
def test_rights_are_read_only_except_where_something_is_published(path: Path) -> None:
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
def test_every_job_ends_and_a_newer_run_does_not_meet_an_older_one(path: Path) -> None:
    for name, job in jobs(path).items():
        assert "uses" in job or 0 < job["timeout-minutes"] <= 60, name
    # In a workflow that another repository calls, github.workflow is the caller's name. If the concurrency group had that
    # name, runs of different callers would wait for each other.
    if path == FOR_OTHERS:
        assert list(read(path)["on"]) == ["workflow_call"]
        return
    assert read(path)["concurrency"]["group"] == f"{path.stem}-${{{{ github.ref }}}}"


def test_nothing_is_published_that_was_not_tested() -> None:
    release = jobs(GITHUB / "workflows" / "release.yml")
    assert release["ci"] == {"needs": "check", "uses": "./.github/workflows/ci.yml"}
    assert release["assemble"]["needs"] == "ci"
    assert {name for name, job in release.items() if "permissions" in job} == {"pypi", "registry", "forge"}
    assert release["pypi"]["needs"] == release["registry"]["needs"] == "assemble"
    assert release["forge"]["needs"] == ["pypi", "registry"]


def test_a_release_has_no_secret_and_what_it_publishes_is_signed() -> None:
    text = (GITHUB / "workflows" / "release.yml").read_text()
    assert "secrets." not in text
    release = jobs(GITHUB / "workflows" / "release.yml")
    for name in ("registry", "forge"):
        uses = " ".join(step.get("uses", "") for step in release[name]["steps"])
        assert "sigstore/cosign-installer@" in uses
        assert "actions/attest-build-provenance@" in uses
    signed = "\n".join(commands(GITHUB / "workflows" / "release.yml"))
    assert re.findall(r"cosign (\S+) --yes", signed) == ["sign", "attest", "sign", "sign-blob"]


def test_what_is_between_engines_and_routers_is_run_with_the_newest_of_each() -> None:
    found = jobs(GITHUB / "workflows" / "newest.yml")
    described = (ROOT / ".ci" / "routers.sh").read_text().split("# NAME is ", 1)[1].split("The default", 1)[0]
    routers = found["routers"]["strategy"]["matrix"]["router"]
    assert sorted(routers) == sorted(re.findall(r"\b(llmd|aibrix|vllm-router|smg|dynamo)\b", described))
    assert any(".ci/engines.sh" in step.get("run", "") for step in found["engines"]["steps"])
    assert found["engines"]["env"] == {"NEWEST": "1"}


@each_workflow
def test_no_shell_text_has_an_expression_in_it(path: Path) -> None:
    """A script may not contain an expression (`${{ … }}`): the forge would insert its value, such as a branch's
    name, as code.

    A script may use the expression's value as an environment variable, because that value is not run as code.
    """
    assert not [text for text in commands(path) if "${{" in text]


def test_make_knows_the_version() -> None:
    done = subprocess.run(
        ["make", "--silent", "version"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"{PROJECT['version']}\n"


def test_the_hooks_run_what_lint_runs() -> None:
    (local,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    lint = (ROOT / "Makefile").read_text().split("\nlint:", 1)[1].split("\n\n", 1)[0]
    hooks = {hook["entry"].removeprefix(".venv/bin/").replace(" --force-exclude", "") for hook in local["hooks"]}
    wanted = re.findall(r"@\$\(BIN\)/(.+)", lint)
    assert hooks == {each.replace(" --check", "").removesuffix(" .") for each in wanted}


def test_forms_have_what_a_forge_wants_of_them() -> None:
    for name in ("bug", "feature"):
        form = read(GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml")
        assert form.keys() == {"name", "description", "labels", "body"}
        asked = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in asked}) == len(asked)
        assert all(field["attributes"]["label"] for field in asked)
        assert any(field.get("validations", {}).get("required") for field in asked)
    assert read(GITHUB / "ISSUE_TEMPLATE" / "config.yml") == {"blank_issues_enabled": False}


def test_dependencies_are_watched_wherever_they_are_named() -> None:
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
