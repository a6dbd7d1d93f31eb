"""``kvbus keygen`` and ``kvbus token``: key pairs for CURVE, and bearer tokens for the HTTP port."""

from __future__ import annotations

import os
from pathlib import Path

import click

from kvbus.cli.until import say
from kvbus.common.errors import ConfigError, FileError, Problem
from kvbus.transport.curve import KeyFileError, certificate, generate, read_secret


@click.command("keygen")
@click.argument("name", required=False)
@click.option(
    "-d",
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Directory of the two files; created if missing.  [default: the current directory]",
)
@click.option("--force", is_flag=True, help="Replace existing files. Peers with the old key can no longer connect.")
@click.option(
    "--public-of",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Only print the public key of this secret key file.",
)
def keygen(*, name: str | None, directory: Path, force: bool, public_of: Path | None) -> None:
    """Make a CURVE key pair: the public key NAME.key and the secret key NAME.key_secret. Print the public key.

    \b
    Examples:
      kvbus keygen kvbus -d /etc/kvbus/keys
      kvbus keygen router-a >> routers.keys      # an allow-list: one public key a line
      kvbus keygen --public-of /etc/kvbus/keys/kvbus.key_secret

    The files have the format of pyzmq's zmq.auth and of czmq. Only you can read the file with the secret key. kvbus
    refuses a secret key that all users can read. It accepts a secret key that the file's group can read, such as a
    Kubernetes Secret with fsGroup and defaultMode 0440.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    if public_of is not None:
        try:
            public, _ = read_secret(public_of)
        except KeyFileError as error:
            raise ConfigError([Problem("--public-of", str(error), str(public_of))]) from error
        click.echo(public.decode())
        return
    if name is None or not name or "/" in name:
        raise click.UsageError("give a NAME for the files, such as kvbus")
    public, secret = generate()
    path = directory / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write(path.with_name(f"{name}.key_secret"), certificate(public, secret), 0o600, force=force)
        _write(path.with_name(f"{name}.key"), certificate(public), 0o644, force=force)
    except FileExistsError as error:
        raise FileError(f"{error.filename} exists already; --force replaces it") from error
    except OSError as error:
        raise FileError(f"{error.filename}: {error.strerror}") from error
    say(f"wrote {path}.key_secret and {path}.key")
    click.echo(public.decode())


def _write(path: Path, text: str, mode: int, *, force: bool) -> None:
    """Write a new file. From the moment of its creation, the file has no more permissions than ``mode``."""
    if force:
        path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        os.fchmod(fd, mode)
        file.write(text)


@click.command("token")
@click.argument("name")
@click.option(
    "--status",
    is_flag=True,
    help="Make a token for the status only: it gives no access to blocks, batches and token ids.",
)
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the token to FILE instead of standard error.",
)
def token(*, name: str, status: bool, path: Path | None) -> None:
    """Make a bearer token for the HTTP port, and print its line for http_tokens_file.

    \b
    Examples:
      kvbus token router-a -o router-a.token >> /etc/kvbus/http/tokens
      kvbus token prometheus --status >> /etc/kvbus/http/tokens

    The line has the name and a hash of the token. It goes to standard output. The token itself is shown only once: on
    standard error, or in the new file of --output, which only you can read. The hash does not reveal the token.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    from kvbus.http.credentials import is_name, line_of, new_token  # noqa: PLC0415 - keygen needs none of it

    if not is_name(name):
        raise click.UsageError(f"{name!r} is not a name: use up to 63 letters, digits and . _ @ -, such as router-a")
    fresh = new_token()
    if path is None:
        say(f"the token of {name} (copy it now, it is not shown again): {fresh}")
    else:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FileError(f"{path}: {error.strerror}") from error
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(f"{fresh}\n")
        say(f"wrote {path}")
    click.echo(line_of(name, fresh, content=not status))
