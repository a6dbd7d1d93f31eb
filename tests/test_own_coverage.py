"""What is measured of a module's own tests, and when that is wrong."""

from __future__ import annotations

import tomllib

import pytest

from tests.own_coverage import FILE, ROOT, Covered, measure, mirror_of, modules, verdict

SETTINGS = tomllib.loads(FILE.read_text())


def test_every_module_has_tests_or_says_that_it_has_none() -> None:
    assert verdict(modules(), {}, SETTINGS) == []
    for name in SETTINGS["floors"]:
        assert (ROOT / mirror_of(name, SETTINGS["mirrors"])).is_file(), name


@pytest.mark.parametrize(
    ("known", "percent", "wrong"),
    [
        (["a"], 80, []),
        (["a"], 79, ["a: 79.0 %, and its floor is 80 %"]),
        (["a", "b"], 80, ["b: no tests of its own"]),
        ([], 80, ["a: in own_coverage.toml, and no module"]),
    ],
)
def test_what_is_wrong(known: list[str], percent: int, wrong: list[str]) -> None:
    covered = {"a": Covered(percent, 100, 0, 0)} if known else {}
    assert verdict(known, covered, {"floors": {"a": 80}, "without": []}) == wrong


def test_lines_and_branches_count_alike() -> None:
    assert Covered(3, 4, 1, 4).percent == 50.0
    assert Covered(0, 0, 0, 0).percent == 100.0


def test_a_module_by_other_tests_than_its_own() -> None:
    conflict, backfill = "core/sequencing/conflict", "core/sequencing/backfill"
    tests = {name: f"tests/{name.replace('sequencing/', 'sequencing/test_')}.py" for name in (conflict, backfill)}
    own = measure(tests)
    assert own[conflict].percent == 100.0
    swapped = measure({conflict: tests[backfill], backfill: tests[backfill]})
    assert swapped[conflict].lines < own[conflict].lines, "what runs when it is imported, and no more"
    assert swapped[conflict].branches == 0
    assert swapped[backfill] == own[backfill]


def test_tests_that_fail_are_no_measure() -> None:
    with pytest.raises(RuntimeError, match="fail"):
        measure({"core/source": "tests/core/test_nothing.py"})
