"""Tests for the page that ``kvbus top`` draws.

It fits the terminal, shows problems, and applies the sort order and filter.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from kvbus.tools.terminal import ASCII, UNICODE, Glyphs
from kvbus.tools.top.moment import History
from kvbus.tools.top.view import Choice, chart, document, lines, render
from tests.top.moments import finding, moment, output, router, source

URL = "http://127.0.0.1:9477"
ALL = Choice()
WRONG = source(
    "engine-2/1",
    300,
    state="gap",
    partial=True,
    queue_depth=17,
    counts={"missing": 9, "lost": 4, "rejected": {"block_size": 3}},
)

TRIMMED = finding(
    "partial: its history was trimmed", "sources[1].replay_endpoint", "restart it", kind="source", name="engine-2/1"
)
NO_PREFIX = finding("no group of its model carries prefixes", "groups", "groups: all", kind="source", name="engine-2/1")


def history(*sources, **changes) -> History:
    seen = History()
    seen.add(moment(1.0, *sources, **changes))
    seen.add(moment(2.0, *sources, **changes))
    return seen


def rendered_text(
    seen: History, choice: Choice = ALL, *, width=140, height=40, trouble=None, now=2.0, glyphs: Glyphs = UNICODE
) -> str:
    file = io.StringIO()
    shown = render(seen, choice, URL, trouble, now, width=width, height=height, glyphs=glyphs)
    Console(file=file, width=width, color_system=None).print(shown)
    return file.getvalue()


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (140, 40), (220, 60)])
def test_the_screen_fits_the_terminal_with_many_sources_and_routers(width, height, glyphs):
    many = history(
        *(source(f"engine-{n}/0") for n in range(300)), WRONG, routers=[router(f"10.0.0.1:{n}") for n in range(900)]
    )
    text = rendered_text(many, width=width, height=height, glyphs=glyphs)
    assert len(text.splitlines()) <= height
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "sources 301" in text
    assert " of 301 " in text
    assert "routers 900" in text


def test_the_screen_shows_each_problem_of_a_source():
    reasons = {"rejected: block_size (engine-2/1)": 3.0}
    seen = history(source("engine-1"), WRONG, reasons=reasons, findings=[TRIMMED, NO_PREFIX])
    for width in (80, 140):
        text = rendered_text(seen, width=width)
        for word in ("gap", "17", "its history was trimmed", "no group of its model", "rejected: block_size", "1.2.3"):
            assert word in text


def test_the_screen_shows_a_findings_key_and_lines_also_its_remedy():
    text, at = "router lags: its oldest unread batch is 9 s old", "outputs[0].send_hwm"
    late = finding(text, at, "give it CPU", kind="router", output="routers", peer="10.0.0.1:4711", stream=0)
    full = finding("kvbus cannot write its state: no space left", "state_dir", "make room")
    seen = history(
        source("engine-1"), WRONG, routers=[router("10.0.0.1:4711")], findings=[full, TRIMMED, NO_PREFIX, late]
    )
    screen = rendered_text(seen, width=80)
    assert "bus state_dir kvbus cannot write its state: no space left" in screen
    assert "engine-2/1 groups no group of its model carries prefixes" in screen
    assert "router 10.0.0.1:4711 outputs[0].send_hwm router lags" in screen
    printed = list(lines(seen, ALL, URL))
    assert "bus: kvbus cannot write its state: no space left [state_dir]: make room" in printed
    assert "source engine-2/1: no group of its model carries prefixes [groups]: groups: all" in printed
    assert f"router 10.0.0.1:4711: {text} [outputs[0].send_hwm]: give it CPU" in printed


def test_the_screen_sorts_sources_by_size_and_filters_them():
    few = source("b", blocks={"GPU": 1})
    seen = history(source("a", blocks={"GPU": 2}), few, source("c", blocks={"GPU": 3}))
    order = [line.split()[1] for line in rendered_text(seen, Choice(sort="blocks")).splitlines() if "live" in line][:3]
    assert order == ["c", "a", "b"]
    text = rendered_text(history(source("engine-1"), WRONG), Choice(wanted="ENGINE-2"))
    assert "engine-2/1" in text
    assert "engine-1" not in text
    assert "sources 1" in text


def test_the_screen_scrolls_a_table_with_too_many_rows():
    many = history(*(source(f"engine-{n}") for n in range(30)), routers=[router(f"10.0.0.{n}:1") for n in range(6)])
    first, last = (rendered_text(many, Choice(first=row), width=80, height=24) for row in (0, 29))
    assert "engine-0 " in first
    assert "engine-29 " not in first
    assert "10.0.0.0:1" in first
    assert "engine-0 " not in last
    assert "engine-29 " in last
    assert "10.0.0.5:1" in last, "a shorter table stops at its end"
    assert re.search(r"\d+ to 30 of 30", last)


def test_the_screen_shows_column_titles_at_80_columns():
    text = rendered_text(history(WRONG), width=80, height=24)
    for word in ("batches/s", "blocks", "missing", "lost", "rejected", "queued", "lag", "dropped", "states sent"):
        assert f" {word} " in text, word


def test_the_help_screen_names_every_key():
    text = rendered_text(history(), Choice(help=True), width=80, height=24)
    assert len(text.splitlines()) <= 24
    for word in ("quit", "scroll", "sort", "filter", "pause"):
        assert word in text


def test_the_screen_shows_a_router_by_its_name():
    seen = history(routers=[router("10.0.0.1:4711", name="router-a")])
    assert "router-a" in rendered_text(seen, width=80)
    assert "router-a 10.0.0.1:4711" in rendered_text(seen, width=140)


def test_the_json_document_of_top_has_the_rates():
    found = document(history(), ALL, URL)
    assert (found["version"], found["outputs"][0]["batches_per_second"]) == ("1.2.3", 20.0)
    first, second = History(), moment(2.0, source("engine", 20))
    first.add(moment(1.0, source("engine", 10)))
    first.add(second)
    assert document(first, ALL, URL)["sources"][0]["batches_per_second"] == 10.0
    assert document(first, Choice(wanted="nothing"), URL)["sources"] == []


def test_the_screen_shows_the_age_of_an_old_moment_and_the_reason():
    why = "no bus answers at http://127.0.0.1:9477 (connection refused)"
    text = rendered_text(history(), trouble=why, now=30.0, width=80)
    assert "as of 28 s ago" in text
    assert why in text, "whole, at any usual width"
    assert "as of 0 s ago" in rendered_text(history())
    paused = rendered_text(history(), Choice(paused=True), trouble=why, now=30.0)
    assert "paused 28 s ago" in paused
    assert why not in paused, "nobody has asked since"
    assert "filter: eng" in rendered_text(history(), Choice(typing=True, wanted="eng"))


def test_a_chart_shows_the_largest_value_as_its_highest_bar():
    assert chart([0, 4, 8], UNICODE) == " ▄█"
    assert chart([0, 4, 8], ASCII) == " =#"
    assert chart([0.0, 0.0], UNICODE) == "  "
    assert chart([], UNICODE) == ""


def test_top_prints_lines_with_the_same_content_as_the_screen():
    outputs = [output(queued=3, behind=1.25, dropped=7)]
    reasons = {"dropped: slow_router (routers)": 7.0}
    seen = history(source("engine-1"), WRONG, outputs=outputs, reasons=reasons, findings=[TRIMMED])
    said = list(lines(seen, Choice(sort="missing"), URL))
    assert said[0] == "kvbus 1.2.3 at http://127.0.0.1:9477: up 60 min, 60.0 MB"
    assert said[2].startswith("source engine-2/1: gap (partial), 0.0/s, 400 GPU blocks, missing 9")
    assert "source engine-2/1: partial: its history was trimmed [sources[1].replay_endpoint]: restart it" in said
    assert any(line.startswith("output routers: 2 routers") and "dropped 7" in line for line in said)
    assert "dropped: slow_router (routers): 7" in said
    assert not [line for line in lines(seen, Choice(wanted="engine-1"), URL) if "engine-2" in line]


def test_top_says_that_a_bus_has_no_engine():
    empty = History()
    empty.add(replace(moment(1.0), sources=[]))
    assert "No engine found yet" in rendered_text(empty)
    assert "No engine found yet" in "\n".join(lines(empty, ALL, URL))
    assert "No engine found yet" not in rendered_text(history())
