"""The demo on a terminal: one screen, at least 80 columns wide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvbus.tools.demo.screen import Cell, Match, RouterRow, Screen, SourceRow
from kvbus.tools.demo.story import Line, Tone
from kvbus.tools.demo.verdict import Verdict, counts
from kvbus.tools.terminal import UNICODE, Glyphs, counted, panel, plain_table, short_dialect, state_cell

_WIDE: Final = 110
_MIN_STORY: Final = 3

_TONES: Final = {Tone.SCENE: "dim", Tone.FAULT: "yellow", Tone.BUS: "green", Tone.WRONG: "red bold", Tone.DIRECT: "red"}


def _tone_sign(glyphs: Glyphs, tone: Tone) -> str:
    signs = {Tone.SCENE: glyphs.away, Tone.FAULT: glyphs.fault, Tone.BUS: glyphs.good}
    return signs.get(tone, glyphs.bad)


def render(screen: Screen, *, width: int, height: int, glyphs: Glyphs = UNICODE) -> RenderableType:
    """Draw a screen for a terminal of this many columns and lines."""
    wide = width >= _WIDE
    parts: list[RenderableType] = [
        _head(screen, glyphs, wide=wide),
        _flow(screen, glyphs, wide=wide),
        panel(_sources(screen.sources, glyphs, wide=wide), "what kvbus sees of the engines", "cyan"),
        panel(_routers(screen, glyphs, wide=wide), "what the routers believe", "green", _signs(glyphs)),
    ]
    used = 2 + (len(screen.sources) + 3) + (len(screen.routers) + 3)
    room = max(_MIN_STORY, height - used - 2)
    lines: list[Text] = []
    for line in reversed(screen.story):
        # a wrapped line would take two rows: truncate each, with the newest at the bottom
        text = _line(line, glyphs)
        text.truncate(width - 4, overflow="ellipsis")
        lines.append(text)
        if len(lines) == room:
            break
    lines.reverse()
    lines += [Text()] * (room - len(lines))
    parts.append(panel(Group(*lines), "story", "yellow", _tones(glyphs)))
    return Group(*parts)


def render_story(lines: Sequence[Line], glyphs: Glyphs = UNICODE) -> RenderableType:
    """Draw the story, for the end."""
    return panel(Group(*(_line(line, glyphs) for line in lines)), "story", "yellow")


def render_verdict(verdict: Verdict, glyphs: Glyphs = UNICODE) -> RenderableType:
    """Draw the verdict, one row for each router and source."""
    table = plain_table(expand=False)
    for name in ("router", "source", "engine has", "router has", "difference"):
        table.add_column(name, justify="right" if name.endswith("has") else "left")
    for item in verdict.comparisons:
        style = "green" if item.equal else "red bold"
        word = f"{glyphs.good} equal" if item.equal else f"{glyphs.bad} {item.differences()}"
        blocks = item.blocks - len(item.missing) + len(item.dead)
        table.add_row(item.router, item.source, f"{item.blocks:,}", f"{blocks:,}", Text(word, style))
    colour = "green" if verdict.equal else "red"
    sign = glyphs.good if verdict.equal else glyphs.bad
    for item in verdict.direct:
        held = item.blocks - len(item.missing) + len(item.dead)
        word = f"{glyphs.good} equal" if item.equal else f"{glyphs.bad} {counts([item])}"
        table.add_row(item.router, item.source, f"{item.blocks:,}", f"{held:,}", word, style="red")
    rows: list[RenderableType] = [table] if verdict.comparisons else []
    rows += [Text(f"{glyphs.bad} not at rest: {what}", "red bold") for what in verdict.unsettled]
    if verdict.without:
        rows.append(Text(f"{glyphs.bad} {verdict.without}", "red"))
    rows.append(Text(f"{sign} {verdict.headline}", f"{colour} bold"))
    return panel(Group(*rows), "verdict: each router against each engine's own cache", colour)


def _head(screen: Screen, glyphs: Glyphs, *, wide: bool) -> Table:
    head = Table.grid(expand=True, padding=0)
    head.add_column(no_wrap=True)
    head.add_column(justify="right", no_wrap=True)
    time = f"{screen.elapsed:5.1f} s" + ("" if screen.seconds is None else f" of {screen.seconds:g}")
    end = "Ctrl-C: verdict" if screen.seconds is None else "then the verdict" if wide else ""
    title = Text.assemble((" kvbus demo ", "reverse bold"), "  ", (time, "bold"))
    title.append(f" {glyphs.away} {end}" if end else "", "dim")
    page = Text.assemble(("status page ", "dim"), (screen.url, f"underline link {screen.url}"))
    head.add_row(title, page)
    return head


def _flow(screen: Screen, glyphs: Glyphs, *, wide: bool) -> Text:
    arrow = (f" {glyphs.arrow} ", "dim")
    sent = screen.sent
    entering = f"{sum(row.rate for row in screen.sources):.0f} batches/s"
    parts = [("sent", sent.batches, ""), ("queued", sent.queued, "yellow"), ("dropped", sent.dropped, "red bold")]
    if wide:
        parts.append(("replays", sent.replays, ""))
    leaving = Text("  ").join(Text.assemble((f"{name} ", "dim"), counted(count, style)) for name, count, style in parts)
    return Text.assemble(
        ("engines", "cyan bold"), arrow, (entering, "dim"), arrow, ("kvbus", "bold"), arrow, leaving, arrow,
        ("routers", "green bold"), no_wrap=True, justify="center",
    )  # fmt: skip


def _sources(rows: Sequence[SourceRow], glyphs: Glyphs, *, wide: bool) -> Table:
    table = plain_table()
    table.add_column("engine", no_wrap=True)
    table.add_column("state", min_width=12, no_wrap=True)
    table.add_column("epoch", justify="right", no_wrap=True)
    table.add_column("dialect", no_wrap=True, overflow="ellipsis")
    tiers = list(dict.fromkeys(["GPU", *(medium for row in rows for medium in row.tiers)]))
    numbers = ["/s", *tiers, "miss", "recov", "lost"]
    if wide:
        numbers = ["batches/s", *(f"{tier} blocks" for tier in tiers), "missing", "recovered", "lost"]
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        dialect = row.dialect or ""
        table.add_row(
            Text(row.label, "bold"),
            state_cell(row.state, glyphs),
            str(row.epoch),
            Text(dialect if wide else short_dialect(dialect), "dim"),
            f"{row.rate:.1f}",
            *(f"{row.tiers[tier]:,}" if tier in row.tiers else Text(glyphs.away, "dim") for tier in tiers),
            counted(row.counts.missing, "yellow"),
            counted(row.counts.recovered, "green"),
            counted(row.counts.lost, "red bold"),
        )
    return table


def _routers(screen: Screen, glyphs: Glyphs, *, wide: bool) -> Table:
    table = plain_table()
    table.add_column("router", no_wrap=True)
    if wide:
        table.add_column("reads", no_wrap=True)
    for row in screen.sources:
        table.add_column(row.label, justify="right", no_wrap=True, min_width=9)
    for name in ("missing", "dead"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("equal to the engines" if wide else "equal?", min_width=7, no_wrap=True)
    for router in screen.routers:
        reads = [Text(router.reads, "dim")] if wide else []
        cells = [_cell(cell, glyphs) for cell in router.cells] or [Text("")] * len(screen.sources)
        wrong = [Text(glyphs.away, "dim")] * 2
        if router.match in (Match.EQUAL, Match.DIFFERENT):
            wrong = [counted(count, "red bold") for count in (router.missing, router.dead)]
        table.add_row(
            Text(router.name, "red bold" if router.direct else "bold"), *reads, *cells, *wrong,
            _answer(router, wide=wide),
        )  # fmt: skip
    return table


def _cell(cell: Cell, glyphs: Glyphs) -> Text:
    sign, style = {
        Match.EQUAL: (glyphs.equal, "green bold"),
        Match.DIFFERENT: (glyphs.unequal, "red bold"),
        Match.BEHIND: (f"-{cell.behind}", "yellow"),
        Match.DOWN: (glyphs.away, "magenta"),
    }[cell.match]
    return Text.assemble(f"{cell.blocks:,} ", (f"{sign:<3}", style))


def _answer(router: RouterRow, *, wide: bool) -> Text:
    match = router.match
    if match is None:
        return Text("joins late" if wide else "late", "dim")
    if match is Match.DIFFERENT:
        return Text("NO", "red bold")
    if not router.rebuilt and not router.direct:
        return Text("rebuilding" if wide else "rebuild", "cyan")
    if match is Match.EQUAL:
        return Text("yes", "green bold")
    if match is Match.BEHIND:
        return Text("catching up" if wide else "soon", "yellow")
    return Text("engine is away" if wide else "away", "magenta")


def _line(line: Line, glyphs: Glyphs) -> Text:
    style = _TONES[line.tone]
    who = {Tone.BUS: "kvbus: ", Tone.DIRECT: "direct: "}.get(line.tone, "")
    return Text.assemble(
        (f"{line.at:6.1f} ", "dim"), (f"{_tone_sign(glyphs, line.tone)} ", style), (who, "bold"), (line.text, style)
    )


def _signs(glyphs: Glyphs) -> Text:
    return Text.assemble(
        (f" {glyphs.equal} ", "green bold"), ("as the engine's own cache  ", "dim"),
        (" -n ", "yellow"), ("batches behind  ", "dim"),
        (f" {glyphs.unequal} ", "red bold"), ("different ", "dim"),
    )  # fmt: skip


def _tones(glyphs: Glyphs) -> Text:
    return Text.assemble(
        (f" {glyphs.fault} ", "yellow"), ("what is done to it  ", "dim"),
        (f" {glyphs.good} ", "green"), ("what kvbus made of it ", "dim"),
    )  # fmt: skip
