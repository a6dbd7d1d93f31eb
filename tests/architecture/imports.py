"""Find the imports of the modules of a source tree in their syntax trees. No module of the tree is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

REACHING_OUT = {"__import__", "breakpoint", "eval", "exec", "input", "open", "print"}
"""Built-in functions that reach outside the process without any import. A pure module may not call them."""


def module_name(root: Path, path: Path) -> str:
    """Return the dotted name of a file's module. The ``__init__`` file of a package has the name of the package."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(root: Path, package: str) -> dict[str, Path]:
    """Return the file of every module in a package, by the module's dotted name."""
    folder = root.joinpath(*package.split("."))
    single = folder.with_suffix(".py")
    files = [single] if single.exists() else sorted(folder.rglob("*.py"))
    return {module_name(root, path): path for path in files}


def imported(path: Path) -> Iterator[str]:
    """Return the dotted names of all imports in a file, also those inside functions and below ``TYPE_CHECKING``.

    ``from a import b`` gives ``a.b``, because ``b`` may be a module itself.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{name.name}" for name in node.names)


def reaching_out(path: Path) -> Iterator[str]:
    """Return the built-in functions that a file calls and that reach outside the process, such as ``open``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REACHING_OUT:
            yield node.func.id


def belongs(name: str, allowed: set[str]) -> bool:
    """Return whether a dotted name is an allowed package or module, or lies inside an allowed package."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)


def closure(root: Path, package: str) -> dict[str, Path]:
    """Return the modules of a package and all modules of kvbus that they import, directly or indirectly.

    The result includes the package of each module, because Python runs a package before it imports a module in it.
    """
    known = modules(root, package.partition(".")[0])
    found: dict[str, Path] = {}
    todo = list(modules(root, package))
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found[name] = known[name]
        for target in (*imported(known[name]), name.rpartition(".")[0]):
            hit = target if target in known else target.rpartition(".")[0]
            if hit in known:
                todo.append(hit)
    return found
