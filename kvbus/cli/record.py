"""``kvbus record``: record a stream to a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvbus.cli.anonymize import anonymizer, key_file_option
from kvbus.cli.curve import curve_keys, curve_options
from kvbus.cli.reach import explained
from kvbus.cli.until import run_until_signal, say, until
from kvbus.common.errors import FileError
from kvbus.tools.capture.format import CaptureWriter
from kvbus.tools.capture.record import Stats, record
from kvbus.transport.client.raw import RawSubscriber

if TYPE_CHECKING:
    import asyncio


@click.command("record")
@click.argument("endpoint")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--bind", is_flag=True, help="Listen at ENDPOINT, for engines that connect to it.")
@click.option("--topic", default="", help="Record only topics with this prefix.")
@click.option("--count", type=click.IntRange(1), help="Stop after N messages.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="Stop after N seconds; by default at Ctrl-C.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option(
    "--anonymize", is_flag=True, help="Anonymize the capture, so that it can be shared: see `kvbus anonymize`."
)
@key_file_option
@curve_options
def command(
    *,
    endpoint: str,
    file: Path,
    bind: bool,
    topic: str,
    count: int | None,
    seconds: float | None,
    force: bool,
    anonymize: bool,
    key_file: Path | None,
    curve_secret_key: Path | None,
    curve_server_key: Path | None,
) -> None:
    """Record a stream of an engine or of kvbus to a file for `kvbus play`.

    \b
    Examples:
      kvbus record tcp://127.0.0.1:5557 stream.jsonl
      kvbus record tcp://127.0.0.1:5557 stream.jsonl.gz --seconds 60
      kvbus record 'tcp://*:5557' stream.jsonl --bind --count 10000
      kvbus record tcp://127.0.0.1:5557 for-others.jsonl.gz --anonymize
      kvbus record tcp://127.0.0.1:5657 - --topic kv@ | head

    The file has one message per line: t (seconds since the first message), topic and payload in base64, and seq. kvbus
    record writes each line at once, so that Ctrl-C leaves a complete file. - is standard output. The file holds
    prompts, so only you can read it. Missing batches are counted, but not requested.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    if key_file is not None and not anonymize:
        raise click.UsageError("--key-file is for --anonymize")
    if file.is_file() and not force:
        if not sys.stdin.isatty():
            raise FileError(f"{file} exists already; --force replaces it")
        click.confirm(f"{file} exists already. Replace it?", abort=True, err=True)
    renaming = anonymizer(key_file) if anonymize else None
    curve = curve_keys(curve_secret_key, curve_server_key, bind=bind)
    stats = Stats()

    async def session(stop: asyncio.Event) -> None:
        subscriber = RawSubscriber(endpoint, topic=topic.encode(), bind=bind, curve=curve)
        try:
            subscriber.start()
        except ValueError as error:
            raise click.UsageError(f"{error}; for example tcp://127.0.0.1:5557") from error
        try:
            with CaptureWriter(file, replace=True) as writer:
                say(f"recording {subscriber.endpoint} to {file}" + (", bound" if bind else ""))
                recording = until(
                    stop,
                    record(subscriber, writer, count=count, seconds=seconds, anonymizer=renaming, stats=stats),
                )
                if bind:
                    await recording
                else:
                    async with explained(endpoint, curve, lambda: stats.recorded + stats.unusable > 0):
                        await recording
        finally:
            await subscriber.close()
        say(_summary(stats))

    run_until_signal(session)


def _summary(stats: Stats) -> str:
    parts = [f"recorded {stats.recorded} messages"]
    if stats.missing:
        parts.append(f"{stats.missing} missing")
    if stats.restarts:
        parts.append(f"{stats.restarts} restarts of the engine")
    if stats.unusable:
        parts.append(f"{stats.unusable} left out, because they are not [topic, seq, payload]")
    return ", ".join(parts)
