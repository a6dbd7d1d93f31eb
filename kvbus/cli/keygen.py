"""``kvbus keygen``: key pairs for CURVE."""

from __future__ import annotations

import os
from pathlib import Path

import click

from kvbus.cli.until import say
from kvbus.common.errors import ConfigError, Problem
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
def command(*, name: str | None, directory: Path, force: bool, public_of: Path | None) -> None:
    """Make a CURVE key pair: NAME.key to hand out, NAME.key_secret to keep. Print the public key.

    \b
    Examples:
      kvbus keygen kvbus -d /etc/kvbus/keys
      kvbus keygen router-a >> routers.keys      # an allow-list: one public key a line
      kvbus keygen --public-of /etc/kvbus/keys/kvbus.key_secret

    The files have the format of pyzmq's zmq.auth and of czmq. Only you may read the secret one. kvbus refuses a secret
    key that others can read, and accepts one that its group can (a Kubernetes Secret with fsGroup, defaultMode 0440).
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
        raise click.UsageError(f"{error.filename} exists already; --force replaces it") from error
    except OSError as error:
        raise click.UsageError(f"{error.filename}: {error.strerror}") from error
    say(f"wrote {path}.key_secret and {path}.key")
    click.echo(public.decode())


def _write(path: Path, text: str, mode: int, *, force: bool) -> None:
    """Write a new file that never has more permissions than ``mode``."""
    if force:
        path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        os.fchmod(fd, mode)
        file.write(text)
