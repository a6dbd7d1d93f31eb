"""``kvbus state``: show or delete the content of ``state_dir``, and list or remove unused state directories."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvbus.cli.options import config_options, load_config
from kvbus.cli.until import say
from kvbus.common.errors import ExitCode, InUseError, StateDirError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvbus.state.directory import Found

_WORDS: Final = {None: "no", False: "no", True: "yes"}
_NAMES: Final = {
    "bytes": "size in bytes",
    "files": "size of each file in bytes",
    "highest": "highest reserved seq",
    "slices": "slices of the newest checkpoint",
    "frames": "frames of the write-ahead log since the checkpoint",
    "synced": "every commit waited until the disk had it",
    "this_boot": "written since the machine started",
    "in_use": "in use",
}

_DIRECTORY = click.option(
    "-d",
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="The state directory. Without it, kvbus uses the directory that the configuration names.",
)


@click.group("state")
def command() -> None:
    """Show or delete the state that a bus keeps on disk.

    \b
    Examples:
      kvbus state show -c kvbus.yaml
      kvbus state show -d /var/lib/kvbus --json
      kvbus state wipe -c kvbus.yaml --yes
      kvbus state list
      kvbus state remove --unused-days 30 --yes
    """  # noqa: D301 - \b is click's: keep these lines as they are


def _subcommand(function: Callable[..., None]) -> click.Command:
    return command.command(function.__name__)(config_options(_DIRECTORY(function)))


@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(*, directory: Path | None, as_json: bool, **flags: Any) -> None:
    """List the files of the state, and count the streams in them.

    The command also counts the slices of the checkpoint and the frames of the write-ahead log. It shows no block and no
    token.

    If a running bus uses the state, only the files and the process are shown. No file is changed.

    Exit code 78: kvbus cannot read the directory.
    """
    path, files = _looked(directory, flags)
    shown: dict[str, object] = {"directory": str(path), "bytes": sum(files.values()), "files": files}
    try:
        shown |= _contents(path)
    except InUseError as error:
        shown["in_use"] = str(error)
    if as_json:
        click.echo(json.dumps(shown, indent=2))
        return
    for name, value in shown.items():
        click.echo(f"{_NAMES.get(name, name)}: {_text(value)}".rstrip())
        for file, size in files.items() if name == "files" else ():
            click.echo(f"  {file:<40} {size:>14,}")


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ""
    if value is None or isinstance(value, bool):
        return _WORDS[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def _contents(path: Path) -> dict[str, object]:
    """Return what ``kvbus state show`` prints about the state in the directory ``path``.

    These are the fields of :class:`~kvbus.state.database.Contents`, and ``damaged``: None, or the reason why the
    database cannot be read. In that case there is no other field. Without a database, ``streams`` is 0.

    Raises:
        InUseError: a running bus uses the directory.
    """
    from kvbus.state.database import FAULTS, NAME, contents, text_of  # noqa: PLC0415 - brings the core
    from kvbus.state.lock import unused  # noqa: PLC0415

    try:
        if not (path / NAME).exists():
            return {"damaged": None, "streams": 0}
        with unused(path, f"state_dir {path}"):
            return {"damaged": None, **contents(path)._asdict()}
    except FAULTS as error:
        return {"damaged": f"{path}: {text_of(error)}"}


@click.option("--yes", is_flag=True, help="Delete the state. Without --yes, kvbus only lists the files.")
def wipe(*, directory: Path | None, yes: bool, **flags: Any) -> None:
    """Delete all data about engines and prompts from the state. The numbering stays, so that no seq goes back.

    The command refuses a state that a running bus uses. A disk, especially an SSD, may keep deleted bytes until it
    writes other data to the same position. Snapshots and backups of the disk keep the bytes.

    Exit codes: 0 deleted, 1 files are left or --yes is missing, 69 a bus uses the directory, 78 there is no directory.
    """
    from kvbus.state.contract import StoreError  # noqa: PLC0415 - brings the core
    from kvbus.state.lock import DirectoryLock  # noqa: PLC0415
    from kvbus.state.sqlite import SqliteStore  # noqa: PLC0415

    path, files = _looked(directory, flags)
    if not files:
        say(f"{path} holds no state")
        return
    for name, size in files.items():
        click.echo(f"{path / name}  {size:,} bytes")
    if not yes:
        say("nothing was deleted: add --yes to delete the content of these files")
        raise click.exceptions.Exit(ExitCode.FOUND)
    try:
        with contextlib.closing(DirectoryLock(path, f"state_dir {path}")) as lock:
            store = SqliteStore(path, lock)
            with contextlib.closing(store):
                left = store.wipe()
    except StoreError as error:
        raise StateDirError(path, str(error).removeprefix(f"{path}: ")) from error
    except OSError as error:
        raise StateDirError(path, error.strerror or str(error)) from error
    for text in left:
        say(f"not deleted: {text}")
    if left:
        raise click.exceptions.Exit(ExitCode.FOUND)
    say("deleted; the numbering is kept, and a disk may keep deleted bytes for a while")


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_directories(*, as_json: bool) -> None:
    """List the directories that `state_dir: auto` has created on this machine, also those of other configurations.

    kvbus chooses the directory by the address that an output binds, and deletes no directory by itself. After a change
    of the address, the former directory stays.

    The command shows the directories of the current user, and looks in the base directories that the environment names
    (STATE_DIRECTORY, XDG_RUNTIME_DIR, XDG_STATE_HOME, HOME). It prints each one's size in bytes, the days since its
    last use, and the process that uses it.
    """
    found = _unused_for(0.0, used=True)
    if as_json:
        entries = [{"directory": str(each.path), "bytes": each.bytes, "used": each.used} for each in found]
        both = zip(entries, found, strict=True)
        click.echo(json.dumps([{**entry, "in_use": each.process} for entry, each in both], indent=2))
        return
    for each in found:
        click.echo(_line(each))


@command.command("remove")
@click.option(
    "--unused-days",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Remove the directories that were not used for this number of days.",
)
@click.option("--yes", is_flag=True, help="Remove them. Without --yes, kvbus only lists the directories.")
def remove_directories(*, unused_days: float, yes: bool) -> None:
    """Remove the directories that `state_dir: auto` has created and that no process uses, with their numbering.

    If a bus starts again later at the address of a removed directory, its seqs begin at 0, so restart its routers.

    Exit codes: 0 removed, or there is none, 1 --yes is missing, or a directory cannot be removed.
    """
    from kvbus.state.directory import remove  # noqa: PLC0415 - brings the core

    found = _unused_for(86_400 * unused_days, used=False)
    left = bool(found) and not yes
    for each in found:
        click.echo(_line(each))
        try:
            if yes:
                remove(each.path)
        except (OSError, InUseError) as error:
            say(f"not removed: {each.path}: {getattr(error, 'strerror', None) or error}")
            left = True
    if found and not yes:
        say("nothing was removed: add --yes to remove these directories")
    if left:
        raise click.exceptions.Exit(ExitCode.FOUND)


def _unused_for(seconds: float, *, used: bool) -> list[Found]:
    """Return the state directories of this user whose files have not changed for this time.

    With ``used``, the directories that a process uses are included.
    """
    from kvbus.state.directory import all_directories  # noqa: PLC0415 - brings the core

    since = time.time() - seconds
    return [each for each in all_directories() if each.used <= since and (used or each.process is None)]


def _line(found: Found) -> str:
    days = max(0.0, time.time() - found.used) / 86_400
    process = f"  in use by {found.process}" if found.process else ""
    return f"{found.path}  {found.bytes:,} bytes  last used {days:,.1f} days ago{process}"


def _looked(directory: Path | None, flags: dict[str, Any]) -> tuple[Path, dict[str, int]]:
    from kvbus.state.directory import existing_directory  # noqa: PLC0415 - brings the core
    from kvbus.state.sqlite import files  # noqa: PLC0415

    path = directory
    if path is None:
        config = load_config(**flags)
        path = existing_directory(config)
        if path is None:
            raise StateDirError(config.state_dir, "this configuration has no state on disk")
    try:
        return path, files(path)
    except OSError as error:
        raise StateDirError(path, error.strerror or str(error)) from error


_subcommand(show)
_subcommand(wipe)
