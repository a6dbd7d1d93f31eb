"""Find and open the directory of a bus's state: ``state_dir``, or with ``auto`` a directory that kvbus chooses.

With ``auto`` kvbus creates the directory in the first base directory that has enough free space. The name of the
directory depends on the address that the bus listens on. So a restarted bus finds its directory again, and two buses
that run at the same time have different directories. kvbus uses an existing directory again even if its base directory
has little free space.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from kvbus.common.errors import InUseError, StateDirError
from kvbus.config import Config
from kvbus.config.endpoints import parse_endpoint
from kvbus.state.contract import StoreError
from kvbus.state.lock import DirectoryLock, unused
from kvbus.state.sqlite import NewerStateError, SqliteStore, reached

log = logging.getLogger("kvbus.state")

_PREFIX: Final = "kvbus-state-"
"""Beginning of the name of every directory that ``state_dir: auto`` creates."""

MIN_FREE: Final = 1024 * 1024 * 1024
"""Minimum free space in bytes of a base directory in which kvbus creates a new directory for its state.

The state of a million blocks needs that much while a new checkpoint replaces an old one.
"""

TRIAL: Final = 64 * 1024
"""Number of bytes in the test file that kvbus writes to find out whether a directory is writable."""

MEMORY: Final = Path("/dev/shm")  # noqa: S108 - open to everybody, see _check
SYSTEM: Final = Path("/var/lib/kvbus")
"""A base directory for the state of a system service. It is used only if it exists."""

LOST: Final = (
    "kvbus keeps no state: after a restart routers get AllBlocksCleared, and blocks that are older than the engine's "
    "replay buffer are missing until the engine restarts or resets its cache"
)


@dataclass(frozen=True, slots=True)
class Base:
    """A base directory, in which ``state_dir: auto`` creates the directory of the state.

    Attributes:
        path: the base directory.
        shared: whether other machines may see the base directory, for example because it is a home directory on NFS.
    """

    path: Path
    shared: bool = False


def default_directory() -> Path | None:
    """Return a directory in memory in which this user can write: the user's runtime directory, or else ``/dev/shm``.

    Return None if this user can write in neither of them.
    """
    for candidate in (os.environ.get("XDG_RUNTIME_DIR"), str(MEMORY)):
        if candidate and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    return None


def open_store(config: Config) -> SqliteStore | None:
    """Find or create the directory of a bus's state, lock it, and open the store in it.

    Returns:
        The store; None if no directory can be used.

    Raises:
        InUseError: another process uses the directory.
        StateDirError: the directory in ``state_dir`` cannot be used.
    """
    if config.state_dir is None:
        log.warning("state_dir is null, so %s", LOST)
        return _reservations_only(config)
    if config.state_dir == "auto":
        return _automatic(config)
    directory = Path(config.state_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = DirectoryLock(directory, f"state_dir {directory}")
    except OSError as error:
        raise StateDirError(directory, error.strerror or str(error)) from error
    try:
        return _opened(config, directory, lock)
    except StoreError as error:
        raise _state_dir_error(directory, error) from error


def _state_dir_error(directory: Path, error: StoreError) -> StateDirError:
    return StateDirError(directory, str(error).removeprefix(f"{directory}: "))


def _opened(
    config: Config, directory: Path, lock: DirectoryLock, *, keeps_state: bool = True, old: Path | None = None
) -> SqliteStore:
    try:
        sync = config.state_sync == "batch"
        return SqliteStore(directory, lock, sync=sync, keeps_state=keeps_state, old_directory=old)
    except BaseException:
        lock.close()
        raise


def _reservations_only(config: Config) -> SqliteStore | None:
    """Open a store in a directory in memory, only for the seq reservations. Return None if that is not possible.

    The reservations are needed even if a bus keeps no state: its seqs must not go back after a restart.
    """
    base = default_directory()
    if base is None:
        log.warning(
            "seq reservations cannot be kept: found no directory in memory, such as /dev/shm; "
            "after a restart, seqs begin at 0"
        )
        return None
    path = base / name_of(config, Base(base))
    try:
        path.mkdir(exist_ok=True, mode=0o700)
        _check(path)
        lock = DirectoryLock(path, f"the numbering in {path}")
        return _opened(config, path, lock, keeps_state=False, old=base)
    except NewerStateError as error:
        raise _state_dir_error(path, error) from error
    except (OSError, StoreError) as error:
        log.warning("seq reservations cannot be kept in %s: %s; after a restart, seqs begin at 0", path, error)
        return None


def existing_directory(config: Config) -> Path | None:
    """Return the directory of the bus's state if it exists, otherwise None. No directory is created.

    It is the directory that the bus would use if it were started now.
    """
    if config.state_dir != "auto":
        return None if config.state_dir is None else Path(config.state_dir)
    return max(_candidates(config, make=False)[0], key=reached, default=None)


class Found(NamedTuple):
    """A directory that ``state_dir: auto`` has created on this machine.

    Attributes:
        path: the directory.
        bytes: the size of its files.
        used: the time of the last change of one of its files, in seconds since 1970.
        process: the name of the process that uses the directory; None if no process uses it.
    """

    path: Path
    bytes: int
    used: float
    process: str | None


def all_directories() -> Iterator[Found]:
    """Yield every directory that ``state_dir: auto`` has created for this user, also those of other configurations."""
    for base in dict.fromkeys(each.path for each in bases(os.environ)):
        for path in sorted(base.glob(f"{_PREFIX}*")):
            try:
                _check(path)
                stats = [each.lstat() for each in path.iterdir()]
                used = max([path.lstat().st_mtime, *(each.st_mtime for each in stats)])
                yield Found(path, sum(each.st_size for each in stats), used, _process(path))
            except OSError:
                continue  # another user's, or removed meanwhile


def _process(path: Path) -> str | None:
    try:
        with unused(path, f"the state in {path}"):
            return None
    except InUseError as error:
        return error.holder


def remove(path: Path) -> None:
    """Delete a directory that ``state_dir: auto`` has created, with the state and the numbering in it.

    Raises:
        InUseError: a process uses the directory.
        OSError: the directory cannot be deleted.
    """
    with contextlib.closing(DirectoryLock(path, f"the state in {path}")):
        shutil.rmtree(path)


def unusable(config: Config) -> list[str] | None:
    """Return the reasons why ``state_dir: auto`` finds no directory; None if it finds one. Nothing is created."""
    existing, free, problems = _candidates(config, make=False)
    return None if existing or free else problems


def unwritable(config: Config) -> str:
    """Return the reason why the directory in ``state_dir`` cannot be written; an empty text if it can be written.

    A temporary file is written to find out. Nothing is checked if ``state_dir`` is ``auto`` or null.
    """
    if config.state_dir in {None, "auto"}:
        return ""
    path = Path(str(config.state_dir)).absolute()
    nearest = next(each for each in (path, *path.parents) if each.exists())
    where = "" if nearest == path else f"{nearest}: "
    if not nearest.is_dir():
        return f"{where}it is not a directory"
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(bytes(TRIAL))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{where}{(error.strerror or str(error)).lower()}"
    return ""


def _candidates(config: Config, *, make: bool) -> tuple[list[Path], list[Path], list[str]]:
    """Return the directories that ``state_dir: auto`` may use.

    Args:
        config: the configuration.
        make: whether to create a base directory that is missing. Only a base directory that other machines may see
            (:attr:`Base.shared`) is created, such as one in the user's home directory.

    Returns:
        The directories that exist; the directories that do not exist but can be created; and the reasons why no
            directory can be created in the other base directories.
    """
    problems: list[str] = []
    existing: list[Path] = []
    free: list[Path] = []
    for base in bases(os.environ):
        path = base.path / name_of(config, base)
        try:
            if os.path.lexists(path):
                _check(path)
                existing.append(path)
                continue
            if base.shared and make:
                base.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            elif base.shared:
                base = Base(next(each for each in (base.path, *base.path.parents) if each.exists()))  # noqa: PLW2901
            _check_room(base.path)
        except OSError as error:
            problems.append(f"{path}: {error.strerror or error}")
        else:
            free.append(path)
    return existing, free, problems


def _automatic(config: Config) -> SqliteStore | None:
    existing, free, problems = _candidates(config, make=True)
    for path in (*sorted(existing, key=reached, reverse=True), *free):
        try:
            path.mkdir(exist_ok=True, mode=0o700)
            _check(path)
            store = _opened(config, path, DirectoryLock(path, f"the state in {path}"))
        except NewerStateError as error:
            # Do not try the next directory. It has other seq reservations, so the seqs of a stream could go back.
            raise _state_dir_error(path, error) from error
        except (OSError, StoreError) as error:
            problems.append(f"{path}: {getattr(error, 'strerror', None) or error}")
        else:
            log.info("state_dir auto: the state is kept in %s", path)
            return store
    log.warning("state_dir auto found no directory (%s), so %s", "; ".join(problems) or "no candidate exists", LOST)
    return _reservations_only(config)


def bases(env: Mapping[str, str]) -> Iterator[Base]:
    """Yield the base directories in which ``state_dir: auto`` may create a directory, the best one first.

    A directory that a service manager or an image created for the state is the best, because ``/dev/shm`` may be
    emptied when the service ends. Directories in memory are next. They are fast, and a reboot empties them together
    with the engine's cache. Directories on disks are last.
    """
    if path := _absolute(env.get("STATE_DIRECTORY", "").partition(":")[0]):
        yield Base(path)
    if path := _absolute(env.get("XDG_RUNTIME_DIR")):
        yield Base(path)
    yield Base(MEMORY)
    if SYSTEM.is_dir():
        yield Base(SYSTEM)
    if path := _absolute(env.get("XDG_STATE_HOME")):
        yield Base(path, shared=True)
    elif (home := _absolute(env.get("HOME"))) and home.is_dir():
        yield Base(home / ".local" / "state", shared=True)


def _absolute(text: str | None) -> Path | None:
    """Return the path that ``text`` names if it is absolute.

    Otherwise return None: a relative path would depend on the working directory.
    """
    path = Path(text or "")
    return path if path.is_absolute() else None


def name_of(config: Config, base: Base) -> str:
    """Return the name of the directory in which a bus with this configuration keeps its state.

    It is a hash of the first address that the bus binds. No two buses can bind one address at the same time, and the
    address does not change when sources are added or removed. If the bus binds no address, it is a hash of all
    addresses that the bus connects to.
    """
    bound = [
        endpoint
        for output in config.outputs
        for endpoint in (output.endpoint if output.bind else None, output.replay_endpoint, output.snapshot_endpoint)
        if endpoint is not None
    ]
    dialled = [output.endpoint for output in config.outputs] + [source.endpoint for source in config.sources]
    host = socket.gethostname() if base.shared else ""
    identity = "\n".join([str(os.getuid()), host, *map(_absolute_endpoint, bound[:1] or dialled)])
    return f"{_PREFIX}{hashlib.sha256(identity.encode()).hexdigest()[:24]}"


def _absolute_endpoint(endpoint: str) -> str:
    address = parse_endpoint(endpoint)
    if address.is_ipc and not address.host.startswith("@"):
        return f"ipc://{Path(address.host).absolute()}"
    return endpoint


def _check_room(directory: Path) -> None:
    """Raise an error if a base directory has too little free space for a new state.

    Raises:
        OSError: the base directory does not exist, or has too little free space.
    """
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    if free < MIN_FREE:
        raise OSError(0, f"only {free >> 20} MiB of the disk are free, {MIN_FREE >> 20} are needed")


def _check(path: Path) -> None:
    """Raise an error if other users can use the directory of a state.

    Any user may create directories in some base directories, such as ``/dev/shm``, and a symbolic link may lead to any
    directory.

    Raises:
        OSError: the directory belongs to another user, is open to other users, or is not a directory.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if info.st_uid != os.getuid():
            raise PermissionError(1, "the directory belongs to another user")
        if stat.S_IMODE(info.st_mode) & 0o077:
            raise PermissionError(1, "other users can read or write the directory")
    finally:
        os.close(fd)
