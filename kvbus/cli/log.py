"""``kvbus log``: the streams that a log holds, and their end."""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from kvbus.cli.options import config_options, load_config
from kvbus.cli.until import say

if TYPE_CHECKING:
    from kvbus.config import OutputConfig
    from kvbus.parts.log.inventory import Erased, Inventory
    from kvbus.parts.log.record import Stream


@click.group("log")
def command() -> None:
    """Look at the streams that a log (an output of type kafka, nats or redis) holds, or erase them.

    \b
    Examples:
      kvbus log erase -c kvbus.yaml --worker worker-a --dry-run
      kvbus log erase -c kvbus.yaml --worker worker-a --yes
      kvbus log erase -c kvbus.yaml --cluster tenant-1 --states-too --yes
    """  # noqa: D301 - \b is click's: keep these lines as they are


@command.command("erase")
@config_options
@click.option("--log", "name", help="The output whose log it is, where there are several.")
@click.option("--cluster", help="Only streams of this cluster.")
@click.option("--of-model", "model", help="Only streams of this model.")
@click.option("--worker", help="Only streams of this worker, or WORKER/SOURCE.")
@click.option("--states-too", is_flag=True, help="Do not stop at the states of other streams: delete these, too.")
@click.option("--dry-run", is_flag=True, help="Say what there is, and erase nothing.")
@click.option("--yes", is_flag=True, help="Erase the streams that are listed without it.")
def erase(
    *,
    name: str | None,
    cluster: str | None,
    model: str | None,
    worker: str | None,
    states_too: bool,
    dry_run: bool,
    yes: bool,
    **flags: Any,
) -> None:
    """End streams in a log, and delete their records: a worker's, a model's, a cluster's (which may be a tenant).

    Stop their writers first: one that still writes is fenced, and one that starts later is a new stream. NATS and
    Redis have nothing of them afterwards. Kafka deletes a partition up to an offset, whosever records those are. Where
    that would take other streams' states with it, it stops there, says so, and ends with 1: those writers write their
    states again within state_every, then run it again. --states-too deletes them; until their next states nobody new
    can read those streams.

    The whole log is read. Records are unreadable at once; a broker of Kafka removes its files later, and the names
    stay in the compacted topic until its cleaner has run (docs/LOG.md).

    Exit codes: 0 nothing is left, 1 records are left, 2 --yes is missing, 69 the server cannot be reached or refuses,
    78 no such output.
    """
    wanted = {field: value for field, value in (("cluster", cluster), ("model", model), ("worker", worker)) if value}
    if not wanted:
        raise click.UsageError("name what to erase: --cluster, --of-model or --worker")
    output = _output(load_config(**flags), name)

    def is_meant(stream: Stream) -> bool:
        worker_too = not worker or stream.worker == worker or stream.worker.startswith(f"{worker}/")
        return worker_too and all(getattr(stream, field) == wanted[field] for field in wanted if field != "worker")

    found = _asked(output, _looked(output))
    keys = found.keys(is_meant)
    _show(found, keys)
    if not keys or dry_run:
        return
    if not yes:
        raise click.UsageError("nothing was erased: add --yes to erase the streams above")
    if not _report(_asked(output, _erased(output, found, keys, states_too=states_too)), states_too=states_too):
        raise click.exceptions.Exit(1)


def _output(config: Any, name: str | None) -> OutputConfig:
    from kvbus.common.errors import ConfigError, Problem  # noqa: PLC0415
    from kvbus.parts.log.place import check_files  # noqa: PLC0415

    check_files(config)
    outputs = [each for each in config.outputs if each.log is not None and name in {None, each.name}]
    if len(outputs) != 1:
        wrong = f"{len(outputs)} of them are logs{f' and have the name {name}' if name else ''}: --log names one"
        raise ConfigError([Problem("outputs", wrong)])
    found: OutputConfig = outputs[0]
    return found


def _asked(output: OutputConfig, work: Any) -> Any:
    from kvbus.common.errors import BindError  # noqa: PLC0415
    from kvbus.parts.log.contract import FencedError, UnavailableError  # noqa: PLC0415

    try:
        return asyncio.run(work)
    except (FencedError, UnavailableError) as error:
        raise BindError(f"the log at {output.endpoint}", str(error), verb="use") from error


def _module(output: OutputConfig) -> Any:
    """What looks at a log of this type, and erases streams there: an extra."""
    return import_module(f"kvbus.parts.log.{output.type}_erase")


async def _looked(output: OutputConfig) -> Inventory:
    from kvbus.parts.log.place import place_of  # noqa: PLC0415

    found: Inventory = await _module(output).look(place_of(output))
    return found


async def _erased(output: OutputConfig, found: Inventory, keys: list[str], *, states_too: bool) -> list[Erased]:
    from kvbus.parts.log.place import place_of  # noqa: PLC0415

    done: list[Erased] = await _module(output).erase(place_of(output), found, keys, states_too=states_too)
    return done


def _show(found: Inventory, keys: list[str]) -> None:
    """A line for each stream: what there is of it."""
    for key in keys:
        held = found.streams.get(key)
        what = "no records" if held is None else f"{held.records:,} records, {held.bytes:,} bytes"
        where = "" if held is None else f", positions {held.first} to {held.last}"
        if held is not None and held.partition >= 0:
            where += f" of partition {held.partition}"
        click.echo(f"{key}  {what}{where}")
    if not keys:
        say("there is no such stream")


def _report(done: list[Erased], *, states_too: bool) -> bool:
    """Say what is left; whether nothing is."""
    if not done:
        say("nothing of these streams is left but their ends")
    for each in done:
        say(f"partition {each.partition}: everything before offset {each.reached} is gone")
        if each.states and states_too:
            say(f"nobody new can read these before their next states: {', '.join(each.states)}")
        elif each.states:
            say(f"records before {each.wanted} are kept for the states of {', '.join(each.states)}")
            say("run it again after state_every: these streams have newer states then")
    return all(each.reached == each.wanted for each in done)
