"""The documentation site: Markdown of this repository and the quickstarts, gathered for the generator.

    python docs/site/build.py build/site        the pages and zensical.toml, for `zensical build` (make site)
    python docs/site/build.py --quickstart      docs/QUICKSTART.md anew

A link that leaves the documentation leads to ``$KVBUS_REPOSITORY/blob/main/...``; without that variable its text stays.
"""  # noqa: INP001 - a script beside what it reads, not a package

from __future__ import annotations

import os
import posixpath
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from kvbus.tools.starting import ENGINES, FACTS, ROUTERS, configuration, engine_setup, ports  # noqa: E402 - found through the path above

IMAGES: Final = ("*.svg", "*.png")
_LINK: Final = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE: Final = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)

_RUN: Final = """
```
kvbus check kvbus.yaml        # every mistake at once, or the configuration in full
kvbus doctor kvbus.yaml       # every endpoint is probed: what is wrong, the key, and what to do
kvbus run kvbus.yaml
```
"""

_LOOK: Final = """
```
kvbus top                               # sources, outputs, routers, rates and reasons
kvbus dump tcp://127.0.0.1:{replay}          # the live blocks, as a router rebuilds them
```
"""


def block(engine: dict[str, Any], live: int, replay: int) -> str:
    """Return how the engine is started, as a code block."""
    return f"```{engine['language']}\n{engine_setup(engine, live, replay)}\n```\n"


def pair(engine: dict[str, Any], router: dict[str, Any]) -> str:
    """Return the quickstart of one engine with one router."""
    replay = re.findall(r"replay_endpoint: tcp://\*:(\d+)", router["output"])[0]
    return (
        f"# {engine['name']} with {router['name']}\n\n"
        f"kvbus runs beside the engine; `POD` is the address of both. How it was checked: {router['proof']}.\n\n"
        f"## 1. The engine\n\n{block(engine, *ports(router))}\n{engine['notes'].strip()}\n\n"
        f"## 2. kvbus.yaml\n\n```yaml\n{configuration(router)}```\n\n"
        f"## 3. Run it\n{_RUN}\n"
        f"## 4. The router\n\n{router['setup'].strip()}\n\n"
        f"## 5. Look at it\n{_LOOK.replace('{replay}', replay)}\n"
        f"## What to know\n\n{router['limits'].strip()}\n"
    )


def quickstart() -> str:
    """Return docs/QUICKSTART.md: every engine, every router."""
    parts = [
        "# Quickstart",
        "<!-- rendered from kvbus/tools/starting.toml: python docs/site/build.py --quickstart -->",
        FACTS["intro"].strip(),
        "## The engine",
        *(f"### {each['name']}\n\n{block(each, 5557, 5558)}\n{each['notes'].strip()}" for each in ENGINES.values()),
        "## kvbus",
        _RUN.strip(),
        "## The router",
    ]
    for router in ROUTERS.values():
        live, replay = ports(router)
        checked = f"How it was checked: {router['proof']}."
        if live != 5557:
            checked += f" The engine publishes at {live} and replays at {replay}."
        parts += [
            f"### {router['name']}\n\n{checked}\n\n```yaml\n{configuration(router)}```",
            router["setup"].strip(),
            router["limits"].strip(),
        ]
    parts += ["### Others", FACTS["others"].strip()]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """Return where each document of the repository is on the site."""
    found = {"README.md": "index.md"}
    found |= {path.name: f"project/{path.name}" for path in ROOT.glob("*.md") if path.name != "README.md"}
    documents = [path.relative_to(ROOT) for path in sorted((ROOT / "docs").rglob("*.md"))]
    return found | {str(path): str(path.relative_to("docs")) for path in documents}


def moved(text: str, source: str, where: dict[str, str], repository: str) -> str:
    """Return a document with its links as they are on the site; code stays."""
    here = where[source]

    def link(found: re.Match[str]) -> str:
        image, name, target = found.groups()
        path, hash_, anchor = target.partition("#")
        if not path or re.match(r"\w+:", path):
            return found[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if place in where or image:
            there = where.get(place, place.removeprefix("docs/"))
            anchor = re.sub("-{2,}", "-", anchor)  # as the generator makes them
            return f"{image}[{name}]({posixpath.relpath(there, posixpath.dirname(here) or '.')}{hash_}{anchor})"
        return f"[{name}]({repository}/blob/main/{place}{hash_}{anchor})" if repository else name

    # a diagram stays text: what draws it would come from elsewhere
    parts = _FENCE.split(text.replace("\n```mermaid\n", "\n```text\n"))
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def gather(target: Path, repository: str) -> None:
    """Write every page below ``target``/docs, and the generator's configuration beside it."""
    docs = target / "docs"
    shutil.rmtree(target, ignore_errors=True)
    where = pages()
    written = {there: moved((ROOT / path).read_text(), path, where, repository) for path, there in where.items()}
    rows = []
    for engine in ENGINES.values():
        cells = [f"[{each['name']}](quickstart/{engine['id']}-{each['id']}.md)" for each in ROUTERS.values()]
        rows.append(f"| **{engine['name']}** | {' | '.join(cells)} |")
        for router in ROUTERS.values():
            at = f"docs/quickstart/{engine['id']}-{router['id']}.md"
            known = where | {at: at.removeprefix("docs/")}
            # starting.toml has links as docs/QUICKSTART.md needs them, which is one level up
            text = re.sub(r"\]\((?=[A-Za-z]\w*[./])(?!\w+:)", "](../", pair(engine, router))
            written[at.removeprefix("docs/")] = moved(text, at, known, repository)
    table = f"\n| |{' |' * len(ROUTERS)}\n|---|{'---|' * len(ROUTERS)}\n" + "\n".join(rows) + "\n"
    start, _, rest = written["QUICKSTART.md"].partition("\n## The engine\n")
    written["QUICKSTART.md"] = f"{start}\nEach pair has a page:\n{table}\n## The engine\n{rest}"
    for there, text in written.items():
        (docs / there).parent.mkdir(parents=True, exist_ok=True)
        (docs / there).write_text(text)
    for image in (path for pattern in IMAGES for path in (ROOT / "docs").rglob(pattern)):
        copy = docs / image.relative_to(ROOT / "docs")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, copy)
    shutil.copy(HERE / "zensical.toml", target)


if __name__ == "__main__":
    if sys.argv[1] == "--quickstart":
        (ROOT / "docs" / "QUICKSTART.md").write_text(quickstart())
    else:
        gather(Path(sys.argv[1]), os.environ.get("KVBUS_REPOSITORY", "").rstrip("/"))
