"""Put a configuration together from its three places and check it as a whole."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from kvbus.config import crosscheck, paths, yamlfile
from kvbus.config.models import Config
from kvbus.config.problems import example_at, from_pydantic, shown
from kvbus.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pydantic.fields import FieldInfo

PREFIX: Final = "KVBUS_"
RESERVED: Final = frozenset({"KVBUS_CONFIG", "KVBUS_TRACEBACK"})
"""Variables of the command line itself, which are no keys."""

# Kubernetes gives every container such variables for each Service of its namespace; one may be called kvbus.
_SERVICE: Final = re.compile(r"KVBUS_(?:[A-Z0-9_]+_)?SERVICE_(?:HOST|PORT(?:_[A-Z0-9_]+)?)")
_SERVICE_PORT: Final = re.compile(r"KVBUS_(?:[A-Z0-9_]+_)?PORT")
_SERVICE_LINK: Final = re.compile(r"KVBUS_(?:[A-Z0-9_]+_)?PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?")


@dataclass(slots=True)
class _Draft:
    """The configuration while it is put together: plain data, its origins, what is wrong so far."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[paths.Path, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    odd: dict[Any, Any] = field(default_factory=dict)

    def assign(self, path: paths.Path, value: Any, origin: str) -> None:
        """Set one value; lists grow by one element at a time."""
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
                    node.append({})
            elif not (isinstance(node, dict) and isinstance(piece, str)):
                return  # a value stands where a section should; validation refuses it
            if last:
                node[piece] = value
            elif isinstance(node, dict) and node.get(piece) is None:
                node[piece] = [] if isinstance(path[at + 1], int) else {}
            if not last:
                node = node[piece]
        for known in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[known]
        self.origins[path] = origin


def load(path: Path | None, *, env: Mapping[str, str], overrides: Mapping[str, Any]) -> Config:
    """Load the configuration: overrides over ``KVBUS_*`` variables over the file over the defaults.

    Args:
        path: The YAML file, or ``None`` for no file.
        env: The environment. ``KVBUS_OUTPUTS__0__LAYOUT`` is ``outputs[0].layout``; ``null`` means null, and
            a whole list or section (``KVBUS_SOURCES``) is YAML or JSON.
        overrides: Key path, such as ``http`` or ``outputs[0].layout``, to value, in order of application.
            Text is read as in a variable; a list replaces the list below it.

    Raises:
        ConfigError: With every problem at once.
    """
    draft = _Draft()
    merged = _Layers(given=_Given(draft, path, env, overrides)).model_extra or {}  # type: ignore[call-arg]
    draft.data = {**draft.odd, **merged}
    return _validated(draft)


@dataclass(frozen=True, slots=True)
class _Given:
    """What `load` was called with, on its way through pydantic-settings to our sources."""

    draft: _Draft
    path: Path | None
    env: Mapping[str, str]
    overrides: Mapping[str, Any]


class _Layers(BaseSettings):
    """The layers merged, not validated yet: that is done once, on `Config`, with all errors collected.

    The library's own environment source is not among them: it decodes JSON only, ends at the first value it cannot
    decode, passes over unknown variables, and replaces a list instead of reaching into it.
    """

    model_config = SettingsConfigDict(extra="allow")

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        given = cast("Any", init_settings).init_kwargs["given"]
        # Lowest first, each changing what is there: the other way round no list could be reached into.
        return _File(settings_cls, given), _Variables(settings_cls, given), _CommandLine(settings_cls, given)


class _Source(PydanticBaseSettingsSource):
    """One layer; it finds what the lower ones gave in ``current_state``."""

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
        # BaseSettings hands keys on as keyword arguments, which must be text; the others go round it.
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
            draft.problems.append(Problem(name, f"no such variable{hint}", value=shown(value), origin="environment"))
    # Lists before their elements, elements in order.
    found.sort(key=lambda item: [(isinstance(piece, str), piece) for piece in item[0]])
    for path, name, value in found:
        _assign_text(draft, path, value, name)


def variable(path: paths.Path) -> str:
    """The environment variable of a key."""
    return PREFIX + "__".join(str(piece).upper() for piece in path)


def _is_service_link(name: str, value: str) -> bool:
    if _SERVICE.fullmatch(name) or _SERVICE_LINK.fullmatch(name):
        return True
    # KVBUS_HTTP_PORT=9477 is a mistake to report; KVBUS_HTTP_PORT=tcp://10.0.0.7:9477 is Kubernetes'.
    return bool(_SERVICE_PORT.fullmatch(name)) and value.startswith(("tcp://", "udp://", "sctp://"))


def _apply_text(draft: _Draft, key: str, value: Any) -> None:
    try:
        path = paths.parse(key)
    except ValueError as error:
        draft.problems.append(Problem(key, str(error), value=shown(value), origin="command line"))
        return
    if not paths.is_known(path):
        near = paths.suggest(path)
        wrong = "unknown key" if near is None else f"unknown key, did you mean {near}?"
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
        value = copy.deepcopy(list(value) if isinstance(value, tuple) else value)  # later keys may reach into it
    draft.assign(path, value, origin)


def _validated(draft: _Draft) -> Config:
    try:
        config = Config.model_validate(draft.data)
    except ValidationError as error:
        bad = {tuple(item["loc"]): from_pydantic(item, draft.origins) for item in error.errors(include_url=False)}
        draft.problems += bad.values()
        draft.problems += _cross_problems_of_the_rest(draft, frozenset(bad))
    else:
        draft.problems += crosscheck.check(config, draft.origins)
    if draft.problems:
        raise ConfigError(draft.problems)
    return config


def _cross_problems_of_the_rest(draft: _Draft, bad: frozenset[paths.Path]) -> list[Problem]:
    """Contradictions between the keys that are good, so that one run reports them too."""
    rest = copy.deepcopy(draft.data)
    for path in sorted(bad, key=len, reverse=True):
        _forget(rest, path)
    try:
        return crosscheck.check(Config.model_validate(rest), draft.origins, bad)
    except ValidationError:
        return []


def _forget(data: Any, path: paths.Path) -> None:
    """Take back a bad value; a list's element becomes empty, so that the others keep their places."""
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
        node[path[-1]] = known.default  # still set: whether a replay has a default depends on that
