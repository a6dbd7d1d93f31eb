"""Build the documentation site: collect the repository's Markdown files and generate the pages of routers.

    python docs/site/build.py build/site        write the pages and zensical.toml, for `zensical build` (make site)
    python docs/site/build.py --routers         generate docs/routers again

A link to a file outside the documentation leads to ``$KVBUS_REPOSITORY/blob/main/...``. Without that variable, the link
becomes plain text.
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

_RUN: Final = """```
kvbus check kvbus.yaml        # prints all errors, or the complete configuration
kvbus run kvbus.yaml
```"""

_SIMULATED: Final = """\
Start vLLM or SGLang with one of these commands, and read the notes about [vLLM](README.md#vllm) or
[SGLang](README.md#sglang). To try this page's steps without a GPU, run `kvbus sim --endpoint 'tcp://*:{}'
--replay-endpoint 'tcp://*:{}'` instead of an engine."""

_NAMES: Final = """\
On this page, `POD` is the address of the engine and of kvbus, and `MODEL` is the model's name. First
[install kvbus](../OPERATIONS.md#install)."""

_SEEN: Final = """\
`doctor` probes every endpoint, and prints the problems or `nothing is wrong`. With `--router PROFILE`, it also compares
the batches that kvbus sends with the rules of the router's decoder. `dump` rebuilds the live blocks as a router does,
and prints their number. The router understands the stream if it counts as many blocks as `dump` prints."""

_INDEX: Final = """# Routers

The page of each router has the ports, the engine's command, `kvbus.yaml`, the router's settings, the steps in
Kubernetes, and what does not work. `kvbus init` writes a `kvbus.yaml` with the same steps as comments.
"""

_KUBERNETES: Final = """\
Add kvbus to the engine's pod as a sidecar, in [one of three ways](../KUBERNETES.md#which-way). You need
[the image](../KUBERNETES.md#the-image) and a checkout of kvbus. The engine publishes to kvbus on loopback:

```
--kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "",
  "endpoint": "tcp://127.0.0.1:15557", "replay_endpoint": "tcp://127.0.0.1:15657"}'
```

For SGLang, use the same `--kv-events-config` without `enable_kv_cache_events`."""

_KUBERNETES_LOOK: Final = """\
Check that it works:

```sh
kubectl get pods -l kvbus/sidecar=true   # POD is one of them
kubectl exec POD -c kvbus -- kvbus doctor
kubectl exec POD -c kvbus -- kvbus dump --replay-endpoint tcp://127.0.0.1:REPLAY
```"""

_COMPOSE: Final = """\
Replace the file `deploy/kvbus.yaml` by the `kvbus.yaml` of this page. In [compose.yaml](../../deploy/compose.yaml), set
`KVBUS_SOURCES__0__ENDPOINT` and `KVBUS_SOURCES__0__REPLAY_ENDPOINT` to your engine's endpoints.

```
docker compose -f deploy/compose.yaml up --build
```"""


def block(engine: dict[str, Any], live: int, replay: int) -> str:
    """Return the command or configuration that starts an engine, as a code block."""
    return f"```{engine['language']}\n{engine_setup(engine, live, replay)}\n```"


def section(engine: dict[str, Any]) -> str:
    """Return the section of the index about an engine. It has the setup only if the routers' pages do not have it."""
    setup = f"{block(engine, 5557, 5558)}\n\n" if engine["id"] == "tensorrt-llm" else ""
    return f"### {engine['name']}\n\n{setup}{engine['notes'].strip()}"


def picture(router: dict[str, Any]) -> str:
    """Return a picture of the ports of engine, kvbus and router as text, and sentences about them."""
    live, replay = ports(router)
    ours, ours_replay = re.findall(r"endpoint: tcp://\*:(\d+)", router["output"])
    return (
        f"```text\nengine {live}  ── events ─▶  kvbus {ours}  ── events ─▶  {router['name']}\n"
        f"engine {replay}  ◀─ replay ──  kvbus {ours_replay}  ◀─ replay ──  {router['name']}\n"
        f"                            kvbus 9477  ── page, /metrics\n```\n\n"
        f"The router needs kvbus's port {ours}, and port {ours_replay} for replays. In Kubernetes, the engine uses the "
        f"ports 15557 and 15657 on loopback, so that no other pod can bypass kvbus."
    )


