"""Add the configuration key and a remedy to the error that kvbus raises if it cannot listen on an address."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from kvbus.common.errors import BindError
from kvbus.core.findings.finding import Kind


@contextmanager
def explained(
    kind: Kind,
    at: str = "",
    name: str = "endpoint",
    *,
    names: Mapping[str | None, str] | None = None,
    written: Callable[[str], str] = str,
) -> Iterator[None]:
    """Add a configuration key and a remedy to each `BindError` that is raised in the ``with`` block.

    Both come from a finding of the kind ``kind`` about the endpoint that cannot be bound.

    Args:
        kind: the kind of the finding, such as "cannot listen".
        at: the section of the configuration with the address, such as ``outputs[0]``.
        name: the configuration key of the address in that section.
        names: other configuration keys of addresses in that section, such as ``replay_endpoint``, by address.
        written: returns a configuration key as the operator has written it.
    """
    try:
        yield
    except BindError as error:
        name = (names or {}).get(error.endpoint, name)
        finding = kind(at=at, name=name, endpoint=error.endpoint, why=error.reason, detail="", what="")
        raise error.about(written(finding.key), finding.remedy) from error
