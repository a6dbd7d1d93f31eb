"""Write the findings of docs/RUNBOOK.md from the catalogue of findings: ``python -m tests.docs.runbook``."""

from __future__ import annotations

import re
from pathlib import Path

from kvbus.core.findings import bus, engine
from kvbus.core.findings.finding import Kind

PAGE = Path(__file__).parents[2] / "docs" / "RUNBOOK.md"
BEGIN, END = "## Findings\n", "\n## Alerts\n"

INTRO = """
A finding is a problem that kvbus has noticed. It has the same id and wording in the log, in `/sources` and `/routers`, on the
status page, in `kvbus top`, in `kvbus doctor` and here. A `problem` is certainly wrong. A `note` may be intended, or ends by
itself. A finding about refused messages ends ten minutes after the last refused message. Each section says what the finding
means, its text, the configuration key that it concerns, and what to do. `python -m tests.docs.runbook` generates the sections.
"""


def section(kind: Kind) -> str:
    """Return the section of docs/RUNBOOK.md about one finding.

    The facts that kvbus fills in, such as a number of batches, are shown as ``…``.
    """
    plain = (each.replace("{detail}", "").replace("{name}", "endpoint") for each in (kind.text, kind.key, kind.remedy))
    text, key, do = (re.sub(r"\{[^}]*\}", "…", each) for each in plain)
    remedy = f"\n* **Do:** {do}." if do != "…" else ""
    return f"### {kind.id}\n\n{kind.means}\n\n* **Says** ({kind.severity}): {text}\n* **Key:** `{key}`{remedy}\n"


def rows() -> list[Kind]:
    """Return all kinds of findings that kvbus can report."""
    return [each for module in (engine, bus) for each in vars(module).values() if isinstance(each, Kind)]


def findings() -> str:
    """Return the text of docs/RUNBOOK.md about all findings: one section for each."""
    return BEGIN + INTRO + "\n" + "\n".join(map(section, rows()))


def page(text: str) -> str:
    """Return the text of docs/RUNBOOK.md with newly generated findings."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + findings() + END + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
