"""The views of ``kvbus top``: the newest state of a bus (a moment) as a terminal screen, as plain lines or as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvbus.core.findings.finding import Reported
from kvbus.tools.terminal import UNICODE, Glyphs, counted, panel, plain_table, short_dialect, state_cell
from kvbus.tools.top.moment import History, Moment, Output, batches_of, of_output, of_reason

_WIDE: Final = 124
NO_ENGINE: Final = "No engine found yet"

_STALE_S: Final = 3.0
_CHART: Final = 16
_HELP: Final = (
    ("q", "quit"),
    ("? or h", "show or close this help"),
    ("j, k, arrows, page keys", "scroll the tables"),
    ("s", "sort the sources by another column"),
    ("/", "filter by a text in a name, a state or a topic; Escape ends the filter"),
    ("p, space", "pause, or continue"),
)
_COLUMNS: Final = (
    ("missing, lost", "missing: batches that did not come live; lost: missing batches that no replay had"),
    ("rejected", "events that kvbus cannot use"),
    ("queued", "batches that wait for an older batch, or for a router"),
    ("lag", "age of the oldest batch that a router lacks"),
    ("dropped", "batches that a slow router did not get; it gets the state of all blocks instead"),
    ("partial", "the engine may hold blocks that kvbus does not know"),
)
_MAX_REASONS: Final = 6

SORTS: Final = ("name", "rate", "blocks", "missing", "rejected", "queue")
"""Columns by which the sources can be sorted. ``name`` keeps the order in which the bus lists them.

Any other column puts the largest value first.
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """The user's choice of what ``kvbus top`` shows, and in which order.

    Attributes:
        sort: column by which the sources are sorted, one of :data:`SORTS`.
        wanted: filter text. Only sources, outputs and routers that contain it are shown. Empty for no filter.
        typing: whether the user is typing the filter.
        paused: whether the screen is paused.
        first: index of the first visible row, in each table that has more rows than the screen can show.
        help: whether the screen explains the keys and the columns, instead of showing the bus.
    """

    sort: str = "name"
    wanted: str = ""
    typing: bool = False
    paused: bool = False
    first: int = 0
    help: bool = False


def render(
    history: History, choice: Choice, url: str, trouble: str | None, now: float, *,
    width: int, height: int, glyphs: Glyphs = UNICODE,
) -> RenderableType:  # fmt: skip
    """Draw the newest state of the bus for a terminal with ``width`` columns and ``height`` lines.

    Args:
        history: the history of the bus, with at least one moment.
        choice: the user's choice of what is shown.
        url: base URL of the bus.
        trouble: why the last reading failed; None if it succeeded.
        now: current time, in seconds of the reader's clock.
        width: number of columns of the terminal.
        height: number of lines of the terminal.
        glyphs: the signs (symbols) that the terminal can show.
    """
    moment, wide = history.moments[-1], width >= _WIDE
    if choice.help:
        return Group(panel(_legend(_HELP), "keys", "cyan"), panel(_legend(_COLUMNS), "columns", "cyan"))
    sources = _wanted_sources(history, choice)
    outputs = [output for output in moment.outputs if _matches(choice, output.name)]
    routers = [
        r for r in moment.routers if _matches(choice, r["name"], r["peer"], r["output"], r["state"], *r["topics"])
    ]
    reasons = _reasons(history, choice)
    age = now - moment.at
    # A paused screen is old although no request has failed, because it sends no requests.
    trouble = trouble if age > _STALE_S and not choice.paused else None
    room = max(4, height - 2 - (trouble is not None) - 3 * 3 - (len(reasons) + 2 if reasons else 0))
    shown = _shares(room, len(sources), len(outputs), len(routers))
    parts: list[RenderableType] = [_head(moment, choice, url, age, glyphs, stale=trouble is not None)]
    if trouble is not None:
        parts.append(Text(f" {trouble}", "red bold", no_wrap=True, overflow="ellipsis"))
    if not moment.sources:
        parts.append(Text(f" {NO_ENGINE}", "yellow"))
    tables: list[tuple[str, Sequence[Any], Callable[[Sequence[Any]], Table]]] = [
        ("sources", sources, lambda rows: _sources(history, rows, glyphs, wide=wide)),
        ("outputs", outputs, lambda rows: _outputs(history, rows, glyphs, wide=wide)),
        ("routers", routers, lambda rows: _routers(rows, wide=wide)),
    ]
    for (title, rows, table), count in zip(tables, shown, strict=True):
        first = max(0, min(choice.first, len(rows) - count))
        part = rows[first : first + count]
        which = Text(f" {first + 1} to {first + count} of {len(rows)} ", "dim") if count < len(rows) else None
        parts.append(panel(table(part), f"{title} {len(rows)}", "cyan", which))
    if reasons:
        parts.append(panel(Group(*reasons), "reasons", "yellow"))
    parts.append(_foot(choice, glyphs))
    return Group(*parts)


