"""No module of kvbus imports itself through other modules.

Imports below ``TYPE_CHECKING`` count, too: two modules that know each other's types can only be understood together.
"""

from __future__ import annotations

from pathlib import Path

from tests.architecture.imports import imported, modules

ROOT = Path(__file__).parents[2]


def graph(root: Path) -> dict[str, set[str]]:
    """Return the modules that each module of kvbus imports, by the module's name."""
    known = modules(root, "kvbus")
    return {
        name: {hit for target in imported(path) for hit in [_module(target, known)] if hit in known and hit != name}
        for name, path in known.items()
    }


def _module(target: str, known: dict[str, Path]) -> str:
    """Return the module that an imported name is or belongs to."""
    return target if target in known else target.rpartition(".")[0]


def circles(imports: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the sets of modules that import each other, directly or through other modules (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        path.append(name)
        for target in imports[name]:
            if target not in order:
                visit(target)
            if target in path:
                lowest[name] = min(lowest[name], lowest[target])
        if lowest[name] == order[name]:
            at = path.index(name)
            if len(path) - at > 1:
                found.add(frozenset(path[at:]))
            del path[at:]

    for name in imports:
        if name not in order:
            visit(name)
    return found


def test_no_module_imports_itself_through_others() -> None:
    assert circles(graph(ROOT)) == set()


def test_a_circle_is_found_through_several_modules() -> None:
    imports: dict[str, set[str]] = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert circles(imports) == {frozenset("abc"), frozenset("de")}


def test_the_graph_has_imports_below_type_checking_and_in_functions() -> None:
    imports = graph(ROOT)
    assert "kvbus.daemon.serve" in imports["kvbus.cli.run"]
    assert "kvbus.state.directory" in imports["kvbus.cli.state"]
