"""The walls between the packages: what may import what. Each wall is broken once in a copy, and has to say so.

Overlay are import-linter's (`pyproject.toml`). What a package may use *at all* is an allow-list here, because a list of what
is forbidden never names the next module somebody thinks of.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.imports import belongs, closure, imported, modules, reaching_out

ROOT = Path(__file__).parents[2]

PURE = {
    "__future__",
    "array",
    "bisect",
    "collections",
    "enum",
    "functools",
    "hashlib",
    "itertools",
    "math",
    "msgspec",
    "operator",
    "re",
    "struct",
    "typing",
    "weakref",
    "zlib",
}
"""All that the core may import beside itself: no I/O, no clock, no chance, no thread."""

TYPES = {"mypy_extensions.i64"}
"""Below ``TYPE_CHECKING`` alone: what only a compiler reads. Nobody installs it."""

CLIENT = {"msgspec", "zmq"}
"""Third-party packages behind `kvbus.client`, however indirectly: what a wheel of the client alone depends on."""


def core_offences(root: Path) -> list[str]:
    """What the core may not import or call."""
    found = []
    for name, path in modules(root, "kvbus.core").items():
        found += [
            f"{name} imports {target}"
            for target in imported(path)
            if not belongs(target, PURE | TYPES | {"kvbus.core"})
        ]
        found += [f"{name} calls {function}" for function in reaching_out(path)]
    return found


def client_offences(root: Path) -> list[str]:
    """Third-party packages that come with the client without being among the allowed ones."""
    standard = set(sys.stdlib_module_names)
    return [
        f"{name} imports {target}"
        for name, path in closure(root, "kvbus.client").items()
        for target in imported(path)
        if target.partition(".")[0] not in standard | {"kvbus"} and not belongs(target, CLIENT | TYPES)
    ]


def layers(root: Path) -> subprocess.CompletedProcess[str]:
    """Import-linter over a tree."""
    command = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [command, "--no-cache", "--config", str(ROOT / "pyproject.toml")],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package once more, to be changed."""
    shutil.copytree(ROOT / "kvbus", tmp_path / "kvbus", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def put(root: Path, module: str, line: str) -> None:
    """Add a line to a module."""
    path = modules(root, module)[module]
    path.write_text(f"{path.read_text()}\n\n{line}\n")


def test_the_core_uses_nothing_but_what_it_may() -> None:
    assert core_offences(ROOT) == []


def test_the_client_brings_nothing_but_what_it_may() -> None:
    assert client_offences(ROOT) == []


@pytest.mark.parametrize(
    "line",
    [
        "import kvbus.state.sqlite",
        "import ssl",
        "import subprocess",
        "import random",
        "import select",
        "import time",
        "from kvbus import transport",
        "import os.path",
        "def late():\n    import logging",
        "x = __import__('socket')",
        "y = open('/dev/null')",
        "print('here')",
    ],
)
def test_a_hole_in_the_wall_around_the_core_is_found(copy: Path, line: str) -> None:
    put(copy, "kvbus.core.blocks.index", line)
    assert len(core_offences(copy)) == 1


@pytest.mark.parametrize("module", ["kvbus.client.view", "kvbus.transport.sockets", "kvbus.core.types"])
def test_a_dependency_that_the_client_would_bring_along_is_found(copy: Path, module: str) -> None:
    put(copy, module, "import pydantic")
    assert len(client_offences(copy)) == 1


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("kvbus.transport.sockets", "import kvbus.http.answers", "no package imports one above it"),
        ("kvbus.config.values", "import kvbus.transport.sockets", "no package imports one above it"),
        ("kvbus.core.wire.frames", "import kvbus.core.blocks.index", "inside the core"),
        ("kvbus.core.blocks.index", "import kvbus.core.relay", "inside the core"),
        ("kvbus.tools.capture.format", "import kvbus.tools.sim.cache", "inside the tools"),
        ("kvbus.tools.sim.cache", "import kvbus.daemon.runtime", "know no bus"),
        ("kvbus.parts.log.record", "import kvbus.parts.discovery.contract", "inside the parts"),
        ("kvbus.daemon.daemon", "import zmq", "only transport imports zmq"),
        ("kvbus.http.entries", "import prometheus_client", "only telemetry and the index import prometheus_client"),
    ],
)
def test_a_hole_in_a_layer_is_found(copy: Path, module: str, line: str, broken: str) -> None:
    put(copy, module, line)
    told = layers(copy)
    assert told.returncode == 1, told.stdout + told.stderr
    assert any(broken in row and "BROKEN" in row for row in told.stdout.splitlines()), told.stdout
    assert "1 broken" in told.stdout
