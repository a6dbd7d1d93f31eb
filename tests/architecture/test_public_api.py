"""Tests that kvbus uses only the public API of its libraries: a private member may change with any release."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.imports import modules

ROOT = Path(__file__).parents[2]
LIBRARIES = {"aiokafka", "nats", "redis", "grpc"}
STILL = {
    "kvbus.parts.log.kafka_client": {
        "PartitionRecords",
        "_client",
        "_conns",
        "_get_conn",
        "_md_update_fut",
        "_sync_task",
    },
}
"""The private names of libraries that kvbus may use, by module.

If aiokafka's client closes while it opens a connection, the connection stays open. aiokafka also stops at a batch that
it cannot decode. It has no public way to prevent either problem.
"""


def private(name: str) -> bool:
    """Return whether a name is private because of its underscore. Names such as ``__init__`` are Python's own."""
    return name.startswith("_") and not name.endswith("__")


def is_self_or_cls(node: ast.AST) -> bool:
    """Return whether an expression is ``self`` or ``cls``. A class may use its own private members."""
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def offences(path: Path) -> list[str]:
    """Return the uses of private names in a module that imports one of kvbus's third-party libraries.

    A use of a private name is: a private member of another object, a private module of a library, a name that the
    module replaces in a library, or a private method of a class that inherits from a library's class.
    """
    tree = ast.parse(path.read_text())
    theirs: set[str] = set()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(each.name, each.asname or each.name.partition(".")[0]) for each in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(f"{node.module}.{each.name}", each.asname or each.name) for each in node.names]
        else:
            continue
        for name, called in names:
            if name.partition(".")[0] in LIBRARIES:
                theirs.add(called)
                found += [f"imports {name}"] * any(private(part) for part in name.split("."))
    if not theirs:
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr) and not is_self_or_cls(node.value):
            found.append(f"line {node.lineno}: uses {node.attr}")
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            root: ast.AST = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            found += [f"line {node.lineno}: replaces {node.attr}"] * (isinstance(root, ast.Name) and root.id in theirs)
        if isinstance(node, ast.ClassDef) and any(
            isinstance(name, ast.Name) and name.id in theirs for base in node.bases for name in ast.walk(base)
        ):
            found += [
                f"line {each.lineno}: overrides or adds {each.name} to a class of a library"
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and private(each.name)
            ]
    return found


def test_no_module_uses_a_private_name_of_a_library():
    found = {
        (name, offence)
        for name, path in modules(ROOT, "kvbus").items()
        for offence in offences(path)
        if not any(still in offence for still in STILL.get(name, ()))
    }
    assert found == set()


@pytest.mark.parametrize(
    "code",
    [
        "from nats.aio._private import x",
        "from aiokafka import errors\nclient._conns = {}",
        "from nats.protocol import parser\nparser.MSG_RE = 1",
        "import redis.asyncio\nredis.asyncio.Redis.close = None",
        "from nats.aio.client import Client\nclass Mine(Client):\n    async def _process_msg(self): ...",
    ],
)
def test_the_check_finds_each_kind_of_use_of_a_private_name(code, tmp_path):
    module = tmp_path / "module.py"
    module.write_text(code)
    assert offences(module)
