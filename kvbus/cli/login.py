"""Options of commands that send HTTP requests to a bus: its address, a token, and its certificate authority."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kvbus.cli.until import say
from kvbus.common.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvbus.tools.asking import Login

F = TypeVar("F", bound="Callable[..., Any]")

LOCAL_BUS: Final = "http://127.0.0.1:9477"
"""Default HTTP address of a bus on this machine."""

_TOKEN = "--http-token-file"
_CA = "--http-ca"


def login_options(function: F) -> F:
    """Add ``--http-token-file`` and ``--http-ca`` to a command. The command passes their values to `login`."""
    for option in (
        click.option(
            _CA,
            type=click.Path(path_type=Path),
            envvar="KVBUS_CA_FILE",
            metavar="FILE",
            help="Certificate authorities for https (also: KVBUS_CA_FILE).  [default: the system's authorities]",
        ),
        click.option(
            _TOKEN,
            type=click.Path(path_type=Path),
            envvar="KVBUS_TOKEN_FILE",
            metavar="FILE",
            help="File with a bearer token that the bus accepts (also: KVBUS_TOKEN_FILE).",
        ),
    ):
        function = option(function)
    return function


def bus_url(http: str) -> str:
    """Return the base URL of a bus. ``http`` is the value of the option ``--http``: a URL or HOST:PORT.

    Raises:
        click.UsageError: the value has neither form.
    """
    from kvbus.tools.asking import base_url  # noqa: PLC0415 - imported on use, to keep `kvbus --help` fast

    try:
        return base_url(http)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def login(url: str, token_file: Path | None, ca: Path | None) -> Login:
    """Read the token and the certificate authority from the files that a command's options name.

    Print a note if the token would be sent unencrypted.

    Raises:
        ConfigError: a file cannot be used.
    """
    # Import these modules only when they are needed, because they import large packages (aiohttp, zmq).
    from kvbus.tools.asking import Login  # noqa: PLC0415
    from kvbus.transport.curve import KeyFileError, read_file  # noqa: PLC0415

    token, context = "", None
    if token_file is not None:
        try:
            token = read_file(token_file)[0].strip()
        except KeyFileError as error:
            raise ConfigError([Problem(_TOKEN, str(error), str(token_file))]) from error
        if not token or not token.isascii() or not token.isprintable():
            raise ConfigError([Problem(_TOKEN, "holds no token; a token is one line of text", str(token_file))])
        if url.startswith("http://") and not url.startswith(("http://127.", "http://localhost", "http://[::1]")):
            say("note: without https the token is sent over the network unencrypted")
    if ca is not None:
        try:
            context = ssl.create_default_context(cafile=ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError([Problem(_CA, f"holds no certificate ({error.strerror or error})", str(ca))]) from error
    return Login(token, context)
