"""Load a configuration from a file, environment variables and the command line, and check all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from kvbus.common.errors import ConfigError, Problem
from kvbus.config import crosscheck, paths, yamlfile
from kvbus.config.layers import Layers
from kvbus.config.models import Config
from kvbus.config.problems import from_pydantic

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Look = Callable[[Config], Iterable[Problem]]
"""A function that checks the files and directories of this machine that a configuration names. It returns problems."""


def load(
    path: Path | None, *, env: Mapping[str, str], overrides: Mapping[str, Any], look: Look = lambda _config: ()
) -> Config:
    """Load the configuration.

    The command line overrides ``KVBUS_*`` variables, these override the file, and the file overrides the defaults.

    Args:
        path: the YAML file; None if there is no file.
        env: the environment. ``KVBUS_OUTPUTS__0__LAYOUT`` sets ``outputs[0].layout``. The value ``null`` means null.
            The value of a complete list or section, such as ``KVBUS_SOURCES``, is YAML or JSON.
        overrides: the values of the command line, by key path such as ``http`` or ``outputs[0].layout``. They are
            applied in order. A text is parsed like the value of a variable. A list replaces the complete list of the
            file.
        look: finds problems with files on this machine. They are reported together with the configuration's problems.

    Raises:
        ConfigError: the configuration has problems. The error lists all of them.
    """
    file = yamlfile.YamlFile({}) if path is None else yamlfile.read(path)
    layers = Layers(file, env, overrides)
    config, bad = _validated(layers)
    if bad or layers.misplaced:
        # Read again, with defaults in place of the invalid values: one run also reports the contradictions between
        # the valid keys. If the configuration is not valid even then, they stay unreported.
        again = Layers(file, env, overrides, replaced=frozenset(bad), taken=set(layers.misplaced))
        config, _ = _validated(again)
    problems = [*file.problems, *layers.problems, *bad.values()]
    if config is not None:
        config = config.completed()
        contradictions = [*crosscheck.check(config, layers.origins, frozenset(bad)), *look(config)]
        written = config.as_written
        problems += [replace(each, key=written(each.key), wrong=written(each.wrong)) for each in contradictions]
    if config is None or problems:
        raise ConfigError(problems)
    return config


def _validated(layers: Layers) -> tuple[Config | None, dict[paths.Path, Problem]]:
    """Return the configuration of these layers, or None and a problem for each invalid key."""
    try:
        return Config.model_validate({"layers": layers}), {}
    except ValidationError as error:
        items = error.errors(include_url=False)
        return None, {tuple(item["loc"]): from_pydantic(Config, item, layers.origins) for item in items}
