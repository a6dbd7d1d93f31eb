"""Read a YAML file with a safe parser, and record the line of every key and all duplicate keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from kvbus.common.errors import ConfigError, Problem
from kvbus.config.paths import show

if TYPE_CHECKING:
    from pathlib import Path

_EXAMPLE: Final = "sources: [{endpoint: tcp://127.0.0.1:5557}]"
MAX_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class YamlFile:
    """The content of a YAML file, the line of each key, and the duplicate keys.

    Attributes:
        data: the content, which is a mapping. The caller may change it.
        origins: the origin of each value, such as ``kvbus.yaml line 12``, by key path.
        problems: a problem for each duplicate key.
    """

    data: dict[str, Any]
    origins: dict[tuple[str | int, ...], str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read(path: Path) -> YamlFile:
    """Read a configuration file.

    Raises:
        ConfigError: the file cannot be read, is too large, or is not a YAML mapping in UTF-8.
    """
    name = str(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError([Problem(name, f"cannot be read: {error.strerror or error}")]) from None
    if len(raw) > MAX_BYTES:
        raise _refuse(name, f"is larger than {MAX_BYTES} bytes")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refuse(name, f"is not UTF-8: {error}") from None
    return parse(text, name)


def parse(text: str, name: str) -> YamlFile:
    """Parse the text of a configuration file. ``name`` is the file's name in error messages.

    Raises:
        ConfigError: the text is not a YAML mapping.
    """
    try:
        root = YAML(typ="safe", pure=True).compose(text)
        loader = YAML(typ="safe", pure=True)
        # The loader would stop at the first duplicate key. `_Walk` reports all of them.
        loader.allow_duplicate_keys = True
        data = loader.load(text)
    except MarkedYAMLError as error:
        position = error.problem_mark or error.context_mark
        where = f"{name} line {position.line + 1}" if position is not None else name
        raise _refuse(where, f"is not YAML: {error.problem or error.context}") from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise _refuse(name, f"is not YAML: {error}") from None
    if data is None:
        raise _refuse(name, "is empty; it must be a mapping of keys")
    if not isinstance(data, dict):
        raise _refuse(
            name, f"must be a mapping of keys, not {'a list' if isinstance(data, list) else 'a single value'}"
        )
    result = YamlFile(data)
    _Walk(name, result).visit(root, ())
    return result


def _refuse(where: str, wrong: str) -> ConfigError:
    return ConfigError([Problem(where, wrong, example=_EXAMPLE)])


@dataclass(slots=True)
class _Walk:
    """A pass over the tree of YAML nodes that records the lines and the duplicate keys.

    It visits a node with several aliases only once, so that nested aliases cannot make it slow.
    """

    name: str
    result: YamlFile
    seen: set[int] = field(default_factory=set)

    def visit(self, node: Node, path: tuple[str | int, ...]) -> None:
        if id(node) in self.seen:
            return
        self.seen.add(id(node))
        if isinstance(node, SequenceNode):
            for i, item in enumerate(node.value):
                self.result.origins[*path, i] = self.line(item)
                self.visit(item, (*path, i))
        elif isinstance(node, MappingNode):
            first: dict[str, str] = {}
            for key_node, value_node in node.value:
                if not isinstance(key_node, ScalarNode):
                    continue  # a list or mapping is no valid key: pydantic rejects it later, and shows it to the user
                key = str(key_node.value)
                where = self.line(key_node)
                if key in first:
                    wrong = f"duplicate key, first set at {first[key]}; keep one of them"
                    self.result.problems.append(Problem(show((*path, key)), wrong, origin=where))
                first.setdefault(key, where)
                self.result.origins[*path, key] = where
                self.visit(value_node, (*path, key))

    def line(self, node: Node) -> str:
        return f"{self.name} line {node.start_mark.line + 1}"
