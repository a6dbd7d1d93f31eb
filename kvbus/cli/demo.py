"""``kvbus demo``: show kvbus at work, with simulated engines and with routers on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

import click

from kvbus.cli.until import run_until_signal
from kvbus.common.errors import ExitCode

_MAX_DIRECTORY: Final = 60
"""Maximum length in characters of the directory in which the demo creates its own temporary directory.

If the default directory is longer, ``/tmp`` is used. The path of an ipc socket may have only about 100 bytes.
"""


NEXT_STEPS: Final = """\
Next, with your own engine:
  {kvbus} init                  # writes kvbus.yaml for your engine and router, with the engine's flags
  {kvbus} run kvbus.yaml
  {kvbus} doctor kvbus.yaml     # if no events arrive: it says why"""


@click.command("demo")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=24.0,
    show_default=True,
    metavar="N",
    help="Length of the demo. Ctrl-C ends it early.",
)
def command(seconds: float) -> None:
    """Watch kvbus at work: simulated engines, a kvbus process, routers, and faults.

    \b
    Examples:
      kvbus demo
      kvbus demo --seconds 8
      kvbus demo | tee demo.txt

    Two vLLM engines and an SGLang engine publish the events of their caches. The network loses batches, a router starts
    late, an engine crashes, and kvbus itself is killed and started again. At the end the demo compares the blocks of
    each router with the engines' own caches. The router `no kvbus` reads the engines directly, as llm-d-kv-cache 0.9.0
    does: it shows what goes wrong without kvbus. The demo needs no configuration, and only one free port of this
    machine.

    Exit codes: 0 all routers that read kvbus are exact, 1 such a router is not exact, 130 ended while kvbus was down.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    # Import these modules only when the command runs, to keep `kvbus --help` fast.
    from kvbus.tools.demo.show import play  # noqa: PLC0415
    from kvbus.tools.terminal import PipeConsole  # noqa: PLC0415

    exact: bool | None = None

    async def session(stop: asyncio.Event) -> None:
        nonlocal exact
        # End the demo on SIGHUP, too, because the terminal sends it when it is closed.
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, stop.set)
        short = len(tempfile.gettempdir()) < _MAX_DIRECTORY
        with tempfile.TemporaryDirectory(prefix="kvbus-demo-", dir=None if short else "/tmp") as directory:  # noqa: S108
            exact = await play(PipeConsole(), directory, stop, seconds)

    run_until_signal(session)
    if exact:
        installed = Path(sys.executable).with_name("kvbus")
        on_path = shutil.which("kvbus") or not installed.exists()
        click.echo(NEXT_STEPS.format(kvbus="kvbus" if on_path else os.path.relpath(installed)))
    else:
        raise click.exceptions.Exit(ExitCode.INTERRUPTED if exact is None else ExitCode.FOUND)
