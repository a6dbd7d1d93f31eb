"""``kvbus sim``: run a synthetic engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from kvbus.cli.play import open_publisher
from kvbus.cli.until import run_until_signal, say, until
from kvbus.common.errors import FileError
from kvbus.config.endpoints import endpoint_offset
from kvbus.tools.sim.dialects import DIALECTS, Hashes
from kvbus.tools.sim.engine import EngineOptions, SimEngine, run
from kvbus.tools.sim.workload import read_trace, synthetic
from kvbus.transport.engine.publisher import EnginePublisher, Framing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvbus.tools.sim.workload import Job


def _tiers(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    tiers = {}
    for value in values:
        name, _, blocks = value.partition("=")
        if name not in ("CPU", "DISK") or not blocks.isdigit() or not int(blocks):
            raise click.BadParameter(f"{value!r} is not CPU=BLOCKS or DISK=BLOCKS, such as CPU=4000")
        tiers[name] = int(blocks)
    return tiers


def _list_dialects(ctx: click.Context, _param: click.Parameter, asked: bool) -> None:
    if asked:
        for dialect in DIALECTS.values():
            form = "maps" if dialect.maps else "arrays"
            click.echo(f"{dialect.name:18} {form:6}  replay framing {dialect.framing}")
        ctx.exit()


@click.command("sim")
@click.option(
    "--dialect",
    type=click.Choice(list(DIALECTS)),
    default="vllm-0.33",
    show_default=True,
    metavar="NAME",
    help="Engine release to imitate; see --list-dialects.",
)
@click.option(
    "--list-dialects",
    is_flag=True,
    callback=_list_dialects,
    expose_value=False,
    is_eager=True,
    help="List the engine releases that --dialect accepts.",
)
@click.option("--endpoint", default="tcp://*:5557", show_default=True, help="Endpoint of the live stream of rank 0.")
@click.option(
    "--replay-endpoint",
    metavar="ENDPOINT",
    help="Endpoint at which rank 0 answers replay requests. Without it, no rank answers them.",
)
@click.option(
    "--bind/--connect",
    default=None,
    help="Listen at the endpoint, or connect to it. By default, as in vLLM, listen at a wildcard or an ipc endpoint, "
    "and connect to any other host.",
)
@click.option(
    "--ranks", type=click.IntRange(1, 64), default=1, show_default=True, help="Number of data-parallel ranks."
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    help="Batches per second of each rank.",
)
@click.option(
    "--blocks",
    type=click.IntRange(2),
    default=2000,
    show_default=True,
    help="Number of blocks in the GPU pool of a rank.",
)
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens per block.")
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    callback=_tiers,
    metavar="NAME=BLOCKS",
    help="Add a lower tier of N blocks: CPU=N or DISK=N. Repeatable.",
)
@click.option("--hashes", type=click.Choice(["unsigned", "signed", "bytes"]), help="Form of block hashes.")
@click.option("--topic", default="", help="Topic of every message; {rank} is the rank.")
@click.option(
    "--framing",
    type=click.Choice(["3", "4", "sim"]),
    help="Frames of each message in a replay answer; by default as in the dialect.",
)
@click.option(
    "--buffer-steps",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="Number of newest batches that each rank keeps for replays.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the events.")
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="FILE", help="Trace of requests, instead of a synthetic load."
)
@click.option(
    "--requests",
    type=click.IntRange(1),
    metavar="N",
    help="Number of requests to each rank, after which the rank is idle.",
)
@click.option(
    "--restart-every", type=click.FloatRange(0), default=0.0, metavar="SECONDS", help="Seconds between restarts."
)
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="Stop after N seconds; by default at Ctrl-C.")
@click.option(
    "--exit-after",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Exit this many seconds after the end of the workload (--requests, --trace); by default at Ctrl-C.",
)
@click.option(
    "--subscribers",
    type=click.IntRange(0),
    default=0,
    help="Number of subscribers that each rank waits for before it publishes.",
)
@click.option(
    "--truth-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="At the end, write the blocks that are live in the simulated cache to FILE, as JSON.",
)
def command(**options: Any) -> None:
    """Publish the events of a simulated engine with a prefix cache: stores, hits, evictions, tiers, restarts.

    \b
    Examples:
      kvbus sim --replay-endpoint 'tcp://*:5558'
      kvbus sim --dialect sglang-0.5.23 --ranks 2 --rate 50
      kvbus sim --trace conversation_trace.jsonl --blocks 20000 --rate 100
      kvbus sim --tier CPU=4000 --tier DISK=20000 --restart-every 30
      kvbus sim --requests 100 --exit-after 0 --truth-file truth.json --endpoint ipc:///tmp/engine

    The simulated engine has a real prefix cache, but no model. Its requests are synthetic conversations that share
    system prompts, or come from a trace in Mooncake's format. The cache allocates, hits, references and evicts blocks.
    Each event has exactly the form of the engine release. Rank r publishes at the ports of rank 0 plus r. If the
    endpoint names a host, the simulator connects to it, as vLLM does; with --bind it listens there.

    The truth file has every block that is live at the end: hash, group_idx, medium, copies, parent, tokens,
    block_size, rank, and prefix, the sha256 of all tokens up to the block's end.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    truth = options["truth_file"]
    if truth is not None and not truth.parent.is_dir():
        # Check this now, because an error at the end of a long run would lose the truth file.
        raise FileError(f"{truth}: no such directory")
    pairs = [_engine(rank, **options) for rank in range(options["ranks"])]

    async def session(stop: asyncio.Event) -> None:
        try:
            for _, publisher in pairs:
                open_publisher(publisher)
            await _drive(pairs, stop, options)
        finally:
            for _, publisher in pairs:
                publisher.close(linger=1.0)

    run_until_signal(session)
    batches = sum(publisher.next_seq for _, publisher in pairs)
    requests = sum(engine.finished for engine, _ in pairs)
    asked = sum(engine.prompt_tokens for engine, _ in pairs)
    hit = sum(engine.cached_tokens for engine, _ in pairs)
    share = f", {hit / asked:.0%} of prompt tokens were cached" if asked else ""
    say(f"published {batches} batches for {requests} requests{share}")
    if truth is not None:
        _write_truth(truth, pairs)


