"""``kvbus anonymize``: copy a capture with pseudonyms for tokens and names, so that the copy can be shared."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import click

from kvbus.cli.until import say
from kvbus.common.errors import FileError
from kvbus.tools.capture.anonymize import Anonymizer, Pseudonyms
from kvbus.tools.capture.format import CaptureError, CaptureWriter, read_capture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

F = TypeVar("F", bound="Callable[..., Any]")

_MIN_KEY: Final = 32
_OTHERS: Final = 0o007
_STDIO: Final = Path("-")


def key_file_option(function: F) -> F:
    """Add the option ``--key-file`` to a command. The command passes its value to `anonymizer`."""
    return click.option(
        "--key-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="File with the key of the pseudonyms, at least 32 bytes. Equal keys give equal pseudonyms. [default: new]",
    )(function)


def anonymizer(key_file: Path | None) -> Anonymizer:
    """Return an anonymizer whose key comes from a file. Without a file, use a new random key that is not stored.

    Raises:
        FileError: the file cannot be read, is too short, or is accessible to other users.
    """
    return Anonymizer(Pseudonyms(secrets.token_bytes(_MIN_KEY) if key_file is None else _key(key_file)))


@click.command("anonymize")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File to write; by default stream.anonymized.jsonl beside stream.jsonl.",
)
@key_file_option
def command(*, file: Path, output: Path | None, key_file: Path | None) -> None:
    """Copy a capture of `kvbus record` with pseudonyms for tokens and names, so that the copy can be shared.

    \b
    Examples:
      kvbus anonymize stream.jsonl.gz -o for-others.jsonl.gz
      kvbus anonymize stream.jsonl                # writes stream.anonymized.jsonl
      head -c 32 /dev/urandom > key; chmod 600 key
      kvbus anonymize rank-0.jsonl --key-file key; kvbus anonymize rank-1.jsonl --key-file key

    Pseudonyms replace token ids, hashes, salts, extra keys, sessions, LoRA and model names, topics and every field that
    kvbus does not know. Equal values get equal pseudonyms, and different values get different pseudonyms. A pseudonym
    is as long as its value. Without --key-file, the key is new each time and is not stored. kvbus treats the copy as it
    treats the capture, so `kvbus play` shows the same defect with the copy.

    \b
    The copy does not hide:
      how many requests there were, when they came, how long they were, and how many prompts had equal parts, even
        prompts of different users
      how often each token occurs: in a long capture, this can be enough to guess common words
      whether a token id is below 128, 256, 32768, 65536 or 2^31; lengths of names, and which of their characters
        are letters or digits
      sizes, groups, ranks, media, times, sequence numbers, the engine's names of fields and events
    Anyone who has the key file can compute the original values.

    kvbus anonymize never replaces an existing file. If it is interrupted, it leaves no file behind.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    renaming = anonymizer(key_file)
    if output is None:
        output = _STDIO if file == _STDIO else _beside(file)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    with _new_file(output) as path, CaptureWriter(path, replace=True) as writer:
        written = _progress(lambda: writer.written)
        for message in read_capture(file):
            writer.write(renaming.message(message))
            next(written)
    unreadable = f", {renaming.unreadable} of them not msgpack" if renaming.unreadable else ""
    say(f"wrote {writer.written} messages to {output}{unreadable}; kvbus anonymize --help lists what they do not hide")


def _key(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            key = opened.read()
    except OSError as error:
        raise FileError(f"--key-file {file}: {error.strerror}") from error
    if mode & _OTHERS:
        raise FileError(f"--key-file {file}: other users can read it (mode {mode & 0o777:04o}): run chmod o= {file}")
    if len(key) < _MIN_KEY:
        raise FileError(
            f"--key-file {file}: {len(key)} bytes are too few for a key, {_MIN_KEY} are needed: "
            f"head -c {_MIN_KEY} /dev/urandom > {file}"
        )
    return key


def _beside(file: Path) -> Path:
    zipped = ".gz" if file.suffix == ".gz" else ""
    unzipped = file.with_name(file.name.removesuffix(zipped)) if zipped else file
    return unzipped.with_name(f"{unzipped.stem}.anonymized{unzipped.suffix}{zipped}")


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Create a temporary file beside ``path``, and yield the temporary file's path for writing.

    When the block ends, the temporary file is renamed to ``path``. If the block raises, the temporary file is deleted.
    If ``path`` is ``-`` (standard output), no file is created, and ``-`` itself is yielded.
    """
    if path == _STDIO:
        yield path
        return
    _refuse(path)
    # Choose the name before the file is created. The file can then be deleted even if a signal comes right after.
    partial = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.partial{path.suffix}")
    try:
        try:
            partial.touch(0o600, exist_ok=False)
        except OSError as error:
            raise CaptureError(f"{path}: {error.strerror}") from error
        yield partial
        _refuse(path)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def _refuse(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise FileError(f"{path} exists already; name another file with -o")


def _progress(written: Callable[[], int]) -> Iterator[None]:
    """Print the number of written messages once a second if standard error is a terminal."""
    shown = time.monotonic()
    while True:
        if sys.stderr.isatty() and time.monotonic() - shown >= 1:
            shown = time.monotonic()
            click.echo(f"\rkvbus: {written():,} messages ", err=True, nl=False)
        yield


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)
