"""``kvbus token``: bearer tokens for the HTTP port."""

from __future__ import annotations

import os
from pathlib import Path

import click

from kvbus.cli.until import say
from kvbus.http.tokens import is_name, line_of, new_token


@click.command("token")
@click.argument("name")
@click.option("--status", is_flag=True, help="It may read what holds no content, and no token ids.")
@click.option("-o", "--output", "path", type=click.Path(path_type=Path), metavar="FILE", help="Write the token there.")
def command(*, name: str, status: bool, path: Path | None) -> None:
    """Make a bearer token for the HTTP port, and print its line for http_tokens_file.

    \b
    Examples:
      kvbus token router-a -o router-a.token >> /etc/kvbus/http/tokens
      kvbus token prometheus --status >> /etc/kvbus/http/tokens

    The line, a name and a hash, goes to standard output. The token is shown once, on standard error, or written to a
    new file that only you may read; nobody can find it from the hash.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    if not is_name(name):
        raise click.UsageError(f"{name!r} is no name: up to 63 letters, digits and . _ @ -, such as router-a")
    token = new_token()
    if path is None:
        say(f"the token of {name}, shown this once: {token}")
    else:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise click.UsageError(f"{path}: {error.strerror}") from error
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(f"{token}\n")
        say(f"wrote {path}")
    click.echo(line_of(name, token, content=not status))
