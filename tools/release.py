"""Assembles the files of a release, or lists the reasons that prevent it. `make release` runs it.

    release.py check [TAG]       refuse a release that must not be made, with every reason
    release.py assemble [TAG]    put `dist`, `build/image`, charts, SBOM, notes and checksums into build/release
        --complete               refuse if a file is missing that another machine would have to build
        --rehearsal              print the reasons without refusing, and take the notes from [Unreleased]

KVBUS_REPOSITORY=https://... completes the links of the notes, because a forge shows them beside no file.

The same commit gives the same bytes with the same tools: dates are SOURCE_DATE_EPOCH, and archives are packed in order.
A maintainer with the keys publishes the release: MAINTAINERS.md.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
CHARTS: Final = ("kvbus", "kvbus-lib")
ARCHITECTURES: Final = ("amd64", "arm64")
"""Architectures of a release's images."""


def project(root: Path) -> dict[str, Any]:
    """Return the project table of pyproject.toml."""
    return dict(tomllib.loads((root / "pyproject.toml").read_text())["project"])


UNRELEASED: Final = r"\[Unreleased\]"


def dated(version: str) -> str:
    """Return the pattern of a version's heading in the changelog."""
    return rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d"


def notes(root: Path, heading: str) -> str:
    """Return a section of the changelog without its heading; empty if no heading has this pattern."""
    text = (root / "CHANGELOG.md").read_text()
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def complete_links(text: str, version: str) -> str:
    """Complete relative links, so that they lead to the files of the version's tag.

    Do nothing without KVBUS_REPOSITORY.
    """
    repository = os.environ.get("KVBUS_REPOSITORY")
    return re.sub(r"\]\((?!\w+:|#)", f"]({repository}/blob/v{version}/", text) if repository else text


def refusals(root: Path, tag: str | None = None) -> Iterator[str]:
    """Yield every reason against a release of this tree."""
    if changed := _git(root, "status", "--porcelain").splitlines():
        yield f"files have changed since the last commit: {', '.join(line[3:] for line in changed[:5])}"
    version = str(project(root)["version"])
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"pyproject.toml: version {version} must be MAJOR.MINOR.PATCH"
        return
    if tag not in {None, f"v{version}"}:
        yield f"the tag is {tag}, and pyproject.toml says version {version}: v{version}"
    tagged = _git(root, "tag", "--list", f"v{version}") and _git(root, "rev-list", "-n1", f"v{version}")
    if tagged and tagged != _git(root, "rev-parse", "HEAD"):
        yield f"v{version} is another commit already: {tagged[:12]}"
    if not notes(root, dated(version)):
        yield f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD` with anything in it"
    expected: dict[Path, str] = runpy.run_path(str(root / "helm" / "sync.py"))["expected"]()
    if behind := [path for path, text in expected.items() if not path.exists() or path.read_text() != text]:
        names = ", ".join(str(path.relative_to(root.resolve())) for path in sorted(behind))
        yield f"helm/sync.py would write {names}"


def absent(where: Path, root: Path) -> Iterator[str]:
    """Yield the missing files of a complete release."""
    version = project(root)["version"]
    wanted = [
        f"kvbus-{version}.tar.gz",
        f"kvbus-{version}.tgz",
        f"kvbus-lib-{version}.tgz",
        f"kvbus-{version}.cdx.json",
    ]
    wanted += [f"{name}-{version}-py3-none-any.whl" for name in ("kvbus", "kvbus_client")]
    wanted += [f"kvbus-{version}-image-{architecture}.tar" for architecture in ARCHITECTURES]
    return (name for name in wanted if not (where / name).exists())


def assemble(root: Path, where: Path, *, rehearsal: bool = False) -> None:
    """Put all files into an empty directory, the checksums last. A rehearsal takes the unreleased notes."""
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    version = project(root)["version"]
    date = int(os.environ["SOURCE_DATE_EPOCH"])
    for pattern in ("*.whl", "*.tar.gz"):
        for path in sorted((root / "dist").glob(pattern)):
            if re.split(r"-|\.tar\.gz", path.name)[1] != version:
                raise SystemExit(f"{path.relative_to(root)} is not of version {version}")
            shutil.copyfile(path, where / path.name)
    for name in CHARTS:
        chart(root / "helm" / name, where, date)
    for layout in sorted((root / "build" / "image").glob("*/oci-layout")):
        pack(layout.parent, where / f"kvbus-{version}-image-{layout.parent.name}.tar", date)
    bill(root, where / f"kvbus-{version}.cdx.json")
    section = notes(root, dated(version)) or (notes(root, UNRELEASED) if rehearsal else "")
    (where / "NOTES.md").write_text(f"{complete_links(section, version)}\n")
    sums = [f"{_sha256(path)}  {path.name}\n" for path in sorted(where.iterdir())]
    (where / "SHA256SUMS").write_text("".join(sums))


def chart(source: Path, where: Path, date: int) -> None:
    """Package a chart with Helm, and pack it again with one date for all files, because Helm uses the current time."""
    import helm_python  # noqa: PLC0415 - the check does not need it

    packed = Path(helm_python.package(str(source), destination=str(where)))
    with tarfile.open(packed) as archive:
        files = [(each.name, archive.extractfile(each).read()) for each in archive if each.isfile()]
    with (
        packed.open("wb") as raw,
        gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, content in files:
            plain = tarfile.TarInfo(name)
            plain.size, plain.mtime = len(content), date
            archive.addfile(plain, io.BytesIO(content))


def pack(layout: Path, target: Path, date: int) -> None:
    """Pack an image's OCI layout into an archive that docker, podman and skopeo can load."""

    def plain(each: tarfile.TarInfo) -> tarfile.TarInfo:
        each.uid = each.gid = 0
        each.uname = each.gname = ""
        each.mode, each.mtime = 0o755 if each.isdir() else 0o644, date
        return each

    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(layout.rglob("*")):
            archive.add(path, str(path.relative_to(layout)), recursive=False, filter=plain)


def bill(root: Path, target: Path) -> None:
    """Write the SBOM of the packages that requirements-runtime.lock installs."""
    tools = Path(os.environ["SBOM_HOME"])
    _run(
        *(root, tools / "bin" / "cyclonedx-py", "environment", "--output-reproducible", "--output-format", "JSON"),
        *("--pyproject", root / "pyproject.toml", "--mc-type", "application", "--output-file", target),
        tools / "runtime" / "bin" / "python",
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _git(root: Path, *words: str) -> str:
    return _run(root, "git", *words)


def _run(root: Path, *command: str | Path) -> str:
    return subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout.rstrip()  # noqa: S603


def main(command: str, *words: str) -> None:
    """Execute the command line."""
    tag = next((word for word in words if not word.startswith("-")), None)
    rehearsal = "--rehearsal" in words
    reasons, missing = list(refusals(ROOT, tag)), []
    if command == "assemble" and (rehearsal or not reasons):
        where = ROOT / "build" / "release"
        assemble(ROOT, where, rehearsal=rehearsal)
        missing = [f"there is no {name}" for name in absent(where, ROOT)]
        print((where / "SHA256SUMS").read_text(), end="")  # noqa: T201
    if "--complete" in words:
        reasons, missing = [*reasons, *missing], []
    for said, lines in (("would be refused" if rehearsal else "refused", reasons), ("missing", missing)):
        for line in lines:
            print(f"{said}: {line}", file=sys.stderr)  # noqa: T201
    sys.exit(bool(reasons) and not rehearsal)


if __name__ == "__main__":
    main(*sys.argv[1:])
