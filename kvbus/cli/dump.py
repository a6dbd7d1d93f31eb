"""``kvbus dump``: print the live blocks of a publisher, rebuilt from its replay or its snapshot."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvbus.cli.curve import curve_keys, curve_options
from kvbus.cli.until import run_until_signal, say, until
from kvbus.client.sequence import Timing
from kvbus.client.subscriber import Subscriber
from kvbus.client.updates import Lost, Rejected, Synced
from kvbus.client.view import BlockView
from kvbus.common.errors import ExitCode, KvbusError
from kvbus.core.sequencing.actions import LostReason
from kvbus.core.types import HASH_FORMS

if TYPE_CHECKING:
    from kvbus.transport.client.subscriber import AnswerFraming
    from kvbus.transport.curve import Curve

_IDLE_S: Final = 2.0


class NoAnswerError(KvbusError):
    """The publisher did not answer in time, or has no snapshot."""

    exit_code = ExitCode.UNAVAILABLE


@dataclass(slots=True)
class Rebuilt:
    """The live blocks of a publisher from its replay or snapshot, and warnings that blocks may be missing or dead."""

    view: BlockView
    warnings: list[str] = field(default_factory=list)


async def rebuild(
    replay_endpoint: str | None,
    *,
    snapshot_endpoint: str | None = None,
    framing: AnswerFraming,
    within: float,
    copies: bool,
    curve: Curve | None = None,
) -> Rebuilt:
    """Rebuild a publisher's live blocks from a snapshot, or from a replay of its batches from seq 0 to END.

    Raises:
        NoAnswerError: no answer came within `within` seconds, or the publisher has no snapshot.
        ValueError: an endpoint is malformed.
    """
    # Make several short requests instead of one long one, because a publisher that dies after it has received a request
    # never answers it.
    idle = min(within, _IDLE_S)
    attempts = math.ceil(within / idle)
    # A snapshot is one message and may take long. With a replay endpoint, kvbus makes only one snapshot request, which
    # gets all the time; a replay follows if it fails. Otherwise several snapshot requests share the time equally.
    timing = Timing(idle_s=idle, attempts=attempts, snapshot_s=within / (1 if replay_endpoint else attempts))
    rebuilt = Rebuilt(BlockView(copies=copies, on_lost="keep"))
    rejected = 0
    async with Subscriber(
        None, replay_endpoint, snapshot_endpoint=snapshot_endpoint, framing=framing, timing=timing, curve=curve
    ) as subscriber:
        while True:
            update = await subscriber.receive()
            rebuilt.view.update(update)
            if isinstance(update, Lost):
                if update.reason is LostReason.NO_ANSWER:
                    asked = " or ".join(filter(None, (snapshot_endpoint, replay_endpoint)))
                    raise NoAnswerError(f"no answer from {asked} within {within:g} s")
                if update.reason is LostReason.UNAVAILABLE:
                    raise NoAnswerError(f"the publisher at {snapshot_endpoint} has no snapshot")
                rebuilt.warnings.append(_explain(update))
            elif isinstance(update, Rejected):
                rejected += 1
            elif isinstance(update, Synced):
                break
    if rejected:
        rebuilt.warnings.append(f"{rejected} batches are unreadable")
    return rebuilt


def _explain(lost: Lost) -> str:
    if lost.reason is LostReason.TRIMMED and lost.first == 0 and lost.last is not None:
        return f"the replay starts at seq {lost.last + 1}: older batches are trimmed, and their blocks are missing here"
    last = "" if lost.last is None or lost.last == lost.first else f" to {lost.last}"
    return f"batch {lost.first}{last} is not in the replay ({lost.reason}): blocks may be missing or dead"


@click.command("dump", short_help="Print a stream's live blocks.")
@click.option("--replay-endpoint", metavar="ENDPOINT", help="The publisher's replay endpoint.")
@click.option(
    "--snapshot-endpoint",
    metavar="ENDPOINT",
    help="The publisher's snapshot endpoint. With a replay endpoint too, the batches after the snapshot come from it.",
)
@click.option(
    "--framing",
    type=click.Choice(["auto", "3", "4", "sim"]),
    default="auto",
    show_default=True,
    help="Frames of each message in an answer: 3 for vLLM up to 0.25 and SGLang up to 0.5.21, 4 for later releases.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="S",
    help="Maximum seconds to wait for an answer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each block, not the number of blocks.")
@click.option(
    "--hashes",
    type=click.Choice(list(HASH_FORMS)),
    default="number",
    show_default=True,
    help="How --json writes integer hashes. Use string for jq and browsers, which change large numbers.",
)
@click.option(
    "--copies",
    is_flag=True,
    help="Drop a block only after as many removals as stores. Use this for an engine's own stream, not for a kvbus's.",
)
@curve_options
def command(
    replay_endpoint: str | None,
    snapshot_endpoint: str | None,
    framing: AnswerFraming,
    timeout: float,
    as_json: bool,
    hashes: str,
    copies: bool,
    curve_secret_key: Path | None,
    curve_server_key: Path | None,
) -> None:
    """Rebuild a publisher's live blocks from its replay or its snapshot, and print the number of blocks.

    \b
    Examples:
      kvbus dump --replay-endpoint tcp://127.0.0.1:5658
      kvbus dump --snapshot-endpoint tcp://127.0.0.1:5659 --json
      kvbus dump --replay-endpoint tcp://127.0.0.1:5558 --copies --json | jq -c '[.medium, .hash]'

    With --json each residency of a block is one line: rank, hash, parent, medium, group_idx, block_size, token_ids,
    copies, and locality and ownership if the engine names them. Byte hashes are hex strings. Exit code 69: the
    publisher did not answer, or has no snapshot.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    if replay_endpoint is None and snapshot_endpoint is None:
        raise click.UsageError("give --replay-endpoint, for example tcp://127.0.0.1:5558, or --snapshot-endpoint")
    curve = curve_keys(curve_secret_key, curve_server_key)
    rebuilt: Rebuilt | None = None

    async def session(stop: asyncio.Event) -> None:
        async def work() -> None:
            nonlocal rebuilt
            rebuilt = await rebuild(
                replay_endpoint,
                snapshot_endpoint=snapshot_endpoint,
                framing=framing,
                within=timeout,
                copies=copies,
                curve=curve,
            )

        await until(stop, work())

    try:
        run_until_signal(session)
    except ValueError as error:
        raise click.UsageError(f"{error}; for example tcp://127.0.0.1:5558") from error
    if rebuilt is None:
        say("interrupted: the replay is incomplete, so no blocks are printed")
        raise SystemExit(ExitCode.INTERRUPTED)
    for warning in rebuilt.warnings:
        say(f"warning: {warning}")
    if not as_json:
        click.echo(f"{len(rebuilt.view)} block{'' if len(rebuilt.view) == 1 else 's'}")
        return
    written = HASH_FORMS[hashes]
    for block in rebuilt.view:
        for (locality, owner), count in block.residencies.items():
            line = block.to_json() | {"hash": written(block.hash), "parent": written(block.parent), "copies": count}
            line |= {name: text for name, text in (("locality", locality), ("ownership", owner)) if text is not None}
            sys.stdout.write(json.dumps(line, separators=(",", ":")) + "\n")
