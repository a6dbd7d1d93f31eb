"""The CURVE keys of a configuration.

The daemon reads the key files at its start, at SIGHUP, and when the files change. :mod:`kvbus.daemon.changing` applies
new keys to connected peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from kvbus.common.errors import ConfigError, Problem
from kvbus.config import Config, OutputConfig, SourceConfig, parse_endpoint
from kvbus.config.paths import parse
from kvbus.config.problems import example_at
from kvbus.transport.curve import Curve, KeyFileError, read_allowed, read_public, read_secret
from kvbus.transport.grants import EVERYTHING, Clients, Grant

T = TypeVar("T")

Keys = dict[str, Curve]
"""CURVE keys by domain: ``source/NAME`` or ``output/NAME``. A source or output without keys has no entry."""


def source_domain(name: str) -> str:
    """Return the name under which :data:`Keys` holds the keys of a source."""
    return f"source/{name}"


def output_domain(name: str) -> str:
    """Return the name under which :data:`Keys` holds the keys of an output."""
    return f"output/{name}"


def read_keys(config: Config) -> Keys:
    """Read every key file that a configuration names.

    Raises:
        ConfigError: kvbus cannot use a file. The error lists every such file, and never contains a key.
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


def _cannot_limit(at: SourceConfig | OutputConfig, clients: Clients) -> str:
    """Return why the keys on a list cannot have rights in this section of the configuration.

    The result is empty if they can.

    Args:
        at: the section of the configuration.
        clients: the keys on the list, with their rights.
    """
    if isinstance(at, SourceConfig):
        only_sources = all(client.grant == Grant(client.grant.sources) for client in clients.values())
        return "" if only_sources else "engines read nothing, so a key on this list can only have sources="
    if at.type != "zmq":
        return f"only an output of type zmq can limit what a key reads, and this output has type {at.type}"
    if at.layout == "per_topic":
        return "only an output with layout per_source or merged can limit what a key reads"
    if not at.bind:
        return "an output that connects to its router cannot limit what a key reads"
    return ""


def who_reads_what(config: Config, keys: Keys) -> list[str]:
    """Return a sentence for each key of each output: what a router with the key can read.

    The sentence contains the number of cache salts, but never a salt.
    """
    found = []
    for output in config.outputs:
        curve = keys.get(output_domain(output.name))
        clients = [] if curve is None or not output.bind else sorted(curve.clients.values(), key=lambda each: each.name)
        found += [
            f"output {output.name}: {client.name or 'a key without a name'} reads {client.grant.sentence}"
            for client in clients
        ]
    return found


def in_clear(config: Config) -> list[str]:
    """Return a warning for each output that sends events over a network without encryption."""
    found = []
    for output in config.outputs:
        if output.curve_secret_key_file is not None or (output.log is not None and output.log.tls_ca_file is not None):
            continue
        endpoints = (output.endpoint, output.replay_endpoint, output.snapshot_endpoint)
        open_ones = [each for each in endpoints if each is not None and not parse_endpoint(each).is_loopback]
        if open_ones:
            what = "token ids" if output.token_ids == "keep" else "block hashes"
            key = "curve_secret_key_file" if output.log is None else f"{output.type}.tls_ca_file"
            found.append(
                f"output {output.name}: {what} leave this machine unencrypted ({', '.join(open_ones)}): see {key}"
            )
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

    def read(key: str, path: Path | None, reader: Callable[[Path], T], absent: T) -> T:
        try:
            return absent if path is None else reader(path)
        except KeyFileError as error:
            where = f"{section}.{key}"
            problems.append(Problem(where, str(error), str(path), example_at(Config, parse(where))))
            return absent

    pair = read("curve_secret_key_file", at.curve_secret_key_file, read_secret, (b"", b""))
    server = read("curve_server_key_file", at.curve_server_key_file, read_public, None)
    nobody: Clients = {}
    clients = read("curve_client_keys", at.curve_client_keys, read_allowed, nobody)
    if any(client.grant != EVERYTHING for client in clients.values()):
        wrong = _cannot_limit(at, clients)
        if wrong:
            problems.append(Problem(f"{section}.curve_client_keys", wrong, str(at.curve_client_keys)))
    return Curve(*pair, server, clients) if len(problems) == before else None