def lines(history: History, choice: Choice, url: str) -> Iterator[str]:
    """Yield the newest state of the bus as plain lines, for a file or a pipe.

    Each line names its source, output or router.
    """
    moment = history.moments[-1]
    yield f"kvbus {moment.version} at {url}: up {_span(moment.age)}, {_size(moment.memory)}"
    for finding in moment.findings:
        if _matches(choice, finding.who):
            yield _line(finding)
    if not moment.sources:
        yield NO_ENGINE
    for source in _wanted_sources(history, choice):
        blocks = "+".join(f"{count} {medium}" for medium, count in source["blocks"].items()) or "0"
        counts = source["counts"]
        yield (
            f"source {source['name']}: {_state(source)}, {_source_rate(history, source):.1f}/s, {blocks} blocks, "
            f"missing {counts['missing']}, recovered {counts['recovered']}, lost {counts['lost']}, "
            f"rejected {sum(counts['rejected'].values())}, queued {source['queue_depth']}"
        )
    for output in moment.outputs:
        if _matches(choice, output.name):
            rate = history.rate(of_output(output.name, lambda each: each.batches))
            routers = "1 router" if output.routers == 1 else f"{output.routers:.0f} routers"
            yield (
                f"output {output.name}: {routers}, {rate:.1f}/s, queued {output.queued:.0f}, "
                f"lag {output.behind:.1f} s, dropped {output.dropped:.0f}"
            )
    for router in moment.routers:
        if _matches(choice, router["peer"], router["output"], router["state"]):
            yield (
                f"router {router['peer']} of {router['output']}: {router['state']}, queued {router['queued']}, "
                f"lag {router['behind_seconds']:.1f} s, dropped {router['dropped']['batches']}"
            )
    for reason, count in sorted(moment.reasons.items()):
        yield f"{reason}: {count:.0f}"


def document(history: History, choice: Choice, url: str) -> dict[str, Any]:
    """Return the newest state of the bus as a dictionary for JSON, with the rates that the screen shows."""
    moment = history.moments[-1]
    return {
        "url": url,
        "version": moment.version,
        "up_seconds": moment.age,
        "memory_bytes": moment.memory,
        "findings": msgspec.to_builtins(moment.findings),
        "sources": [
            {**source, "batches_per_second": _source_rate(history, source)}
            for source in _wanted_sources(history, choice)
        ],
        "outputs": [
            {**asdict(output), "batches_per_second": history.rate(of_output(output.name, lambda each: each.batches))}
            for output in moment.outputs
            if _matches(choice, output.name)
        ],
        "routers": [
            router for router in moment.routers if _matches(choice, router["peer"], router["output"], router["state"])
        ],
        "reasons": moment.reasons,
    }


def chart(values: Sequence[float], glyphs: Glyphs) -> str:
    """Return a bar chart of one line. Each value is one sign, whose height is relative to the largest value."""
    most = max(values, default=0.0)
    top = len(glyphs.levels) - 1
    return "".join(glyphs.levels[0 if not most else round(value / most * top)] for value in values)


def _wanted_sources(history: History, choice: Choice) -> list[dict[str, Any]]:
    found = [
        source
        for source in history.moments[-1].sources
        if _matches(choice, source["name"], source["state"], source["endpoint"], source["dialect"] or "")
    ]
    keys = {
        "rate": lambda source: _source_rate(history, source),
        "blocks": lambda source: sum(source["blocks"].values()),
        "missing": lambda source: source["counts"]["missing"],
        "rejected": lambda source: sum(source["counts"]["rejected"].values()),
        "queue": lambda source: source["queue_depth"],
    }
    key = keys.get(choice.sort)
    return found if key is None else sorted(found, key=key, reverse=True)