def page(router: dict[str, Any]) -> str:
    """Return the Markdown text of a router's page."""
    replay = re.findall(r"replay_endpoint: tcp://\*:(\d+)", router["output"])[0]
    shown = (each for each in ENGINES.values() if each["id"] != "tensorrt-llm")
    engines = (f"### {each['name']}\n\n{block(each, *ports(router))}" for each in shown)
    parts = (
        f"# kvbus with {router['name']}",
        NOTICE,
        f"kvbus was {router['proof']}. {router['followed']}",
        _NAMES,
        f"## Ports\n\n{picture(router)}",
        f"## The engine\n\n{_SIMULATED.format(*ports(router))}",
        *engines,
        f"## kvbus\n\n```yaml\n{configuration(router)}```\n\n{_RUN}",
        f"## The router\n\n{router['setup'].strip()}",
        "## See that it works",
        f"```\nkvbus doctor kvbus.yaml\nkvbus dump --replay-endpoint tcp://127.0.0.1:{replay}\n```",
        _SEEN.replace("PROFILE", router["id"]),
        f"## Kubernetes\n\n{_KUBERNETES}",
        router["kubernetes"].strip(),
        _KUBERNETES_LOOK.replace("REPLAY", replay),
        f"## Compose\n\n{_COMPOSE}",
        f"## What does not work\n\n{router['limits'].strip()}",
    )
    return "\n\n".join(parts) + "\n"


NOTICE: Final = "<!-- rendered from kvbus/tools/starting.toml: python docs/site/build.py --routers -->"


def routers() -> dict[str, str]:
    """Return the files of docs/routers: an index, and a page for each router."""
    rows = "".join(f"| [{each['name']}]({each['id']}.md) | {each['proof']} |\n" for each in ROUTERS.values())
    table = f"| router | how it was checked |\n|---|---|\n{rows}"
    engines = "\n\n".join(map(section, ENGINES.values()))
    index = f"{_INDEX}\n{NOTICE}\n\n{table}\n## Engines\n\n{engines}\n\n## Others\n\n{FACTS['others'].strip()}\n"
    return {"README.md": index, **{f"{each['id']}.md": page(each) for each in ROUTERS.values()}}


def pages() -> dict[str, str]:
    """Return the path on the site of each document of the repository."""
    found = {"README.md": "index.md"}
    found |= {path.name: f"project/{path.name}" for path in ROOT.glob("*.md") if path.name != "README.md"}
    documents = [path.relative_to(ROOT) for path in sorted((ROOT / "docs").rglob("*.md"))]
    return found | {str(path): str(path.relative_to("docs")) for path in documents}


def moved(text: str, source: str, where: dict[str, str], repository: str) -> str:
    """Return a document with its links changed to paths on the site. Code blocks do not change."""
    here = where[source]

    def link(found: re.Match[str]) -> str:
        image, name, target = found.groups()
        path, hash_, anchor = target.partition("#")
        if not path or re.match(r"\w+:", path):
            return found[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if place in where or image:
            there = where.get(place, place.removeprefix("docs/"))
            anchor = re.sub("-{2,}", "-", anchor)  # as the site's generator makes anchors
            return f"{image}[{name}]({posixpath.relpath(there, posixpath.dirname(here) or '.')}{hash_}{anchor})"
        return f"[{name}]({repository}/blob/main/{place}{hash_}{anchor})" if repository else name

    # Mermaid diagrams are shown as text, because drawing them would need a script from another host.
    parts = _FENCE.split(text.replace("\n```mermaid\n", "\n```text\n"))
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def gather(target: Path, repository: str) -> None:
    """Write every page to ``target``/docs, and the generator's configuration to ``target``."""
    docs = target / "docs"
    shutil.rmtree(target, ignore_errors=True)
    where = pages()
    written = {there: moved((ROOT / path).read_text(), path, where, repository) for path, there in where.items()}
    for there, text in written.items():
        (docs / there).parent.mkdir(parents=True, exist_ok=True)
        (docs / there).write_text(text)
    for image in (path for pattern in IMAGES for path in (ROOT / "docs").rglob(pattern)):
        copy = docs / image.relative_to(ROOT / "docs")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, copy)
    shutil.copy(HERE / "zensical.toml", target)


if __name__ == "__main__":
    if sys.argv[1] == "--routers":
        for name, text in routers().items():
            (ROOT / "docs" / "routers" / name).write_text(text)
    else:
        gather(Path(sys.argv[1]), os.environ.get("KVBUS_REPOSITORY", "").rstrip("/"))
