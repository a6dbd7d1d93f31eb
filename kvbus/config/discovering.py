"""``sources[].discover``: which part finds the engines, with its own settings; and a source that was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from kvbus.config import parts

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class FoundRank:
    """One publisher of an engine that was found."""

    rank: int
    endpoint: str
    replay_endpoint: str | None


def checked(value: object) -> dict[str, dict[str, Any]]:
    """Return a discovery's kind with all its settings, defaults included.

    Raises:
        ValueError: it is not one kind that is installed with what it needs, or a setting is bad.
    """
    found = parts.installed(parts.DISCOVERY)
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in found:
        kinds = ", ".join(found) or "there is none"
        raise ValueError(f"must be a mapping of one kind, of those that are installed ({kinds}), to its settings")
    ((kind, given),) = value.items()
    if lacking := parts.missing(parts.DISCOVERY, kind):
        raise ValueError(lacking)
    settings = parts.load(parts.DISCOVERY, kind).Settings
    try:
        return {kind: settings.model_validate({} if given is None else given).model_dump(mode="json")}
    except ValidationError as error:
        raise ValueError("; ".join(_sentences(kind, error))) from error


def _sentences(kind: str, error: ValidationError) -> list[str]:
    from kvbus.config.problems import from_pydantic  # noqa: PLC0415 - it needs the models, which need this module

    origins: Mapping[tuple[str | int, ...], str] = {}
    problems = [
        from_pydantic({**item, "loc": (kind, *item["loc"])}, origins) for item in error.errors(include_url=False)
    ]
    return [str(problem) for problem in problems]
