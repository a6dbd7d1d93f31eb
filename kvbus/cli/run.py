"""``kvbus run`` and ``kvbus check``: run a bus, or validate its configuration."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import click

from kvbus.cli.options import config_options, load_config
from kvbus.common.errors import Problem
from kvbus.config import Config
from kvbus.config.notes import exposure, notes


@click.command("run")
@config_options
def run(**flags: Any) -> None:
    """Run the bus until SIGTERM or Ctrl-C.

    \b
    Examples:
      kvbus run kvbus.yaml
      kvbus run --source tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 --output 'tcp://*:5657,tcp://*:5658'

    A second signal ends kvbus without waiting. At SIGHUP, or when their files change, kvbus reads keys, tokens,
    certificates and the log level again. A change of any other configuration key needs a restart. After it, kvbus
    continues the numbering of its streams. Routers connect again, and get AllBlocksCleared and all blocks.

    Exit codes: 0 ended by a signal, 69 another process uses an endpoint or the state, 78 bad configuration.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    from kvbus.daemon.serve import ConfigFile  # noqa: PLC0415

    file = None if flags["config"] is None else ConfigFile(flags["config"])
    config = load_config(**flags)

    # Import these modules only when the command runs, to keep `kvbus --help` fast.
    import uvloop  # noqa: PLC0415

    from kvbus.common import logs  # noqa: PLC0415
    from kvbus.daemon.serve import serve  # noqa: PLC0415

    logs.setup(level=config.log_level, log_format=config.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, partial(load_config, **flags), file))


@click.command("check")
@config_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of YAML.")
@click.option("--connect", is_flag=True, help="Probe every endpoint too, as kvbus doctor does.")
@click.option(
    "--without-keys",
    is_flag=True,
    help="Read no key file and do not write to state_dir: for the configuration of another machine.",
)
def check(*, as_json: bool, connect: bool, without_keys: bool, **flags: Any) -> None:
    """Validate a configuration and print it with every default.

    \b
    Examples:
      kvbus check kvbus.yaml
      kvbus check kvbus.yaml --set outputs[0].layout=merged
      KVBUS_LOG_LEVEL=debug kvbus check kvbus.yaml --json
      kvbus check --source tcp://127.0.0.1:5557 --output 'tcp://*:5657'
      kvbus check kvbus.yaml --connect

    Options win over KVBUS_* variables, variables over the file, and the file over the defaults. kvbus loads the
    packages that the outputs need, reads the files with keys, tokens and certificates, and tests
    whether it can write to state_dir.

    The configuration goes to standard output. Standard error gets all problems of the configuration or, if there are
    none, sentences that say who can read what. No key, token or salt is printed. With --connect, the findings of kvbus
    doctor follow on standard error.

    Exit codes: 0 no problem, 1 --connect found a problem, 78 bad configuration.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    from kvbus.daemon.files import look  # noqa: PLC0415 - brings zmq
    from kvbus.daemon.keys import Keys, who_reads_what  # noqa: PLC0415 - brings zmq

    keys: Keys = {}

    def look_here(config: Config) -> list[Problem]:
        found, problems = look(config)
        keys.update(found)
        return problems

    config = load_config(**flags) if without_keys else load_config(**flags, look=look_here)
    for note in [*notes(config), *who_reads_what(config, keys)]:
        click.echo(f"note: {note}", err=True)
    for sentence in exposure(config):
        click.echo(f"access: {sentence}", err=True)
    if as_json:
        click.echo(json.dumps(config.to_dict(), indent=2))
    else:
        click.echo(config.to_yaml(), nl=False)
    if connect:
        from kvbus.cli import doctor  # noqa: PLC0415 - brings more

        doctor.show(doctor.examined(config), err=True)
