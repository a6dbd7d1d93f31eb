"""CURVE keys of a configuration: the daemon reads the files at its start, at SIGHUP, and whenever they change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvbus.config import Config, OutputConfig, SourceConfig, parse_endpoint
from kvbus.errors import ConfigError, Problem
from kvbus.transport.curve import Curve, KeyFileError, read_allowed, read_public, read_secret

Keys = dict[str, Curve]
"""Keys by domain: ``source/NAME`` or ``output/NAME``. A domain without keys has no CURVE."""

_EXAMPLES: Final = {
    "curve_secret_key_file": "/etc/kvbus/keys/kvbus.key_secret",
    "curve_server_key_file": "/etc/kvbus/keys/peer.key",
    "curve_client_keys": "/etc/kvbus/clients",
}


def source_domain(name: str) -> str:
    """Return the domain of a source's keys."""
    return f"source/{name}"


def output_domain(name: str) -> str:
    """Return the domain of an output's keys."""
    return f"output/{name}"


def read_keys(config: Config) -> Keys:
    """Read every key file that a configuration names.

    Raises:
        ConfigError: kvbus cannot use a file. It names all such files, and never quotes a key.
    """
    keys: Keys = {}
    problems: list[Problem] = []
    for domain, section, at in _sections(config):
        curve = _curve(section, at, problems)
        if curve is not None:
            keys[domain] = curve
    if problems:
        raise ConfigError(problems)
    return keys


def in_clear(config: Config) -> list[str]:
    """Return a warning for each output that other machines can reach without CURVE."""
    found = []
    for output in config.outputs:
        if output.curve_secret_key_file is not None:
            continue
        endpoints = (output.endpoint, output.replay_endpoint, output.snapshot_endpoint)
        open_ones = [each for each in endpoints if each is not None and not parse_endpoint(each).is_loopback]
        if open_ones:
            found.append(f"output {output.name}: token ids leave this machine in clear ({', '.join(open_ones)})")
    return found


def _sections(config: Config) -> Iterator[tuple[str, str, SourceConfig | OutputConfig]]:
    for i, source in enumerate(config.sources):
        yield source_domain(source.name), f"sources[{i}]", source
    for i, output in enumerate(config.outputs):
        yield output_domain(output.name), f"outputs[{i}]", output


def _curve(section: str, at: SourceConfig | OutputConfig, problems: list[Problem]) -> Curve | None:
    if at.curve_secret_key_file is None:
        return None
    before = len(problems)
    pair, server, clients = (b"", b""), None, frozenset[bytes]()

    def report(key: str, path: Path, error: KeyFileError) -> None:
        problems.append(Problem(f"{section}.{key}", str(error), str(path), f"{key}: {_EXAMPLES[key]}"))

    try:
        pair = read_secret(at.curve_secret_key_file)
    except KeyFileError as error:
        report("curve_secret_key_file", at.curve_secret_key_file, error)
    if at.curve_server_key_file is not None:
        try:
            server = read_public(at.curve_server_key_file)
        except KeyFileError as error:
            report("curve_server_key_file", at.curve_server_key_file, error)
    if at.curve_client_keys is not None:
        try:
            clients = read_allowed(at.curve_client_keys)
        except KeyFileError as error:
            report("curve_client_keys", at.curve_client_keys, error)
    return Curve(*pair, server, clients) if len(problems) == before else None
