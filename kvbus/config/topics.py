"""Topic templates: text with the placeholders ``{model}``, ``{worker}``, ``{source}`` and ``{rank}``."""

from __future__ import annotations

import string
from typing import Final

PLACEHOLDERS: Final = ("model", "worker", "source", "rank")


def fields(template: str) -> set[str]:
    """Return the placeholders that a template uses.

    Raises:
        ValueError: the template is malformed, or uses an unknown placeholder.
    """
    allowed = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    used: set[str] = set()
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"unbalanced braces ({error}); write {{{{ and }}}} for literal ones") from None
    for _, name, spec, conversion in pieces:
        if name is None:
            continue
        if name not in PLACEHOLDERS or spec or conversion:
            shown = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise ValueError(f"{{{shown}}} is not a placeholder; allowed are {allowed}")
        used.add(name)
    return used


def check_template(template: str) -> str:
    """Return the template unchanged if it is valid; else raise `ValueError`."""
    fields(template)
    return template


def render(template: str, *, model: str, worker: str, source: str, rank: int) -> bytes:
    """Fill in the placeholders of a template; return UTF-8."""
    return template.format(model=model, worker=worker, source=source, rank=rank).encode()
