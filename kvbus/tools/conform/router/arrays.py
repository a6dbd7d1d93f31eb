"""Events as arrays, for routers that read no maps (6.2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from kvbus.tools.conform.router.steps import Case, changed

_FIELDS: Final = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
        "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
}  # fmt: skip
"""In the order of 6.2."""


def positional(event: Any) -> Any:
    """Return a map as an array that ends with the medium, or with the last field behind it that has a value."""
    if not isinstance(event, dict):
        return event
    fields = _FIELDS.get(event["type"], ())
    values = [event.get(name) for name in fields]
    while values and values[-1] is None and fields[len(values) - 1] != "medium":
        values.pop()
    return [event["type"], *values]


def as_arrays(case: Case) -> Case:
    """Return a case for a router that reads arrays alone. What is about maps stays as it is."""
    steps = case.steps if case.maps else tuple(changed(step, positional) for step in case.steps)
    return replace(case, arrays=True, steps=steps)
