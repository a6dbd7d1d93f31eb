"""What every part of the configuration is made of: frozen sections, and keys that carry their documentation."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def key(
    default: Any,
    about: str,
    *,
    example: Any,
    unit: str = "",
    default_text: str | None = None,
    **bounds: float,
) -> Any:
    """Make a field that also has its documentation, an example and a unit."""
    extra = {"unit": unit, "default_text": default_text}
    given = {"default_factory": default} if callable(default) else {"default": default}
    return Field(**given, **bounds, description=about, examples=[example], json_schema_extra=extra)  # type: ignore[call-overload]


class Section(BaseModel):
    """Keys that cannot be changed once they are checked; a key that it does not have is refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=False, protected_namespaces=()
    )
