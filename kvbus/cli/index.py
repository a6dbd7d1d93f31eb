"""``kvbus index``: follow buses, engines or a log, and answer which worker holds the longest prefix of a prompt."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvbus.cli.curve import curve_keys, curve_options
from kvbus.cli.login import bus_url, login, login_options
from kvbus.cli.until import run_until_signal, say
from kvbus.common.errors import ConfigError, Problem

if TYPE_CHECKING:
    from kvbus.index.bus import Stream
    from kvbus.parts.log_router import LogRouter


@click.command("index", short_help="Answer which worker holds which prefix.")
@click.argument("sources", nargs=-1, metavar="SOURCE…")
@click.option("--listen", default="127.0.0.1:9478", show_default=True, metavar="HOST:PORT", help="Address for queries.")
@click.option(
    "--output",
    "output",
    metavar="NAME",
    help="Name of the bus's output to read.  [default: the first that the index can read]",
)
@click.option(
    "--log",
    "log_files",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="YAML file that describes a log: kafka, nats or redis, with keys as under sources[].discover. Repeatable.",
)
@click.option(
    "--copies",
    is_flag=True,
    help="Drop a block only after as many removals as stores. Use this for engines' own streams, not for a kvbus's.",
)
@click.option(
    "--tokens-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with the bearer tokens of remote clients, as in the bus's http_tokens_file.",
)
@click.option("--tls-certificate", type=click.Path(path_type=Path), metavar="FILE", help="TLS: the certificate.")
@click.option("--tls-key", type=click.Path(path_type=Path), metavar="FILE", help="TLS: the certificate's private key.")
@login_options
@curve_options
def command(
    *,
    sources: tuple[str, ...],
    listen: str,
    output: str | None,
    log_files: tuple[Path, ...],
    copies: bool,
    tokens_file: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    http_token_file: Path | None,
    http_ca: Path | None,
    curve_secret_key: Path | None,
    curve_server_key: Path | None,
) -> None:
    """Follow buses, engines or a log, and answer POST /query: which worker holds the longest prefix of a prompt.

    \b
    Examples:
      kvbus index http://127.0.0.1:9477
      kvbus index http://bus-a:9477 http://bus-b:9477 --listen 0.0.0.0:9478 --tokens-file tokens
      kvbus index pod-a=tcp://10.0.0.7:5657,tcp://10.0.0.7:5658
      kvbus index tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 --copies
      kvbus index --log redis.yaml

    A SOURCE is the URL of a bus's HTTP port, at which the index finds the bus's output and the states of its sources.
    Or it is a stream of an engine or of an output, as [NAME=]ENDPOINT[,REPLAY]. The index answers only programs on this
    host and clients with a token.

    Exit codes: 0 ended by Ctrl-C or SIGTERM, 2 a bad option, 69 the address is taken, 78 a source cannot be read.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    if not sources and not log_files:
        raise click.UsageError("give a SOURCE, for example http://127.0.0.1:9477, or --log")
    if (tls_certificate is None) != (tls_key is None):
        raise click.UsageError("TLS needs both --tls-certificate and --tls-key")
    curve = curve_keys(curve_secret_key, curve_server_key)

    # Import these modules only when the command runs, to keep `kvbus --help` fast.
    from kvbus.common.logs import setup  # noqa: PLC0415
    from kvbus.config.endpoints import parse_address  # noqa: PLC0415
    from kvbus.index.access import IndexAccess  # noqa: PLC0415
    from kvbus.index.bus import Bus  # noqa: PLC0415
    from kvbus.index.follower import Follower  # noqa: PLC0415
    from kvbus.index.server import IndexServer  # noqa: PLC0415

    try:
        host, port = parse_address(listen)
    except ValueError as error:
        raise click.UsageError(f"--listen: {error}") from error
    urls = [bus_url(each) for each in sources if each.startswith(("http://", "https://"))]
    streams = named_streams([each for each in sources if not each.startswith(("http://", "https://"))])
    buses = [Bus(url, login(url, http_token_file, http_ca), output, curve=curve is not None) for url in urls]
    access = IndexAccess(tokens_file, tls_certificate, tls_key)
    setup("info", "auto")

    async def session(stop: asyncio.Event) -> None:
        logs = [log_router(path) for path in log_files]
        try:
            follower = Follower(streams, buses, logs, copies=copies, curve=curve)
            await follower.open()
        except ValueError as error:
            raise click.UsageError(f"{error}; for example tcp://127.0.0.1:5557") from error
        server = IndexServer(follower, access)
        tasks: list[asyncio.Task[object]] = []
        try:
            address = await server.start(host, port)
            say(f"answers at http{'s' if access.context() else ''}://{address[0]}:{address[1]}")
            tasks += [asyncio.create_task(each) for each in (stop.wait(), follower.failed(), access.follow())]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await server.close()
            await follower.close()

    run_until_signal(session)


def named_streams(sources: list[str]) -> dict[str, Stream]:
    """Parse sources of the form ``[NAME=]ENDPOINT[,REPLAY]``. Return streams by name; the default name is ENDPOINT.

    Raises:
        click.UsageError: a source is malformed, or two sources have the same name.
    """
    from kvbus.index.bus import Stream  # noqa: PLC0415

    found: dict[str, Stream] = {}
    for source in sources:
        name, separator, endpoints = source.partition("=")
        if not separator:
            name, endpoints = source.partition(",")[0], source
        parts = endpoints.split(",")
        if len(parts) > 2 or not name or not all("://" in part for part in parts):
            raise click.UsageError(
                f"{source!r} is neither the URL of a bus, such as http://127.0.0.1:9477, nor [NAME=]ENDPOINT[,REPLAY], "
                "such as tcp://127.0.0.1:5657"
            )
        if name in found:
            raise click.UsageError(f"two sources are named {name!r}; give one of them another NAME=")
        found[name] = Stream(parts[0], parts[1] if len(parts) == 2 else None)
    return found


def log_router(path: Path) -> LogRouter:
    """Return an object that follows the engines' streams in the log that a YAML file describes.

    Raises:
        ConfigError: the file is malformed.
    """
    from kvbus.config import yamlfile  # noqa: PLC0415
    from kvbus.parts.log_router import LogRouter  # noqa: PLC0415

    data = yamlfile.read(path).data
    if not isinstance(data, dict) or len(data) != 1 or not isinstance(next(iter(data.values())), dict):
        raise ConfigError([Problem("--log", "must have one section, kafka, nats or redis, with keys", str(path))])
    ((kind, keys),) = data.items()
    try:
        return LogRouter(kind, keys)
    except ValueError as error:
        raise ConfigError([Problem("--log", str(error), str(path))]) from error
