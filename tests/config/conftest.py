from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvbus.config import Config, ConfigError, load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Config]:
    """A function that loads a configuration from YAML text, environment variables and overrides.

    By default, it adds one source and one output.
    """

    def _read(text: str | None = None, *, env: dict[str, str] | None = None, **overrides: Any) -> Config:
        path = None
        if text is not None:
            path = tmp_path / "kvbus.yaml"
            path.write_text(text)
        flags = overrides.pop("flags", {})
        return load(path, env=env or {}, overrides={**flags, **overrides})

    return _read


@pytest.fixture
def problems(read: Callable[..., Config]) -> Callable[..., dict[str, str]]:
    """A function that loads an invalid configuration, and returns the complete line of the error about each key."""

    def _problems(text: str | None = None, **kwargs: Any) -> dict[str, str]:
        with pytest.raises(ConfigError) as caught:
            read(text, **kwargs)
        return {problem.key: str(problem) for problem in caught.value.problems}

    return _problems
