"""The layers of a configuration, as settings sources of pydantic-settings.

pydantic-settings asks the strongest layer first, and merges what the layers return, section by section. These sources
add what its own sources lack: the origin of each value, one element of a list, sections that are replaced completely,
and all problems at once.

A list at the top level is a mapping by index here (``{"0": ..., "1": ...}``), so that pydantic-settings can merge its
elements. :func:`as_lists` turns such mappings into lists before the values are validated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from kvbus.common.errors import Problem
from kvbus.config import paths
from kvbus.config.problems import example_at, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from kvbus.config.paths import Path
    from kvbus.config.yamlfile import YamlFile

PREFIX: Final = "KVBUS_"
RESERVED: Final = frozenset({"KVBUS_CONFIG", "KVBUS_TRACEBACK", "KVBUS_TOKEN_FILE", "KVBUS_CA_FILE"})
"""Variables that set options of commands. They are not configuration keys."""

# Kubernetes sets these variables in every container for each Service of the namespace. A Service may be named kvbus, so
# kvbus must ignore them.
_SERVICE: Final = re.compile(r"KVBUS_(?:[A-Z0-9_]+_)?SERVICE_(?:HOST|PORT(?:_[A-Z0-9_]+)?)")
_SERVICE_PORT: Final = re.compile(r"KVBUS_(?:[A-Z0-9_]+_)?PORT")
_SERVICE_LINK: Final = re.compile(r"KVBUS_(?:[A-Z0-9_]+_)?PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?")

_DELIMITER: Final = "__"
_BEGINS: Final = frozenset({"endpoint", "discover"})
"""A new element of ``sources`` or ``outputs`` must have at least one of these keys.

If a variable or an option sets only other keys of an element, the user has probably mistyped the element's index.
"""


@dataclass
class Layers:
    """The layers of one configuration: what they are read from, and what was found while they were read.

    Attributes:
        file: the file.
        env: the environment.
        overrides: the values of the command line, by key path, in order.
        replaced: key paths of invalid values, which no layer may set. A key of the model has its default instead.
        origins: the origin of each value, such as ``kvbus.yaml line 12`` or ``KVBUS_HTTP``, by key path.
        problems: the problems that the layers themselves have found.
        misplaced: elements of lists whose index was probably mistyped.
        taken: the key paths that the layers have set so far. A weaker layer sets nothing at them or below them. At
            first, key paths that no layer may set at all.
        elements: the elements of lists that a layer has given completely, and not only some of their keys.
    """

    file: YamlFile
    env: Mapping[str, str]
    overrides: Mapping[str, Any]
    replaced: frozenset[Path] = frozenset()
    origins: dict[Path, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    misplaced: set[Path] = field(default_factory=set)
    taken: set[Path] = field(default_factory=set)
    elements: set[Path] = field(default_factory=set)

    def sources(self, root: type[BaseSettings]) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the settings sources, the strongest first. pydantic-settings adds the defaults behind them."""
        return Defaults(root, self), CommandLine(root, self), Variables(root, self), File(root, self)