def _engine(rank: int, **options: Any) -> tuple[SimEngine, EnginePublisher]:
    dialect = DIALECTS[options["dialect"]]
    if options["hashes"] is not None:
        dialect = dialect.with_hashes(cast("Hashes", options["hashes"]))
    shape = EngineOptions(
        blocks=options["blocks"],
        block_size=options["block_size"],
        tiers=options["tiers"],
        requests=options["requests"],
    )
    try:
        engine = SimEngine(dialect, _jobs(rank, **options), rank=rank, options=shape)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    replay = options["replay_endpoint"]
    try:
        endpoint = _at_rank(options["endpoint"], rank)
        replay = None if replay is None else _at_rank(replay, rank)
    except ValueError as error:
        raise click.UsageError(f"{error}; for example --endpoint 'tcp://*:5557'") from error
    publisher = EnginePublisher(
        endpoint,
        replay,
        topic=options["topic"].replace("{rank}", str(rank)).encode(),
        framing=cast("Framing", options["framing"] or dialect.framing),
        buffer_steps=options["buffer_steps"],
        bind=options["bind"],
    )
    return engine, publisher


def _at_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of one rank, from the endpoint of rank 0.

    The port of rank r is the port of rank 0 plus r. If the port is ``0`` or ``*``, the system chooses a port for each
    rank, so the endpoint is returned unchanged.
    """
    return endpoint if endpoint.endswith((":*", ":0")) else endpoint_offset(endpoint, rank)


def _jobs(rank: int, **options: Any) -> Iterator[Job]:
    if options["trace"] is None:
        # Limit conversations to half of the block pool, because the simulated engine truncates longer prompts.
        longest = min(4096, options["blocks"] * options["block_size"] // 2)
        return synthetic(options["seed"], rank, max_tokens=longest)
    jobs = read_trace(options["trace"], rank=rank, ranks=options["ranks"])
    # Read the first request before a port is bound, so that an error in the file is the first one to be reported.
    return chain(list(islice(jobs, 1)), jobs)


async def _drive(pairs: list[tuple[SimEngine, EnginePublisher]], stop: asyncio.Event, options: Any) -> None:
    async def one(engine: SimEngine, publisher: EnginePublisher) -> None:
        if options["subscribers"]:
            await until(stop, publisher.wait_for_subscriber(count=options["subscribers"]))
        await run(engine, publisher, stop, rate=options["rate"], restart_every=options["restart_every"])

    async def all_ranks() -> None:
        async with asyncio.TaskGroup() as ranks:
            for engine, publisher in pairs:
                ranks.create_task(one(engine, publisher))
        if not stop.is_set():
            idle = "the workload has ended; idle"
            say(f"{idle} until Ctrl-C" if options["exit_after"] is None else idle)
            await _sleep(stop, options["exit_after"])
        stop.set()

    async def watch() -> None:
        await _sleep(stop, options["seconds"])
        stop.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch())
        tasks.create_task(all_ranks())


async def _sleep(stop: asyncio.Event, seconds: float | None) -> None:
    """Wait for `seconds` seconds, or until `stop` is set. If `seconds` is None, wait only for `stop`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


def _write_truth(path: Path, pairs: list[tuple[SimEngine, EnginePublisher]]) -> None:
    truth = {
        "engine": pairs[0][0].dialect.name,
        "next_seq": [publisher.next_seq for _, publisher in pairs],
        "blocks": [entry for engine, _ in pairs for entry in engine.truth()],
    }
    try:
        path.write_text(json.dumps(truth))
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    say(f"wrote {len(truth['blocks'])} live blocks to {path}")
