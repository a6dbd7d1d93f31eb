"""``kvbus state``: what is in ``state_dir``, and its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvbus.cli.options import config_options, load_config
from kvbus.cli.until import say
from kvbus.common.errors import StateDirError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvbus.daemon.state_inventory import Inventory

_DIRECTORY = click.option(
    "-d",
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="The directory itself, in place of a configuration that names it.",
)


@click.group("state")
def command() -> None:
    """Look at the state that a bus keeps on disk, or remove it.

    \b
    Examples:
      kvbus state show -c kvbus.yaml
      kvbus state show -d /var/lib/kvbus --json
      kvbus state wipe -c kvbus.yaml --yes
    """  # noqa: D301 - \b is click's: keep these lines as they are


def _subcommand(function: Callable[..., None]) -> click.Command:
    return command.command(function.__name__)(config_options(_DIRECTORY(function)))


@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(*, directory: Path | None, as_json: bool, **flags: Any) -> None:
    """Say what files there are: size, version, sealed or not, streams, seqs. Nothing of their content is read.

    A state of a running bus may be looked at. Exit codes: 0 there is a directory, 78 there is none that can be read.
    """
    from kvbus.daemon.disk import Disk  # noqa: PLC0415 - brings zmq

    path, found = _looked(directory, flags)
    committed = found.committed
    shown = {
        "directory": str(path),
        "sealed": _sealed(found),
        "bytes": sum(file.size for file in found.files),
        "files": [file._asdict() for file in found.files],
        "streams": found.streams,
        "highest_seq": found.highest,
        "generation": None if committed is None else committed.generation,
        "log_bytes": None if committed is None else committed.length,
        "synced": None if committed is None else committed.synced,
        "this_boot": None if committed is None else committed.boot == Disk().boot_id(),
        "damaged": found.damaged or None,
    }
    if as_json:
        click.echo(json.dumps(shown, indent=2))
        return
    for name, value in shown.items():
        if name == "files":
            for file in found.files:
                version = f"version {file.version}" if file.version else "no version"
                click.echo(f"  {file.name:<28} {file.size:>12,}  {version}, {'sealed' if file.sealed else 'in clear'}")
        else:
            click.echo(f"{name}: {value}")


@click.option("--yes", is_flag=True, help="Remove the files that are listed without it.")
def wipe(*, directory: Path | None, yes: bool, **flags: Any) -> None:
    """Remove what the state holds of engines and prompts. The numbering stays, so that no seq goes back.

    Refused while a bus has the directory. Files are deleted and not overwritten: a disk, an SSD above all, may keep
    their bytes until it writes there again, and a snapshot or a backup keeps them anyway. A sealed state
    (state_key_file) is gone for good once its key is.

    Exit codes: 0 nothing is left, 1 something could not be removed, 2 --yes is missing, 69 a bus has the directory, 78
    there is no such directory.
    """
    from kvbus.daemon.lock import DirectoryLock  # noqa: PLC0415 - brings zmq
    from kvbus.daemon.state_inventory import look  # noqa: PLC0415
    from kvbus.daemon.state_inventory import wipe as remove  # noqa: PLC0415

    path, found = _looked(directory, flags)
    if not found.files and not found.damaged:
        say(f"{path} holds no state")
        return
    try:
        lock = DirectoryLock(path, f"state_dir {path}")
        try:
            found = look(path)
            for file in found.files:
                click.echo(f"{path / file.name}  {file.size:,} bytes")
            say(f"kept: {', '.join(found.others)}")
            if not yes:
                raise click.UsageError("nothing was removed: add --yes to remove the files above")
            left = remove(path, found)
        finally:
            lock.release()
    except OSError as error:
        raise StateDirError(path, error.strerror or str(error)) from error
    for text in left:
        say(f"not removed: {text}")
    if left:
        raise click.exceptions.Exit(1)
    say("removed; a disk may keep the bytes of deleted files for a while")


def _looked(directory: Path | None, flags: dict[str, Any]) -> tuple[Path, Inventory]:
    from kvbus.daemon.state_inventory import look  # noqa: PLC0415 - brings zmq
    from kvbus.daemon.state_place import there  # noqa: PLC0415

    path = directory
    if path is None:
        config = load_config(**flags)
        path = there(config)
        if path is None:
            raise StateDirError(config.state_dir, "there is no state of this configuration")
    try:
        return path, look(path)
    except OSError as error:
        raise StateDirError(path, error.strerror or str(error)) from error


def _sealed(found: Inventory) -> str:
    kinds = {file.sealed for file in found.files}
    return "nothing" if not kinds else "some" if len(kinds) > 1 else "yes" if kinds == {True} else "no"


_subcommand(show)
_subcommand(wipe)
