"""Load a configuration from a file, environment variables and the command line, and check all of it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from kvbus.common.errors import ConfigError, Problem
from kvbus.common.removed import removed_key
from kvbus.config import crosscheck, paths, yamlfile
from kvbus.config.models import Config
from kvbus.config.problems import example_at, from_pydantic, shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PREFIX: Final = "KVBUS_"
RESERVED: Final = frozenset({"KVBUS_CONFIG", "KVBUS_TRACEBACK", "KVBUS_TOKEN_FILE", "KVBUS_CA_FILE"})
"""Variables that set options of commands. They are not configuration keys."""

# Kubernetes sets these variables in every container for each Service of the namespace. A Service may be named kvbus, so
# kvbus must ignore them.
_SERVICE: Final = re.compile(r"KVBUS_(?:[A-Z0-9_]+_)?SERVICE_(?:HOST|PORT(?:_[A-Z0-9_]+)?)")
_SERVICE_PORT: Final = re.compile(r"KVBUS_(?:[A-Z0-9_]+_)?PORT")
_SERVICE_LINK: Final = re.compile(r"KVBUS_(?:[A-Z0-9_]+_)?PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?")

_DELIMITER: Final = "__"
_LISTS: Final = frozenset({*paths.LISTS, *paths.PLAIN_LISTS})
_BEGINS: Final = frozenset({"endpoint", "discover"})
"""A new element of ``sources`` or ``outputs`` must have at least one of these keys.

