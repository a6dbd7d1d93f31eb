"""Load a configuration from its three places (file, variables, command line) and check it as a whole."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, cast

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from kvbus.common.errors import ConfigError, Problem
from kvbus.common.removed import removed_key
from kvbus.config import crosscheck, paths, yamlfile
from kvbus.config.interpose import as_written
from kvbus.config.models import Config
from kvbus.config.problems import example_at, from_pydantic, shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pydantic.fields import FieldInfo

PREFIX: Final = "KVBUS_"
RESERVED: Final = frozenset({"KVBUS_CONFIG", "KVBUS_TRACEBACK", "KVBUS_TOKEN_FILE", "KVBUS_CA_FILE"})
"""Variables of the command line itself. They are no keys."""

# Kubernetes gives every container such variables for each Service of its namespace. A Service may be called kvbus.
_SERVICE: Final = re.compile(r"KVBUS_(?:[A-Z0-9_]+_)?SERVICE_(?:HOST|PORT(?:_[A-Z0-9_]+)?)")
_SERVICE_PORT: Final = re.compile(r"KVBUS_(?:[A-Z0-9_]+_)?PORT")
_SERVICE_LINK: Final = re.compile(r"KVBUS_(?:[A-Z0-9_]+_)?PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?")


@dataclass(slots=True)
class _Draft:
    """A configuration being loaded: plain data, the origin of each value, the problems so far."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[paths.Path, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    odd: dict[Any, Any] = field(default_factory=dict)
    begun: dict[paths.Path, str] = field(default_factory=dict)
    """List elements that a variable or a flag has begun."""

    def drop_strays(self) -> None:
        """Take out elements beside others that nobody gave an endpoint: a number was mistaken."""
        for path, origin in sorted(self.begun.items(), reverse=True):
            name, number = path[0], path[-1]
            elements = self.data.get(str(name))
            begun = elements[-1] if isinstance(elements, list) else None
            if (
                number
                and isinstance(elements, list)
                and isinstance(begun, dict)
                and not {"endpoint", "discover"} & begun.keys()
            ):
                elements.pop()
                last = f"the last is {name}[{len(elements) - 1}]"
                wrong = f"there is no such element ({last}); a new one begins with its endpoint"
                self.problems.append(Problem(paths.show(path), wrong, origin=origin))

    def assign(self, path: paths.Path, value: Any, origin: str) -> None:
        """Set one value. A list grows by one element at a time."""
        node: Any = self.data
        for at, piece in enumerate(path):
            last = at == len(path) - 1
            if isinstance(node, list) and isinstance(piece, int):
                if piece > len(node):
                    have = f"there are only {len(node)}" if node else "there is none yet"
                    wrong = f"{have}; elements are counted from 0 without a hole"
                    self.problems.append(Problem(paths.show(path), wrong, origin=origin))
                    return
                if piece == len(node):
                    self.begun[path[: at + 1]] = origin
                    node.append({})
            elif not (isinstance(node, dict) and isinstance(piece, str)):
                return  # there is a value in place of a section; validation refuses it
            if last:
                node[piece] = value
            elif isinstance(node, dict) and node.get(piece) is None:
                node[piece] = [] if isinstance(path[at + 1], int) else {}
            if not last:
                node = node[piece]
        for known in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[known]
        self.origins[path] = origin


Look = Callable[[Config], Iterable[Problem]]
"""Looks at this machine for the things that a configuration names, such as files with keys."""


def load(
    path: Path | None, *, env: Mapping[str, str], overrides: Mapping[str, Any], look: Look = lambda _config: ()
) -> Config:
    """Load the configuration: overrides over ``KVBUS_*`` variables over the file over the defaults.

    Args:
        path: the YAML file, None for no file.
        env: the environment. ``KVBUS_OUTPUTS__0__LAYOUT`` is ``outputs[0].layout``; ``null`` means null, and a whole
            list or section (``KVBUS_SOURCES``) is YAML or JSON.
        overrides: values by key path, such as ``http`` or ``outputs[0].layout``, in order of application. A text is
            parsed as in a variable; a list replaces the whole list of lower layers.
        look: finds further problems, which are reported together with those of the configuration itself.

    Raises:
        ConfigError: the configuration has problems; the error names all of them.
    """
    draft = _Draft()
    merged = _Layers(given=_Given(draft, path, env, overrides)).model_extra or {}  # type: ignore[call-arg]
    draft.data = {**draft.odd, **merged}
    draft.drop_strays()
    return _validated(draft, look)


@dataclass(frozen=True, slots=True)
class _Given:
    """The arguments of `load`, passed through pydantic-settings to our sources."""

    draft: _Draft
    path: Path | None
    env: Mapping[str, str]
    overrides: Mapping[str, Any]


class _Layers(BaseSettings):
    """The merged layers, before validation. `Config` validates them once and collects all errors.

    We do not use the library's own environment source: it decodes only JSON, stops at the first value that it cannot
    decode, ignores unknown variables, and replaces a whole list instead of one element.
    """

    model_config = SettingsConfigDict(extra="allow")

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        given = cast("Any", init_settings).init_kwargs["given"]
        # lowest layer first: each changes the result so far, which the other order cannot do for an element of a list
        return _File(settings_cls, given), _Variables(settings_cls, given), _CommandLine(settings_cls, given)


class _Source(PydanticBaseSettingsSource):
    """One layer. ``current_state`` has the result of the lower layers."""

    def __init__(self, settings_cls: type[BaseSettings], given: _Given) -> None:
        self.given = given
        super().__init__(settings_cls)

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError  # abstract in the base; only its own environment sources use it


