"""Tests for the rules about which package of kvbus may import which other package.

Each test also breaks its rule in a copy of kvbus, and expects an error. The rules about the layers of packages are in
`pyproject.toml`, for import-linter. The rules about everything that a package may use are allow-lists in this module: a
list of forbidden modules would always miss some.
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
"""The modules that the core may import besides its own: they do no I/O, and have no clock, random numbers or
threads.
"""

TYPES = {"mypy_extensions.i64"}
"""Names that the core may import only below ``TYPE_CHECKING``.

Only a compiler of Python code reads these names, so they need not be installed.
"""

CLIENT = {"msgspec", "zmq"}
"""Third-party packages that `kvbus.client` may import, directly or indirectly: the dependencies of the client's
wheel.
"""


def core_offences(root: Path) -> list[str]:
    """Return the core's imports that are not allowed, and its calls of functions that reach outside the process."""
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
    """Return the third-party packages that the client imports, directly or indirectly, although they are not
    allowed.
    """
    standard = set(sys.stdlib_module_names)
    return [
        f"{name} imports {target}"
        for name, path in closure(root, "kvbus.client").items()
        for target in imported(path)
        if target.partition(".")[0] not in standard | {"kvbus"} and not belongs(target, CLIENT | TYPES)
    ]


def layers(root: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter with the project's rules on a source tree, and return the finished process."""
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
def kvbus_copy(tmp_path: Path) -> Path:
    """A copy of the package kvbus, which a test may change."""
    shutil.copytree(ROOT / "kvbus", tmp_path / "kvbus", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def append_line(root: Path, module: str, line: str) -> None:
    """Append a line of code to a module in a copy of kvbus, to break a rule."""
    path = modules(root, module)[module]
    path.write_text(f"{path.read_text()}\n\n{line}\n")


def test_the_core_imports_and_calls_only_allowed_modules_and_functions() -> None:
    assert core_offences(ROOT) == []


def test_the_client_imports_only_allowed_packages() -> None:
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
def test_the_check_finds_a_forbidden_import_or_call_in_the_core(kvbus_copy: Path, line: str) -> None:
    append_line(kvbus_copy, "kvbus.core.blocks.index", line)
    assert len(core_offences(kvbus_copy)) == 1


@pytest.mark.parametrize("module", ["kvbus.client.view", "kvbus.transport.sockets", "kvbus.core.types"])
def test_the_check_finds_a_forbidden_dependency_of_the_client(kvbus_copy: Path, module: str) -> None:
    append_line(kvbus_copy, module, "import pydantic")
    assert len(client_offences(kvbus_copy)) == 1


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
def test_the_check_finds_a_forbidden_import_between_layers(
    kvbus_copy: Path, module: str, line: str, broken: str
) -> None:
    append_line(kvbus_copy, module, line)
    told = layers(kvbus_copy)
    assert told.returncode == 1, told.stdout + told.stderr
    assert any(broken in row and "BROKEN" in row for row in told.stdout.splitlines()), told.stdout
    assert "1 broken" in told.stdout