If a variable or an option sets only other keys of an element, the user has probably mistyped the element's index.
"""

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
    layers = _Layers({key: _by_index(key, value) for key, value in file.data.items()}, file.origins, file.problems)
    layers.add_variables(env)
    layers.add_overrides(overrides)
    data = layers.with_lists()
    config, problems = _validated(data, layers.origins, look)
    if config is None or layers.problems or problems:
        raise ConfigError([*layers.problems, *problems])
    return config


@dataclass(frozen=True, slots=True)
class _Layers:
    """The values of the file, changed by environment variables and the command line.

    A list of the configuration is a mapping by index here (``{"0": ..., "1": ...}``), so that a key path can change one
    element.

    Attributes:
        data: the values.
        origins: the origin of each value, such as ``kvbus.yaml line 12`` or ``KVBUS_HTTP``, by key path.
        problems: the problems that were found while the values were collected.
    """

    data: dict[Any, Any]
    origins: dict[paths.Path, str]
    problems: list[Problem]

    def add_variables(self, env: Mapping[str, str]) -> None:
        """Apply the ``KVBUS_*`` variables, and report variables that do not name a configuration key."""
        found: list[tuple[paths.Path, str, str]] = []
        for name, value in env.items():
            if not name.upper().startswith(PREFIX) or name in RESERVED:
                continue
            path = tuple(paths.index(piece) for piece in name[len(PREFIX) :].lower().split(_DELIMITER))
            if paths.is_known(path):
                found.append((path, name, value))
            elif not _is_service_link(name, value):
                near = paths.suggest(path)
                hint = "" if near is None else f", did you mean {variable(paths.parse(near))}?"
                wrong = removed_key(path) or f"no such variable{hint}"
                self.problems.append(Problem(name, wrong, value=shown(value), origin="environment"))
        # Set lists before their elements, because a list replaces all of its elements.
        for path, name, value in sorted(found, key=lambda item: len(item[0])):
            self._give(path, value, name)

    def add_overrides(self, overrides: Mapping[str, Any]) -> None:
        """Apply the values of the command line, and report names that are not configuration keys."""
        for key, value in overrides.items():
            try:
                path = paths.parse(key)
            except ValueError as error:
                self.problems.append(Problem(key, str(error), value=shown(value), origin="command line"))
                continue
            if paths.is_known(path):
                self._give(path, value, "command line")
            else:
                wrong = removed_key(path) or paths.unknown(path)
                self.problems.append(Problem(paths.show(path), wrong, value=shown(value), origin="command line"))

    def _give(self, path: paths.Path, value: Any, origin: str) -> None:
        """Set the value of a key path. The new value replaces the values of all keys below the path."""
        if value == "null":
            value = None
        elif isinstance(value, str) and paths.is_structure(path):
            try:
                value = YAML(typ="safe", pure=True).load(value)
            except (YAMLError, ValueError, RecursionError):
                wrong = "must be YAML or JSON"
                self.problems.append(Problem(paths.show(path), wrong, shown(value), example_at(path), origin))
                return
        node = self.data
        for piece in path[:-1]:
            inner = node.get(str(piece)) or _Begun()
            if not isinstance(inner, dict):
                return  # the file has a single value where a section is needed: the validation rejects it later
            inner = copy.copy(inner)  # copy the section, because YAML aliases may share it
            node[str(piece)] = inner
            node = inner
        node[str(path[-1])] = _by_index(path[0], value) if len(path) == 1 else value
        for known in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[known]
        self.origins[path] = origin

    def with_lists(self) -> dict[Any, Any]:
        """Return the values with real lists.

        Each mapping by index (``{"0": ..., "1": ...}``) is converted to a list.
        """
        indexed = {name: value for name, value in self.data.items() if name in _LISTS and _is_indexed(value)}
        return {**self.data, **{name: self._listed(name, elements) for name, elements in indexed.items()}}

    def _listed(self, name: str, elements: dict[str, Any]) -> list[Any]:
        """Return the elements of one list in the order of their indexes.

        Report each element that comes after a missing index, and each element whose index was probably mistyped.
        """
        items: list[Any] = []
        while str(len(items)) in elements:
            items.append(elements[str(len(items))])
        have = f"the list has {len(items)} elements" if items else "the list is empty"
        for path, origin in self.origins.items():
            if path[0] == name and len(path) > 1 and int(path[1]) >= len(items):
                wrong = f"{have}; indexes begin at 0 and have no gaps"
                self.problems.append(Problem(paths.show(path), wrong, origin=origin))
        while len(items) > 1 and isinstance(items[-1], _Begun) and not _BEGINS & items[-1].keys():
            items.pop()
            path = name, len(items)
            last = f"the last is {name}[{len(items) - 1}]"
            wrong = f"there is no such element ({last}); a new element needs an endpoint"
            origin = next(origin for known, origin in self.origins.items() if known[:2] == path)
            self.problems.append(Problem(paths.show(path), wrong, origin=origin))
        return items


class _Begun(dict[str, Any]):
    """A list element or section that exists only because a variable or the command line has set one of its keys."""


def _by_index(name: object, value: Any) -> Any:
    if name in _LISTS and isinstance(value, list | tuple) and value:
        return {str(i): item for i, item in enumerate(value)}
    return value


def _is_indexed(value: object) -> bool:
    return isinstance(value, dict) and bool(value) and all(str(piece).isdigit() for piece in value)


def variable(path: paths.Path) -> str:
    """Return the name of the environment variable that sets a key."""
    return PREFIX + _DELIMITER.join(str(piece).upper() for piece in path)


def _is_service_link(name: str, value: str) -> bool:
    if _SERVICE.fullmatch(name) or _SERVICE_LINK.fullmatch(name):
        return True
    # KVBUS_HTTP_PORT=9477 was set by a user, and is reported, because it names no key. Kubernetes sets
    # KVBUS_HTTP_PORT=tcp://10.0.0.7:9477 for a Service with the name kvbus-http, and kvbus ignores it.
    return bool(_SERVICE_PORT.fullmatch(name)) and value.startswith(("tcp://", "udp://", "sctp://"))


def _validated(
    data: dict[str, Any], origins: Mapping[paths.Path, str], look: Look
) -> tuple[Config | None, list[Problem]]:
    """Validate the values. Return the configuration and all problems.

    An invalid value is replaced by its default, so that the other values can be checked too. If the configuration is
    not valid even then, None is returned instead of it.
    """
    bad: dict[paths.Path, Problem] = {}
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        bad = {tuple(item["loc"]): from_pydantic(item, origins) for item in error.errors(include_url=False)}
        # also check for contradictions between the valid keys, so that one run reports all problems
        data = copy.deepcopy(data)
        for path in sorted(bad, key=len, reverse=True):
            _forget(data, path)
        try:
            config = Config.model_validate(data)
        except ValidationError:
            return None, list(bad.values())
    problems = [*crosscheck.check(config, origins, frozenset(bad)), *look(config)]
    written = config.as_written
    problems = [replace(each, key=written(each.key), wrong=written(each.wrong)) for each in problems]
    return config, [*bad.values(), *problems]


def _forget(data: Any, path: paths.Path) -> None:
    """Replace an invalid value by its default.

    An invalid element of a list becomes an empty mapping, so that the elements after it keep their indexes.
    """
    node: Any = data
    for piece in path[:-1]:
        node = node[piece]
    if isinstance(node, list) and isinstance(path[-1], int):
        node[path[-1]] = {}
        return
    known = paths.field_at(path)
    if known is None or known.default_factory is not None:
        node.pop(path[-1], None)
    else:
        # Do not delete the key, because the default of a replay endpoint depends on which keys are set.
        node[path[-1]] = known.default