class Layer(PydanticBaseSettingsSource):
    """One layer. :meth:`read` of the subclass sets its values."""

    def __init__(self, root: type[BaseSettings], layers: Layers) -> None:
        super().__init__(root)
        self.layers = layers
        self.values: dict[str, Any] = {}
        self.origins: dict[Path, str] = {}

    def __call__(self) -> dict[str, Any]:
        """Return the values of this layer, without those that a stronger layer replaces."""
        self.read()
        for path, origin in self.origins.items():
            self.layers.origins.setdefault(path, origin)
        self.layers.taken.update(self.origins)
        return self.values

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return no value. The base class requires this method, but a layer returns all its values together."""
        del field, field_name
        return None, "", False

    def read(self) -> None:
        """Set the values of this layer with :meth:`put`."""
        raise NotImplementedError

    def problem(self, key: str, wrong: str, value: Any = None, origin: str | None = None) -> None:
        """Add a problem of this layer."""
        self.layers.problems.append(Problem(key, wrong, value=None if value is None else shown(value), origin=origin))

    def give(self, path: Path, value: Any, origin: str) -> None:
        """Set the value of a key path to a value that may be a text: ``null``, or YAML for a list or a section."""
        if value == "null":
            value = None
        elif isinstance(value, str) and paths.is_structure(self.settings_cls, path):
            try:
                value = YAML(typ="safe", pure=True).load(value)
            except (YAMLError, ValueError, RecursionError):
                example = example_at(self.settings_cls, path)
                self.layers.problems.append(
                    Problem(paths.show(path), "must be YAML or JSON", shown(value), example, origin)
                )
                return
        self.put(path, value, origin)

    def put(self, path: Path, value: Any, origin: str) -> None:
        """Set the value of a key path. It replaces everything that this layer has set below the path.

        A value at or below a key path that a stronger layer has set is left out.
        """
        taken = self.layers.taken
        if any(path[:length] in taken for length in range(1, len(path) + 1)):
            return
        if len(path) == 1 and path[0] in paths.lists(self.settings_cls) and isinstance(value, list | tuple) and value:
            value = {str(at): item for at, item in enumerate(value)}
            self.layers.elements.update((path[0], at) for at in range(len(value)))
        elif len(path) == 2:
            self.layers.elements.add(path)
        for deeper in [each for each in taken if len(each) > len(path) and each[: len(path)] == path]:
            if value is not None and not isinstance(value, dict):
                need = "a list" if isinstance(deeper[len(path)], int) else "a mapping of keys"
                self.problem(paths.show(path), f"must be {need}", value, origin)
                return
            value = _without(value, deeper[len(path) :])
        node = self.values
        for piece in path[:-1]:
            inner = node.get(str(piece))
            node[str(piece)] = node = dict(inner) if isinstance(inner, dict) else {}
        node[str(path[-1])] = value
        for known in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[known]
        self.origins[path] = origin


def _without(value: Any, path: Path) -> Any:
    """Return a value without the value at a key path below it. The given value stays as it is.

    If a list is on the way, the whole list is left out.
    """
    key = str(path[0])
    if not isinstance(value, dict) or key not in value:
        return value
    if len(path) > 1 and isinstance(value[key], dict):
        return {**value, key: _without(value[key], path[1:])}
    return {name: item for name, item in value.items() if name != key}


class Defaults(Layer):
    """Defaults in place of invalid values, so that the valid keys can be checked for contradictions too."""

    def __call__(self) -> dict[str, Any]:
        """Return the defaults. They have no origin."""
        for path in self.layers.replaced:
            known = paths.field_at(self.settings_cls, path)
            if isinstance(path[-1], int):
                self.put(path, {}, "")  # an element of a list: the elements after it keep their indexes
            elif known is not None and known.default_factory is None and not known.is_required():
                # The key is set, because the default of a replay endpoint depends on which keys are set.
                self.put(path, known.default, "")
        self.layers.taken.update(self.layers.replaced)
        return self.values


class CommandLine(Layer):
    """The values of the command line."""

    def read(self) -> None:
        """Apply the values in order, and report names that are not configuration keys."""
        for key, value in self.layers.overrides.items():
            try:
                path = paths.parse(key)
            except ValueError as error:
                self.problem(key, str(error), value, "command line")
                continue
            if paths.is_known(self.settings_cls, path):
                self.give(path, value, "command line")
            else:
                self.problem(paths.show(path), paths.unknown(self.settings_cls, path), value, "command line")


class Variables(Layer):
    """The ``KVBUS_*`` variables of the environment."""

    def read(self) -> None:
        """Apply the variables, and report those that do not name a configuration key."""
        found: list[tuple[Path, str, str]] = []
        for name, value in self.layers.env.items():
            if not name.upper().startswith(PREFIX) or name in RESERVED:
                continue
            path = tuple(paths.index(piece) for piece in name[len(PREFIX) :].lower().split(_DELIMITER))
            if paths.is_known(self.settings_cls, path):
                found.append((path, name, value))
            elif not _is_service_link(name, value):
                near = paths.suggest(self.settings_cls, path)
                hint = "" if near is None else f", did you mean {variable(paths.parse(near))}?"
                self.problem(name, f"no such variable{hint}", value, "environment")
        # Set lists before their elements, because a list replaces all of its elements.
        for path, name, value in sorted(found, key=lambda item: len(item[0])):
            self.give(path, value, name)


class File(Layer):
    """The YAML file. It is the weakest layer, so the lists are complete with it."""

    def read(self) -> None:
        """Apply the keys of the file, and check the indexes of all lists."""
        for key, value in self.layers.file.data.items():
            self.put((key,), value, self.layers.file.origins.get((key,), ""))
        taken = self.layers.taken
        for path, origin in self.layers.file.origins.items():
            if not any(path[:length] in taken for length in range(1, len(path) + 1)):
                self.origins[path] = origin
        for name in paths.lists(self.settings_cls):
            self._check_indexes(name)

    def _check_indexes(self, name: str) -> None:
        """Report each element of a list that comes after a missing index, or whose index was probably mistyped."""
        stronger, own = self.current_state.get(name), self.values.get(name)
        keys: dict[int, set[Any]] = {}
        for elements in (stronger, own):
            if isinstance(elements, dict) and _is_indexed(elements):
                for at, element in elements.items():
                    keys.setdefault(int(at), set()).update(element if isinstance(element, dict) else ())
        length = next(at for at in range(len(keys) + 1) if at not in keys)
        have = f"the list has {length} elements" if length else "the list is empty"
        for path, origin in self.layers.origins.items():
            if path[0] == name and len(path) > 1 and int(path[1]) >= length:
                self.problem(paths.show(path), f"{have}; indexes begin at 0 and have no gaps", origin=origin)
        while length > 1 and (name, length - 1) not in self.layers.elements and not _BEGINS & keys[length - 1]:
            length -= 1
            path = name, length
            wrong = f"there is no such element (the last is {name}[{length - 1}]); a new element needs an endpoint"
            origin = next(origin for known, origin in self.layers.origins.items() if known[:2] == path)
            self.problem(paths.show(path), wrong, origin=origin)
            self.layers.misplaced.add(path)


def as_lists(root: type[BaseModel], values: Any) -> Any:
    """Return the values of a configuration with lists in place of mappings by index.

    Elements after a missing index are left out.
    """
    if not isinstance(values, dict):
        return values
    names = [name for name in paths.lists(root) if _is_indexed(values.get(name))]
    return {**values, **{name: list(_consecutive(values[name])) for name in names}}


def _consecutive(elements: dict[str, Any]) -> Iterable[Any]:
    at = 0
    while str(at) in elements:
        yield elements[str(at)]
        at += 1


def _is_indexed(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(str(piece).isdigit() for piece in value)


def variable(path: Path) -> str:
    """Return the name of the environment variable that sets a key."""
    return PREFIX + _DELIMITER.join(str(piece).upper() for piece in path)


def _is_service_link(name: str, value: str) -> bool:
    if _SERVICE.fullmatch(name) or _SERVICE_LINK.fullmatch(name):
        return True
    # KVBUS_HTTP_PORT=9477 was set by a user, and is reported, because it names no key. Kubernetes sets
    # KVBUS_HTTP_PORT=tcp://10.0.0.7:9477 for a Service with the name kvbus-http, and kvbus ignores it.
    return bool(_SERVICE_PORT.fullmatch(name)) and value.startswith(("tcp://", "udp://", "sctp://"))