def _matches(choice: Choice, *texts: str) -> bool:
    return not choice.wanted or any(choice.wanted.lower() in text.lower() for text in texts)


def _source_rate(history: History, source: dict[str, Any]) -> float:
    return history.rate(batches_of(source["name"]))


def _state(source: dict[str, Any]) -> str:
    return f"{source['state']} (partial)" if source["partial"] else str(source["state"])


def _shares(room: int, *wanted: int) -> list[int]:
    """Divide ``room`` rows of the screen among tables. ``wanted`` has the number of rows of each table.

    Small tables get all their rows. The larger tables share the remaining rows equally.
    """
    shares = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda at: wanted[at])
    for done, at in enumerate(order):
        shares[at] = min(wanted[at], room // (len(wanted) - done))
        room -= shares[at]
    return shares


def _legend(words: Sequence[tuple[str, str]]) -> Table:
    legend = Table.grid(padding=(0, 2, 0, 0))
    for name, meaning in words:
        legend.add_row(Text(name, "bold"), Text(meaning))
    return legend


def _head(moment: Moment, choice: Choice, url: str, age: float, glyphs: Glyphs, *, stale: bool) -> Table:
    head = Table.grid(expand=True, padding=0)
    head.add_column(no_wrap=True)
    head.add_column(justify="right", no_wrap=True, overflow="ellipsis")
    title = Text.assemble((" kvbus top ", "reverse bold"), "  ", (url, "bold"))
    title.append(f" {glyphs.away} {moment.version} {glyphs.away} up {_span(moment.age)}", "dim")
    title.append(f" {glyphs.away} {_size(moment.memory)}", "dim")
    if stale:
        note = Text(f"as of {age:.0f} s ago", "red bold")
    elif choice.paused:
        note = Text(f"paused {_span(age)} ago", "yellow bold")
    else:
        note = Text(f"as of {max(age, 0.0):.0f} s ago", "dim")
    head.add_row(title, note)
    return head


def _foot(choice: Choice, glyphs: Glyphs) -> Text:
    if choice.typing:
        return Text.assemble(
            ("filter: ", "bold"), choice.wanted, ("_", "blink"), ("  Enter: apply  Esc: no filter", "dim")
        )
    keys = [("q", "quit"), ("?", "help"), ("s", f"sort by {choice.sort}"), ("/", f"filter {choice.wanted or 'none'}")]
    keys.append(("p", "continue" if choice.paused else "pause"))
    return Text(f" {glyphs.away} ").join(
        Text.assemble((f" {key} ", "reverse"), " ", (what, "dim")) for key, what in keys
    )


def _sources(history: History, rows: Sequence[dict[str, Any]], glyphs: Glyphs, *, wide: bool) -> Table:
    body = plain_table()
    body.add_column("source", no_wrap=True, overflow="ellipsis")
    body.add_column("state", min_width=12, no_wrap=True)
    numbers = ["batches/s", "blocks", "missing", "lost", "rejected", "queued"]
    if wide:
        body.add_column("", no_wrap=True, width=_CHART)
        body.add_column("dialect", no_wrap=True, overflow="ellipsis")
        numbers = ["batches/s", "blocks", "missing", "recovered", "lost", "rejected", "queued", "epoch"]
    for name in numbers:
        body.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        counts = row["counts"]
        state = state_cell(row["state"], glyphs)
        if row["partial"] and wide:
            state.append(" partial", "yellow")
        elif row["partial"] and row["state"] == "live":
            state = Text(f"{glyphs.dot} partial", "yellow")
        rate, blocks = f"{_source_rate(history, row):.1f}", f"{sum(row['blocks'].values()):,}"
        missing, lost = counted(counts["missing"], "yellow"), counted(counts["lost"], "red bold")
        rejected = counted(sum(counts["rejected"].values()), "red bold")
        queue = counted(row["queue_depth"], "yellow")
        cells: list[RenderableType] = [Text(row["name"], "bold"), state]
        if wide:
            cells.append(Text(chart(history.course(batches_of(row["name"]), _CHART), glyphs), "cyan"))
            recovered = counted(counts["recovered"], "green")
            cells.append(Text(short_dialect(row["dialect"] or ""), "dim"))
            cells += [rate, blocks, missing, recovered, lost, rejected, queue, str(row["epoch"])]
        else:
            cells += [rate, blocks, missing, lost, rejected, queue]
        body.add_row(*cells)
    return body


def _outputs(history: History, rows: Sequence[Output], glyphs: Glyphs, *, wide: bool) -> Table:
    body = plain_table()
    body.add_column("output", no_wrap=True, overflow="ellipsis")
    body.add_column("", no_wrap=True, width=_CHART if wide else _CHART // 2)
    names = ["batches/s", "bytes/s", "routers", "queued", "lag", "dropped", "states sent", "replays"]
    for name in names if wide else [names[0], *names[2:6]]:
        body.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        sent = of_output(row.name, lambda each: each.batches)
        cells: list[RenderableType] = [
            f"{history.rate(sent):.1f}",
            _size(history.rate(of_output(row.name, lambda each: each.bytes))),
            f"{row.routers:.0f}",
            counted(row.queued, "yellow"),
            Text(f"{row.behind:.1f} s", "yellow" if row.behind >= 1 else "dim"),
            counted(row.dropped, "red bold"),
            f"{row.states:.0f}",
            f"{row.replays:.0f}",
        ]
        course = Text(chart(history.course(sent, _CHART if wide else _CHART // 2), glyphs), "cyan")
        body.add_row(Text(row.name, "bold"), course, *(cells if wide else [cells[0], *cells[2:6]]))
    return body


def _routers(rows: Sequence[dict[str, Any]], *, wide: bool) -> Table:
    body = plain_table()
    body.add_column("router", no_wrap=True, overflow="ellipsis")
    body.add_column("state", no_wrap=True)
    body.add_column("output", no_wrap=True, overflow="ellipsis")
    if wide:
        body.add_column("topics", no_wrap=True, overflow="ellipsis")
    for name in ("queued", "lag", "dropped", "states sent"):
        body.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        colour = {"live": "green", "stalled": "red bold"}.get(row["state"], "yellow")
        topics = [Text(", ".join(topic or "(all)" for topic in row["topics"]), "dim")] if wide else []
        body.add_row(
            Text(f"{row['name']} {row['peer']}" if row["name"] and wide else row["name"] or row["peer"], "bold"),
            Text(row["state"], colour),
            Text(f"{row['output']}/{row['stream']}", "dim"),
            *topics,
            counted(row["queued"], "yellow"),
            Text(f"{row['behind_seconds']:.1f} s", "yellow" if row["behind_seconds"] >= 1 else "dim"),
            counted(row["dropped"]["batches"], "red bold"),
            str(row["state_sent"]["count"]),
        )
    return body


def _line(finding: Reported) -> str:
    return f"{finding.who}: {finding.text} [{finding.key}]: {finding.remedy}"


def _reasons(history: History, choice: Choice) -> list[Text]:
    """Return the lines of the panel "reasons": findings, and then how often kvbus refused or dropped data, by reason.

    The findings are about the bus, sources and routers. The reason whose count grows fastest comes first. At most
    ``_MAX_REASONS`` lines are returned.
    """
    moment = history.moments[-1]
    found = [
        Text.assemble((each.name if each.kind == "source" else each.who, "bold"), (f" {each.key} ", "dim"), each.text)
        for each in moment.findings
        if _matches(choice, each.who)
    ]
    counts = [(history.rate(of_reason(reason)), count, reason) for reason, count in moment.reasons.items()]
    for rate, count, reason in sorted(counts, reverse=True):
        if _matches(choice, reason):
            found.append(Text.assemble(f"{reason} ", (f"{count:,.0f}", "bold"), (f"  {rate:.1f}/s", "dim")))
    for text in found:
        text.no_wrap, text.overflow = True, "ellipsis"
    if len(found) > _MAX_REASONS:
        found[_MAX_REASONS - 1 :] = [Text(f"{len(found) - _MAX_REASONS + 1} more", "dim")]
    return found


def _span(seconds: float) -> str:
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if days >= 2:
        return f"{days:.0f} d"
    if hours >= 2:
        return f"{hours:.0f} h"
    return f"{minutes:.0f} min" if minutes >= 2 else f"{seconds:.0f} s"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
