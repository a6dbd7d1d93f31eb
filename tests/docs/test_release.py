"""Tests for releases (tools/release.py, Makefile).

A release has conditions that are checked before it, and equal commits give equal files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Final

import pytest

from tools import release
from tools.release import (
    ROOT,
    UNRELEASED,
    absent,
    assemble,
    chart,
    complete_links,
    dated,
    notes,
    pack,
    project,
    refusals,
)

VERSION: Final = str(project(ROOT)["version"])
DATED: Final = (
    f"## [Unreleased]\n\n## [{VERSION}] - 2026-11-23\n\n### Added\n\n* Everything.\n\n## [0.0.1] - 2026-01-01\n"
)
NAMED: Final = (
    "CHANGELOG.md",
    "Dockerfile",
    "pyproject.toml",
    "deploy",
    "helm",
    "docs/KUBERNETES.md",
    "tests/chart/data",
)
"""Files of the repository that contain the project's version."""

RELEASE: Final = os.environ.get("TEST_RELEASE")


def git(root: Path, *words: str) -> str:
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *who, *words], cwd=root, capture_output=True, text=True, check=True).stdout


def replace(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("release")
    for name in NAMED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile)(ROOT / name, root / name)
    (root / "CHANGELOG.md").write_text(DATED)
    git(root, "init", "--quiet")
    git(root, "add", "--all", "--force")
    git(root, "commit", "--quiet", "--message", "first")
    return root


@pytest.fixture
def tree(committed: Path) -> Path:
    """A git repository whose commit can be released. The fixture undoes the changes of the previous test."""
    git(committed, "reset", "--quiet", "--hard", git(committed, "rev-list", "--max-parents=0", "HEAD").strip())
    git(committed, "clean", "--quiet", "--force", "-d", "-x")
    git(committed, "tag", "--delete", *git(committed, "tag").split())
    return committed


def test_a_clean_tree_with_a_changelog_section_is_released(tree: Path) -> None:
    assert list(refusals(tree)) == list(refusals(tree, f"v{VERSION}")) == []
    git(tree, "tag", f"v{VERSION}")
    assert list(refusals(tree)) == []


def test_uncommitted_changes_prevent_a_release(tree: Path) -> None:
    (tree / "kvbus.py").touch()
    replace(tree / "Dockerfile", "ENTRYPOINT", "# ENTRYPOINT")
    (reason,) = refusals(tree)
    assert "changed since the last commit" in reason
    assert {"Dockerfile", "kvbus.py"} <= set(re.findall(r"[\w.]+", reason))


def test_a_version_that_is_missing_in_a_file_prevents_a_release(tree: Path) -> None:
    replace(tree / "pyproject.toml", f'version = "{VERSION}"', 'version = "9.9.9"')
    replace(tree / "CHANGELOG.md", f"[{VERSION}]", "[9.9.9]")
    git(tree, "commit", "--quiet", "--all", "--message", "second")
    (reason,) = refusals(tree, "v9.9.9")
    assert {"Dockerfile", "helm/kvbus/Chart.yaml", "helm/kvbus-lib/Chart.yaml"} <= set(re.findall(r"[\w./-]+", reason))


@pytest.mark.parametrize("version", ["1.0", "1.0.0rc1", "v1.0.0"])
def test_a_version_that_helm_cannot_read_prevents_a_release(tree: Path, version: str) -> None:
    replace(tree / "pyproject.toml", f'version = "{VERSION}"', f'version = "{version}"')
    git(tree, "commit", "--quiet", "--all", "--message", "second")
    (reason,) = refusals(tree)
    assert "must be MAJOR.MINOR.PATCH" in reason


@pytest.mark.parametrize(
    "heading", ["## [Unreleased]", f"## [{VERSION}]", f"## [{VERSION}] - soon", "## [0.0.9] - 2026-11-23"]
)
def test_a_changelog_without_the_versions_section_prevents_a_release(tree: Path, heading: str) -> None:
    (tree / "CHANGELOG.md").write_text(f"{heading}\n\n* Everything.\n")
    git(tree, "commit", "--quiet", "--all", "--message", "second")
    (reason,) = refusals(tree)
    assert f"CHANGELOG.md has no section `## [{VERSION}] - " in reason


def test_an_empty_changelog_section_gives_no_release_notes(tmp_path: Path) -> None:
    (tmp_path / "CHANGELOG.md").write_text("## [1.0.0] - 2026-11-23\n\n## [0.9.0] - 2026-01-01\n\n* Old.\n")
    assert notes(tmp_path, dated("1.0.0")) == ""
    assert notes(tmp_path, dated("0.9.0")) == "* Old."
    assert notes(tmp_path, dated("0x9.0")) == ""


def test_a_release_rehearsal_takes_its_notes_from_the_unreleased_section() -> None:
    assert len(notes(ROOT, UNRELEASED)) > 100


