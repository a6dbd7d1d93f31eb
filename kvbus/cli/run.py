"""``kvbus run``: the daemon."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import click

from kvbus.cli.options import config_options, load_config


@click.command("run")
@config_options
def command(**flags: Any) -> None:
    """Run the bus until SIGTERM or Ctrl-C.

    \b
    Examples:
      kvbus run kvbus.yaml
      kvbus run --source tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 --output 'tcp://*:5657,tcp://*:5658'

    A second signal ends it at once. After a change of their files, or at SIGHUP, kvbus reads keys, tokens, certificates
    and the log level again. Every other key takes a restart, which routers do not notice.
    Exit codes: 0 ended in order, 69 an endpoint or the state is another process's, 78 bad configuration.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    from kvbus.daemon.reload import ConfigFile  # noqa: PLC0415

    file = None if flags["config"] is None else ConfigFile(flags["config"])
    config = load_config(**flags)

    # imported on use, to keep `kvbus --help` fast
    import uvloop  # noqa: PLC0415

    from kvbus.common import logs  # noqa: PLC0415
    from kvbus.daemon.serve import serve  # noqa: PLC0415

    logs.setup(level=config.log_level, log_format=config.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, partial(load_config, **flags), file))
