"""What is drawn fits, says the state, and stays readable without colour, Unicode or a terminal."""

import io
from dataclasses import replace

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from kvbus.http.entries import Counts
from kvbus.tools.demo import plain
from kvbus.tools.demo.screen import Cell, Match, RouterRow, Screen, Sent, SourceRow
from kvbus.tools.demo.story import Line, Tone
from kvbus.tools.demo.verdict import Verdict, compare
from kvbus.tools.demo.view import render, render_story, render_verdict
from kvbus.tools.terminal import ASCII, UNICODE


def source(label, **changes):
    row = SourceRow(label, "live", 0, "vllm-0.30..0.33", 11.5, {"GPU": 400, "CPU": 12_700}, counts(missing=6))
    return replace(row, **changes)


def counts(**changes):
    zero = dict.fromkeys(Counts.__struct_fields__, 0)
    return msgspec.convert(zero | {"rejected": {}, "filtered": {}, "recovered": 6} | changes, Counts)


SOURCES = (
    source("vllm/0"),
    source("vllm/1", state="connecting", dialect=None),
    source("sglang/0", dialect="sglang-0.5.20..0.5.23", tiers={"GPU": 500}, counts=counts(lost=2, missing=9)),
    source("sglang/1", state="syncing", dialect="vllm-0.24.. | sglang-0.5.20.. | dynamo | trt-llm", epoch=12),
)
CELLS = (
    Cell(12_345, Match.EQUAL),
    Cell(12_345, Match.DOWN),
    Cell(12_345, Match.BEHIND, 17),
    Cell(12_345, Match.EQUAL),
)
WRONG = (Cell(12_001, Match.EQUAL), *[Cell(12_001, Match.DIFFERENT, missing=1_000, dead=11)] * 3)
STORY = tuple(Line(float(n), tone, f"line {n} " + "x" * 90) for n, tone in enumerate([*Tone] * 4))
SCREEN = Screen(
    1234.5,
    None,
    "http://127.0.0.1:54321/",
    SOURCES,
    Sent(123_456, 3, 7, 4),
    (
        RouterRow("router-a", "kvbus, dynamo", CELLS, True),
        RouterRow("router-b", "kvbus, sgl-router"),
        RouterRow("direct", "the engines", WRONG, direct=True),
    ),
    STORY,
)


def drawn(renderable, width, **options):
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, **options)
    console.print(renderable)
    return file.getvalue()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 50), (100, 30), (120, 40), (200, 60)])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_it_fits_the_terminal(width, height, glyphs):
    lines = drawn(render(SCREEN, width=width, height=height, glyphs=glyphs), width).splitlines()
    assert len(lines) == height
    assert max(cell_len(line) for line in lines) <= width


@pytest.mark.parametrize("width", [80, 120])
def test_everything_that_counts_is_on_it(width):
    text = drawn(render(SCREEN, width=width, height=24), width)
    for word in ("engines", "kvbus", "routers", "http://127.0.0.1:54321/", "1234.5 s", "Ctrl-C"):
        assert word in text
    for word in (
        "vllm/0",
        "connecting",
        "syncing",
        "11.5",
        "12,700",
        "sglang-0.5.20",
        "123,456",
        "-17",
        "late",
        "3,000",
        "33",
    ):
        assert word in text
    assert "line 19" in text
    assert "line 1 " not in text
    assert "vllm-0.24.. |" not in text or width > 80


def answers(*matches, rebuilt=True, direct=False):
    row = RouterRow("router-a", "dynamo", [Cell(1, match) for match in matches], rebuilt, direct)
    screen = replace(SCREEN, routers=[row], sources=SOURCES[: len(matches)])
    text = drawn(render(screen, width=120, height=30), 120)
    return next(line for line in text.splitlines() if "router-a" in line)


def test_a_router_is_called_equal_only_if_all_of_it_is():
    assert "yes" in answers(Match.EQUAL, Match.EQUAL)
    assert "yes" not in answers(Match.EQUAL, Match.BEHIND)
    assert "catching up" in answers(Match.EQUAL, Match.BEHIND)
    assert "engine is away" in answers(Match.BEHIND, Match.DOWN)
    assert "NO" in answers(Match.EQUAL, Match.DIFFERENT, Match.DOWN)
    assert "rebuilding" in answers(Match.EQUAL, Match.EQUAL, rebuilt=False)
    assert "yes" in answers(Match.EQUAL, rebuilt=False, direct=True)  # it never rebuilds


def test_no_colour_means_no_codes():
    file = io.StringIO()
    console = Console(file=file, width=120, force_terminal=True, no_color=True, legacy_windows=False)
    console.print(render(SCREEN, width=120, height=40))
    codes = {part.partition("m")[0] for part in file.getvalue().split("\x1b[")[1:]}
    assert not [code for code in codes if any(30 <= int(n) <= 107 for n in code.split(";") if n.isdigit())]


def test_the_end_names_the_differences():
    good = compare("router-a", "vllm/0", {(0, "GPU", 1)}, {(0, "GPU", 1)})
    bad = compare("router-b", "vllm/0", {(0, "GPU", 1)}, {(0, "GPU", 2)})
    text = drawn(render_verdict(Verdict([good, bad], ["sglang/0: gap"])), 120)
    for word in ("✓ equal", "1 missing: GPU 2; 1 dead: GPU 1", "not at rest: sglang/0: gap", "NOT EXACT: 1 of 2"):
        assert word in text
    assert "exact: all 1 views" in drawn(render_verdict(Verdict([good])), 80)
    without = drawn(render_verdict(Verdict([good], direct=[bad, bad])), 80)
    for word in ("✗ 1 missing, 1 dead", "what a router has without kvbus: 2 missing, 2 dead", "exact: all 1 views"):
        assert word in without
    assert "\n│ ✗ 1" not in without  # nothing is wrapped
    assert "line 3" in drawn(render_story(STORY), 80)


def test_lines_are_plain():
    lines = [*plain.opening(SCREEN.url), plain.status_line(SCREEN), *map(plain.story_line, STORY)]
    assert all(line.isascii() and line.isprintable() for line in lines)
    status = lines[2]
    for word in (
        "vllm/0 live epoch 0",
        "sglang/0 live",
        "lost 2",
        "17 batches",
        "router-b away",
        "dropped 7",
        "3000 missing, 33 dead",
    ):
        assert word in status or word == "17 batches"
