"""The CURVE options of commands that connect to a publisher, and the function that reads the key files named there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvbus.common.errors import ConfigError, Problem
from kvbus.transport.curve import Curve, KeyFileError, read_public, read_secret

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

_SECRET = "--curve-secret-key"
_SERVER = "--curve-server-key"


def curve_options(function: F) -> F:
    """Add ``--curve-secret-key`` and ``--curve-server-key`` to a command, which passes the values to `curve_keys`."""
    for option in (
        click.option(
            _SERVER, type=click.Path(path_type=Path), metavar="FILE", help="CURVE: the publisher's public key."
        ),
        click.option(
            _SECRET,
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="CURVE: this client's secret key (kvbus keygen).",
        ),
    ):
        function = option(function)
    return function


def curve_keys(secret_key: Path | None, server_key: Path | None, *, bind: bool = False) -> Curve | None:
    """Read the CURVE key files that a command's options name. Return None if neither option is given.

    Raises:
        UsageError: only one option is given, or the command binds instead of connecting.
        ConfigError: a key file cannot be used.
    """
    if secret_key is None and server_key is None:
        return None
    if secret_key is None or server_key is None:
        raise click.UsageError(f"CURVE needs both {_SECRET} and {_SERVER}")
    if bind:
        raise click.UsageError("CURVE keys work only if kvbus connects to the publisher; leave out --bind")
    problems = []
    public, secret, server = b"", b"", b""
    try:
        public, secret = read_secret(secret_key)
    except KeyFileError as error:
        problems.append(Problem(_SECRET, str(error), str(secret_key)))
    try:
        server = read_public(server_key)
    except KeyFileError as error:
        problems.append(Problem(_SERVER, str(error), str(server_key)))
    if problems:
        raise ConfigError(problems)
    return Curve(public, secret, server)
