"""Results are told as they are, and the document is what was rendered from the committed ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .__main__ import save
from .render import BEGIN, DOCUMENT, END, RESULTS, into_document, load, svg, tables
from .report import Section, Series, Table, Target, from_json, markdown, number, plain, ratios, target_rows


def a_section() -> Section:
    section = Section("core", "The core")
    section.targets.append(Target("cost", "cost a block", Series([3.0, 1.0, 2.0], "us"), 2.0))
    section.targets.append(Target("rate", "rate", Series([0.5, 0.9, 0.7], "x"), 1.0, ">="))
    table = Table("Rates", ["", "blocks/s"])
    table.add("kvbus", 1234567.8)
    section.tables.append(table)
    section.plot("Rates", "blocks/s", {"kvbus": Series([1.0, 4.0, 2.0])})
    section.notes.append("A note.")
    return section


def test_the_median_is_reported_with_the_extremes():
    series = Series([3.0, 1.0, 2.0], "us")
    assert (series.median, series.spread) == (2.0, "1.00 to 3.00")
    assert Series([3.0]).spread == "one run"


def test_a_target_is_met_by_the_median_on_its_side_of_the_bound():
    cost, rate = a_section().targets
    assert cost.met
    assert not rate.met
    assert Target("cost", "cost", Series([2.01]), 2.0).met is False


def test_ratios_are_of_the_same_turn():
    assert ratios([2.0, 9.0], [1.0, 3.0]).values == [2.0, 3.0]
    assert ratios([2.0], [-5.0], floor=1.0).values == [2.0]


@pytest.mark.parametrize(("count", "passed_over"), [(1, 0), (4, 0), (5, 0), (7, 0), (8, 1), (10, 1), (11, 2), (20, 5)])
def test_the_upper_bound_of_a_median_is_a_value_that_it_exceeds_once_in_twenty(count, passed_over):
    assert Series([float(i) for i in range(count)]).upper == count - 1 - passed_over


def test_a_sure_target_is_met_by_its_upper_bound():
    measured = Series([1.0, 1.1, 1.2, 1.3, 1.6], "x")
    assert Target("a", "rate", measured, 1.5).met
    sure = Target("a", "rate", measured, 1.5, surely=True)
    assert not sure.met
    (row,) = target_rows([sure])
    assert row[2] == "1.20 x, surely ≤ 1.60"


@pytest.mark.parametrize(
    ("value", "told"),
    [(0, "0"), (0.1234, "0.123"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234"), (-150.2, "-150")],
)
def test_numbers_have_three_digits(value, told):
    assert number(value) == told


def test_results_survive_the_file():
    section = a_section()
    assert from_json(json.loads(json.dumps(section.to_json()))) == section


def test_a_part_measured_again_replaces_itself_and_no_other(tmp_path):
    path = tmp_path / "bench" / "results.json"
    about = {"core": "compiled", "quick": True, "runs": 1, "seconds": 3}
    late, core = Section("late", "Late routers"), a_section()
    for section in (late, core, Section("late", "Late routers, again")):
        save(path, section, about)
    parts = load(path)
    assert [section.title for _, section in parts] == ["The core", "Late routers, again"]
    assert all(known["quick"] and known["machine"]["cores"] for known, _ in parts)
    told = tables(parts)
    assert ", one run, short, compiled core)" in told
    assert told.index("### The core") < told.index("### Late routers, again")


def test_sizing_names_what_was_measured_and_no_more():
    about: dict[str, Any] = {
        "date": "2026-11-22",
        "machine": {"processor": "P", "cores": 2, "memory_gib": 8, "system": "L", "python": "3"},
    }
    about |= {"core": "pure", "quick": True, "runs": 1, "seconds": 1}
    section = a_section()
    assert "### Sizing" not in tables([(about, section)])
    section.facts = {"bytes 8x8": 170.0, "bytes 1x1": 300.0, "base MiB": 60.0, "rank %": 0.7}
    assert "| source" not in tables([(about, section)])
    section.facts |= {"source %": 0.5, "source MiB": 0.25, "connection %": 0.02, "connection MiB": 0.04}
    told = tables([(about, section)])
    assert "| source, 50 batches of 8 blocks a second | 0.5 | 0.25 |" in told
    assert "1,000 batches of one block a second" not in told


def test_both_forms_say_what_is_not_met():
    section = a_section()
    assert "| rate | ≥ 1.00 x | 0.7 x | 0.5 to 0.9 | **not met** |" in markdown(section)
    assert "not met" in plain(section)
    assert "1,234,568" in plain(section)


def test_a_document_without_marks_is_refused():
    assert into_document(f"a {BEGIN} old {END} b", "new") == f"a {BEGIN}\n\nnew\n\n{END} b"
    with pytest.raises(ValueError, match="has no part"):
        into_document("no marks", "new")


def test_the_document_is_rendered_from_the_committed_results():
    if not RESULTS.exists():
        pytest.skip("no results are committed")
    parts = load(RESULTS)
    document = DOCUMENT.read_text()
    again = "python -m tests.bench --render"
    assert into_document(document, tables(parts)) == document, again
    assert RESULTS.with_suffix(".svg").read_text() == svg(parts), again
