"""``kvbus conform engine``: which clauses an engine's publisher keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvbus.cli.conform.options import deliver, report_options


@click.command("engine")
@click.argument("subject", metavar="ENDPOINT|FILE")
@report_options
def command(*, subject: str, **shown: Any) -> None:
    """Judge an engine's publisher, or a recording of one, clause by clause.

    \b
    Examples:
      kvbus conform engine stream.jsonl.gz

    Each clause is kept, broken (with the bytes that show it), or not seen (with what to do to see it).

    Exit codes: 0 no MUST is broken, 1 one is (with --strict a SHOULD, too), 2 nothing could be judged.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    from kvbus.capture.format import read_capture  # noqa: PLC0415 - imported on use
    from kvbus.conform.engine.recording import judge_recording  # noqa: PLC0415 - imported on use

    deliver(judge_recording(subject, read_capture(Path(subject))), **shown)
