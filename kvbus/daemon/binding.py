"""Name the configuration key and the remedy where kvbus cannot listen on an address."""

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
    """Add the key and the remedy of a finding to each `BindError`.

    Args:
        kind: the finding.
        at: the section of the configuration.
        name: the key in that section.
        names: the keys of the addresses that have another one.
        written: returns a key as the operator has written it.
    """
    try:
        yield
    except BindError as error:
        name = (names or {}).get(error.endpoint, name)
        finding = kind(at=at, name=name, endpoint=error.endpoint, why=error.reason, detail="", what="")
        raise error.about(written(finding.key), finding.remedy) from error
