"""Tests for the documentation site and for the pages about routers.

The configurations on these pages are valid, the generated files are up to date, and the site has every page.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.core.wire.profiles import PROFILES
from kvbus.http.answers import FILES
from kvbus.http.server import AdminServer
from kvbus.index.server import document

ROOT = Path(__file__).parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_build", ROOT / "docs" / "site" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = script()
ROUTERS = list(build.ROUTERS.values())
PAGES = ROOT / "docs" / "routers"


def checked(text: str, path: Path) -> None:
    path.write_text(text)
    done = CliRunner().invoke(main, ["check", str(path)])
    assert done.exit_code == 0, done.output


def test_the_router_pages_agree_with_their_generator() -> None:
    rendered = build.routers()
    assert {path.name: path.read_text() for path in PAGES.glob("*.md")} == rendered, (
        "out of step: python docs/site/build.py --routers"
    )


@pytest.mark.parametrize("router", ROUTERS, ids=lambda each: each["id"])
def test_every_router_page_has_a_valid_configuration_for_its_engines(router: dict[str, Any], tmp_path: Path) -> None:
    page = build.page(router)
    (text,) = re.findall(r"## kvbus\n\n```yaml\n(.+?)```", page, re.DOTALL)
    checked(text, tmp_path / "kvbus.yaml")
    engines = page.partition("## The engine\n")[2].partition("\n## ")[0]
    wanted = set(re.findall(r"tcp://127\.0\.0\.1:(\d+)", text))
    commands = re.findall(r"```\w*\n(.+?)```", engines, re.DOTALL)
    assert [set(re.findall(r"tcp://\*:(\d+)", each)) for each in commands] == [wanted] * 2, "vLLM and SGLang"
    assert not re.search(r"[{](live|replay)[}]", page)


def test_no_router_page_uses_a_port_twice() -> None:
    everywhere = {"5657": "kvbus", "5658": "kvbus", "15557": "engine", "15657": "engine", "9477": "kvbus"}
    for router in ROUTERS:
        ours = dict.fromkeys(re.findall(r"tcp://\*:(\d+)", router["output"]), "kvbus")
        engines = dict.fromkeys(map(str, build.ports(router)), "engine")
        assert not ours.keys() & engines.keys(), router["id"]
        for port, whose in (ours | engines).items():
            assert everywhere.get(port, whose) == whose, (router["id"], port)


def test_the_router_pages_show_every_profile() -> None:
    text = "".join(path.read_text() for path in PAGES.glob("*.md"))
    assert set(re.findall(r"profile: ([\w-]+)", text)) == set(PROFILES)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    build.gather(target, "")
    return target / "docs"


def test_every_document_has_a_page_on_the_site_and_valid_links(site: Path) -> None:
    pages = {str(path.relative_to(site)) for path in site.rglob("*.md")}
    assert {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} <= pages
    for page in site.rglob("*.md"):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s#]+)", text):
            assert link.startswith(("https://", "http://")) or (page.parent / link).exists(), f"{page}: {link}"


def test_a_link_to_a_source_file_leads_to_the_named_repository() -> None:
    where = build.pages()
    text = "[a](../tests/long.py) `x` [b](OPERATIONS.md#a--b) [c](#d) [e](https://f/)\n```\n[g](../h)\n```\n"
    assert build.moved(text, "docs/CLIENT.md", where, "https://forge/kvbus") == (
        "[a](https://forge/kvbus/blob/main/tests/long.py) `x` [b](OPERATIONS.md#a-b) [c](#d) [e](https://f/)\n"
        "```\n[g](../h)\n```\n"
    )
    assert build.moved(text, "docs/CLIENT.md", where, "").startswith("a `x` [b]")


def test_every_page_of_the_navigation_exists(site: Path) -> None:
    named = re.findall(r'"([\w/]+\.md)"', (ROOT / "docs" / "site" / "zensical.toml").read_text())
    assert len(named) > 10
    assert [name for name in named if not (site / name).exists()] == []


def test_the_site_generator_works_without_the_dependencies_of_kvbus() -> None:
    """The site's generator works without kvbus's dependencies, because the environment that builds the site lacks
    them.
    """
    done = subprocess.run(
        [sys.executable, "-ISc", "import runpy, sys; runpy.run_path(sys.argv[1])", ROOT / "docs" / "site" / "build.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_http_page_lists_the_paths_that_kvbus_serves() -> None:
    bus, _, index = (ROOT / "docs" / "HTTP.md").read_text().partition("## The port of an index")
    source = Path(sys.modules[AdminServer.__module__].__file__ or "").read_text()
    assert paths_of(bus) == {*FILES, *re.findall(r'^ +"(/[^"]+)": Path', source, re.MULTILINE)}
    assert paths_of(index) == set(json.loads(document())["paths"])


def paths_of(reference: str) -> set[str]:
    """Return the HTTP paths that the tables of a reference page name in their first cells."""
    rows = re.findall(r"^\| (`/[^|]*) \|", reference, re.MULTILINE)
    return {path for row in rows for path in re.findall(r"`([^`]+)`", row)}
