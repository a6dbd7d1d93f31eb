"""What the modules of a source tree import, read from their syntax trees: nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

REACHING_OUT = {"__import__", "breakpoint", "eval", "exec", "input", "open", "print"}
"""Built-in functions that reach out of a pure module without any import."""


def module_name(root: Path, path: Path) -> str:
    """The dotted name of a file; a package's ``__init__`` has the package's."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(root: Path, package: str) -> dict[str, Path]:
    """Every module below a package, by its dotted name."""
    folder = root.joinpath(*package.split("."))
    single = folder.with_suffix(".py")
    files = [single] if single.exists() else sorted(folder.rglob("*.py"))
    return {module_name(root, path): path for path in files}


def imported(path: Path) -> Iterator[str]:
    """What a file imports anywhere in it, functions and ``TYPE_CHECKING`` included; a name from a module as one more
    part, because it may be a module itself."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{name.name}" for name in node.names)


def reaching_out(path: Path) -> Iterator[str]:
    """Built-in functions a file calls that reach out of it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REACHING_OUT:
            yield node.func.id


def belongs(name: str, allowed: set[str]) -> bool:
    """Whether a dotted name is one of the allowed ones or inside one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)


def closure(root: Path, package: str) -> dict[str, Path]:
    """The modules of a package and all of the project's own that they import, however indirectly: packages too, which
    an import of a module in them runs first."""
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
