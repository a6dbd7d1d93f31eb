"""Texts that set up an engine and a router with kvbus. ``kvbus init`` and the documentation share them.

The texts are in ``starting.toml``. This module imports only the standard library, because the documentation is built
without kvbus's dependencies.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from textwrap import indent
from typing import Any, Final

FACTS: Final[dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ENGINES: Final[dict[str, dict[str, Any]]] = {each["id"]: each for each in FACTS["engine"]}
ROUTERS: Final[dict[str, dict[str, Any]]] = {each["id"]: each for each in FACTS["router"]}

_FENCE: Final = re.compile(r"```\w*\n(.*?)\n```", re.DOTALL)
_LINK: Final = re.compile(r"(?: \(|: )\[[^\]]+\]\([^)]+\)\)?|\[([^\]]+)\]\([^)]+\)")
"""Match a link to a page of the documentation. Such links are removed, because an installation does not have the pages.

`commented` deletes a link in parentheses or after a colon. It replaces any other link by the link's text.
"""


def ports(router: dict[str, Any]) -> tuple[int, int]:
    """Return the live port and the replay port that the engine must use if this router reads from kvbus."""
    live, replay = router.get("engine_ports", (5557, 5558))
    return live, replay


def engine_setup(engine: dict[str, Any], live: int, replay: int) -> str:
    """Return the command or the file that starts the engine with its event publisher.

    ``live`` and ``replay`` are the ports of the publisher.
    """
    text: str = engine["setup"].strip()
    return text.replace("{live}", str(live)).replace("{replay}", str(replay))


def configuration(router: dict[str, Any]) -> str:
    """Return the complete text of ``kvbus.yaml`` for any engine and this router."""
    live, replay = ports(router)
    source = f"sources:\n  - endpoint: tcp://127.0.0.1:{live}\n    replay_endpoint: tcp://127.0.0.1:{replay}\n"
    return f"{router.get('top', '').lstrip()}{source}outputs:\n{router['output'].strip(chr(10))}\n"


def commented(engine: dict[str, Any], router: dict[str, Any], *, model: str, host: str, path: str) -> str:
    """Return the text of ``kvbus.yaml`` for an engine and a router, with the setup steps in comments at the top.

    Args:
        engine: one of ``ENGINES``.
        router: one of ``ROUTERS``.
        model: name of the model, as requests use it.
        host: address at which the router reaches the machine.
        path: path to which the user writes the file.
    """
    run = f"kvbus doctor {path}     # probes every endpoint, and says what is wrong and what to do\nkvbus run {path}"
    parts = (
        f"{engine['name']}, kvbus and {router['name']}: a configuration and three steps.",
        f"1. Start {engine['name']}:",
        f"```\n{engine_setup(engine, *ports(router))}\n```",
        engine["notes"],
        "2. Start kvbus beside the engine, with this file:",
        f"```\n{run}\n```",
        f"3. Point {router['name']} at kvbus:",
        router["setup"],
        f"What does not work with {router['name']}:",
        router["limits"],
    )
    text = _FENCE.sub(lambda found: indent(found[1], "    "), "\n\n".join(part.strip() for part in parts))
    lines = (f"# {line}".rstrip() for line in _LINK.sub(lambda found: found[1] or "", text).splitlines())
    return "\n".join((*lines, "", configuration(router))).replace("MODEL", model).replace("POD", host)