class _File(_Source):
    def __call__(self) -> dict[str, Any]:
        if self.given.path is None:
            return {}
        file = yamlfile.read(self.given.path)
        draft = self.given.draft
        draft.origins, draft.problems = dict(file.origins), list(file.problems)
        data = copy.deepcopy(file.data)
        # BaseSettings passes keys on as keyword arguments, so they must be text; other keys bypass it
        draft.odd = {key: value for key, value in data.items() if not isinstance(key, str)}
        return {key: value for key, value in data.items() if isinstance(key, str)}


class _Variables(_Source):
    def __call__(self) -> dict[str, Any]:
        self.given.draft.data = self.current_state
        _apply_env(self.given.draft, self.given.env)
        return {}


class _CommandLine(_Source):
    def __call__(self) -> dict[str, Any]:
        self.given.draft.data = self.current_state
        for key, value in self.given.overrides.items():
            _apply_text(self.given.draft, key, value)
        return {}


def _apply_env(draft: _Draft, env: Mapping[str, str]) -> None:
    found: list[tuple[paths.Path, str, str]] = []
    for name, value in env.items():
        if not name.upper().startswith(PREFIX) or name in RESERVED:
            continue
        path = tuple(paths.index(piece) for piece in name[len(PREFIX) :].lower().split("__"))
        if paths.is_known(path):
            found.append((path, name, value))
        elif not _is_service_link(name, value):
            near = paths.suggest(path)
            hint = "" if near is None else f", did you mean {variable(paths.parse(near))}?"
            wrong = removed_key(path) or f"no such variable{hint}"
            draft.problems.append(Problem(name, wrong, value=shown(value), origin="environment"))
    # apply lists before their elements, and elements in order
    found.sort(key=lambda item: [(isinstance(piece, str), piece) for piece in item[0]])
    for path, name, value in found:
        _assign_text(draft, path, value, name)


def variable(path: paths.Path) -> str:
    """Return the name of a key's environment variable."""
    return PREFIX + "__".join(str(piece).upper() for piece in path)


def _is_service_link(name: str, value: str) -> bool:
    if _SERVICE.fullmatch(name) or _SERVICE_LINK.fullmatch(name):
        return True
    # KVBUS_HTTP_PORT=9477 is a mistake to report; KVBUS_HTTP_PORT=tcp://10.0.0.7:9477 comes from Kubernetes
    return bool(_SERVICE_PORT.fullmatch(name)) and value.startswith(("tcp://", "udp://", "sctp://"))


def _apply_text(draft: _Draft, key: str, value: Any) -> None:
    try:
        path = paths.parse(key)
    except ValueError as error:
        draft.problems.append(Problem(key, str(error), value=shown(value), origin="command line"))
        return
    if not paths.is_known(path):
        near = paths.suggest(path)
        unknown = "unknown key" if near is None else f"unknown key, did you mean {near}?"
        wrong = removed_key(path) or unknown
        draft.problems.append(Problem(paths.show(path), wrong, value=shown(value), origin="command line"))
        return
    _assign_text(draft, path, value, "command line")


def _assign_text(draft: _Draft, path: paths.Path, value: Any, origin: str) -> None:
    if isinstance(value, str):
        if value == "null":
            value = None
        elif paths.is_structure(path):
            try:
                value = YAML(typ="safe", pure=True).load(value)
            except (YAMLError, ValueError, RecursionError):
                wrong = "must be YAML or JSON"
                draft.problems.append(Problem(paths.show(path), wrong, shown(value), example_at(path), origin))
                return
    else:
        value = copy.deepcopy(list(value) if isinstance(value, tuple) else value)  # later keys may change it
    draft.assign(path, value, origin)


def _validated(draft: _Draft, look: Look) -> Config:
    try:
        config = Config.model_validate(draft.data)
    except ValidationError as error:
        bad = {tuple(item["loc"]): from_pydantic(item, draft.origins) for item in error.errors(include_url=False)}
        draft.problems += bad.values()
        draft.problems += _cross_problems_of_the_rest(draft, frozenset(bad), look)
    else:
        draft.problems += _as_written(draft.data, [*crosscheck.check(config, draft.origins), *look(config)])
    if draft.problems:
        raise ConfigError(draft.problems)
    return config


def _cross_problems_of_the_rest(draft: _Draft, bad: frozenset[paths.Path], look: Look) -> list[Problem]:
    """Find contradictions between the valid keys, so that one run reports all problems."""
    rest = copy.deepcopy(draft.data)
    for path in sorted(bad, key=len, reverse=True):
        _forget(rest, path)
    try:
        config = Config.model_validate(rest)
    except ValidationError:
        return []
    return _as_written(rest, [*crosscheck.check(config, draft.origins, bad), *look(config)])


def _as_written(data: Mapping[str, Any], problems: list[Problem]) -> list[Problem]:
    if data.get("interpose") is None:
        return problems
    ends = len(data.get("sources") or ()), len(data.get("outputs") or ())
    return [replace(each, key=as_written(each.key, *ends), wrong=as_written(each.wrong, *ends)) for each in problems]


def _forget(data: Any, path: paths.Path) -> None:
    """Remove a bad value. A list's element becomes empty, so that the other elements keep their index."""
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
        node[path[-1]] = known.default  # keep the key set: the default of a replay endpoint depends on it
