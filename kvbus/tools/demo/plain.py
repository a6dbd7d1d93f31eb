"""The demo without a terminal: one line per second, without control codes."""

from __future__ import annotations

from collections.abc import Iterator

from kvbus.tools.demo.screen import Match, RouterRow, Screen, SourceRow
from kvbus.tools.demo.story import Line, Tone
from kvbus.tools.demo.verdict import Verdict, counts

_LABELS = {Tone.SCENE: "scene", Tone.FAULT: "fault", Tone.BUS: "kvbus", Tone.WRONG: "WRONG", Tone.DIRECT: "direct"}


def opening(url: str) -> Iterator[str]:
    """Yield the first lines: the peers, and the address of the status page."""
    yield "kvbus demo: engines -> kvbus -> routers, and engines -> direct, all on this machine"
    yield f"status page: {url}"


def story_line(line: Line) -> str:
    """Format one line of the story."""
    return f"[{line.at:6.1f}s] {_LABELS[line.tone]}: {line.text}"


def status_line(screen: Screen) -> str:
    """Format the whole state in one line."""
    parts = [_source(row) for row in screen.sources]
    parts += [_router(row) for row in screen.routers]
    parts.append(f"sent {screen.sent.batches} queued {screen.sent.queued} dropped {screen.sent.dropped}")
    return f"[{screen.elapsed:6.1f}s] " + " | ".join(parts)


def verdict_lines(verdict: Verdict) -> Iterator[str]:
    """Yield the verdict: a line for each router and source, and a summary."""
    for item in verdict.comparisons:
        word = "equal" if item.equal else f"DIFFERENT, {item.differences()}"
        yield f"verdict: {item.router} {item.source}: {item.blocks} blocks, {word}"
    for what in verdict.unsettled:
        yield f"verdict: not at rest: {what}"
    for item in verdict.direct:
        yield f"verdict: {item.router} {item.source}: {item.blocks} blocks, {counts([item])}"
    if verdict.without:
        yield f"verdict: {verdict.without}"
    yield f"verdict: {verdict.headline}"


def _source(row: SourceRow) -> str:
    blocks = "+".join(f"{count} {tier}" for tier, count in row.tiers.items()) or "0"
    counts = row.counts
    lost = f" lost {counts.lost}" if counts.lost else ""
    missing = f" missing {counts.missing} recovered {counts.recovered}" if counts.missing else ""
    return f"{row.label} {row.state} epoch {row.epoch} {row.rate:.1f}/s {blocks} blocks{missing}{lost}"


def _router(row: RouterRow) -> str:
    match = row.match
    if match is None:
        return f"{row.name} away"
    if row.direct:
        return f"{row.name} {row.blocks} blocks, {row.missing} missing, {row.dead} dead"
    if match is Match.BEHIND:
        behind = sum(cell.behind for cell in row.cells)
        return f"{row.name} {row.blocks} blocks, {behind} batches behind"
    word = {Match.EQUAL: "equal", Match.DIFFERENT: "DIFFERENT", Match.DOWN: "engine away"}[match]
    return f"{row.name} {row.blocks} blocks, {word}"