def test_links_in_release_notes_lead_to_the_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[page](docs/LOG.md#acls) [elsewhere](https://example.org/a) [here](#added)"
    assert complete_links(text, "1.2.3") == text
    monkeypatch.setenv("KVBUS_REPOSITORY", "https://example.org/kvbus")
    first, *others = complete_links(text, "1.2.3").split(" ")
    assert first == "[page](https://example.org/kvbus/blob/v1.2.3/docs/LOG.md#acls)"
    assert others == text.split(" ")[1:]


def test_a_wrong_or_existing_tag_prevents_a_release(tree: Path) -> None:
    (reason,) = refusals(tree, "v9.9.9")
    assert "the tag is v9.9.9" in reason
    git(tree, "tag", f"v{VERSION}")
    replace(tree / "CHANGELOG.md", "Everything", "More than everything")
    git(tree, "commit", "--quiet", "--all", "--message", "second")
    (reason,) = refusals(tree)
    assert f"v{VERSION} is another commit already" in reason


def test_an_archive_does_not_depend_on_file_times_modes_and_order(tmp_path: Path) -> None:
    packed = []
    for number, name in enumerate(("one", "two")):
        layout = tmp_path / name / "layout"
        (layout / "blobs").mkdir(parents=True, mode=0o700)
        for file in ("oci-layout", "blobs/b", "blobs/a")[:: 1 - 2 * number]:
            (layout / file).write_text(file)
            os.utime(layout / file, (number, number))
            (layout / file).chmod(0o600 + number * 0o44)
        pack(layout, tmp_path / f"{name}.tar", 1_000_000_000)
        packed.append((tmp_path / f"{name}.tar").read_bytes())
    assert packed[0] == packed[1]
    with tarfile.open(tmp_path / "one.tar") as archive:
        assert archive.getnames() == ["blobs", "blobs/a", "blobs/b", "oci-layout"]


@pytest.mark.parametrize("name", release.CHARTS)
def test_a_packed_chart_equals_helms_package_with_a_fixed_date(tmp_path: Path, name: str) -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed (.ci/tools.lock)")
    source, packed = ROOT / "helm" / name, []
    for place, date in (("a", 1_000_000_000), ("b", 1_000_000_000), ("c", 1_000_000_001)):
        (tmp_path / place).mkdir()
        chart(source, tmp_path / place, date)
        packed.append((tmp_path / place / f"{name}-{VERSION}.tgz").read_bytes())
    assert packed[0] == packed[1] != packed[2]
    by_helm = Path(helm.package(str(source), destination=str(tmp_path)))
    with tarfile.open(by_helm) as theirs, tarfile.open(tmp_path / "a" / by_helm.name) as ours:
        assert ours.getnames() == theirs.getnames()
        for each in theirs:
            assert ours.extractfile(each.name).read() == theirs.extractfile(each).read()  # type: ignore[union-attr]
            assert ours.getmember(each.name).mtime == 1_000_000_000
    if name == "kvbus":
        with (
            helm.Chart.load(str(tmp_path / "a" / by_helm.name)) as archived,
            helm.Chart.load(str(source)) as chart_there,
        ):
            assert archived.render({}, name="demo", namespace="ns") == chart_there.render(
                {}, name="demo", namespace="ns"
            )


def test_a_release_refuses_a_wheel_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    shutil.copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "kvbus-9.9.9-py3-none-any.whl").touch()
    with pytest.raises(SystemExit, match=f"is not of version {VERSION}"):
        assemble(tmp_path, tmp_path / "build" / "release")


def test_a_release_lists_its_missing_files(tmp_path: Path) -> None:
    for name in absent(tmp_path, ROOT):
        (tmp_path / name).touch()
    assert list(absent(tmp_path, ROOT)) == []
    (tmp_path / f"kvbus-{VERSION}-image-arm64.tar").unlink()
    assert list(absent(tmp_path, ROOT)) == [f"kvbus-{VERSION}-image-arm64.tar"]


@pytest.mark.skipif(not RELEASE, reason="TEST_RELEASE names no release: make release-rehearsal")
def test_a_release_has_checksums_notes_and_a_bill_of_materials() -> None:
    where = Path(str(RELEASE))
    sums = dict(line.split()[::-1] for line in (where / "SHA256SUMS").read_text().splitlines())
    assert sums.keys() == {path.name for path in where.iterdir()} - {"SHA256SUMS"}
    for name, digest in sums.items():
        with (where / name).open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == digest
    assert (where / "NOTES.md").read_text().strip()
    said = json.loads((where / f"kvbus-{VERSION}.cdx.json").read_text())
    assert said["metadata"]["component"]["name"] == "kvbus"
    assert said["metadata"]["component"]["version"] == VERSION
    assert "serialNumber" not in said, "it would be another one each time"
    lock = (ROOT / "requirements-runtime.lock").read_text()
    pinned = dict(re.findall(r"^([\w.-]+)==([^ ;\\]+) ?\\?$", lock, re.MULTILINE))
    found = {re.sub(r"[-_.]+", "-", each["name"]).lower(): each["version"] for each in said["components"]}
    assert len(pinned) > 10
    assert pinned.items() <= found.items()
