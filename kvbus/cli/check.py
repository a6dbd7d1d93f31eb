"""``kvbus check``: validate a configuration and print it in full."""

from __future__ import annotations

import json
from typing import Any

import click

from kvbus.cli.options import config_options, load_config
from kvbus.config.exposure import exposure
from kvbus.config.notes import notes


@click.command("check")
@config_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of YAML.")
@click.option("--connect", is_flag=True, help="Then probe every endpoint, as kvbus doctor does.")
@click.option("--without-keys", is_flag=True, help="Do not read the files with keys, for a check on another machine.")
def command(*, as_json: bool, connect: bool, without_keys: bool, **flags: Any) -> None:
    """Validate a configuration and print it with every default.

    \b
    Examples:
      kvbus check -c kvbus.yaml
      kvbus check -c kvbus.yaml --set outputs[0].layout=merged
      KVBUS_LOG_LEVEL=debug kvbus check -c kvbus.yaml --json
      kvbus check --source tcp://127.0.0.1:5557 --output 'tcp://*:5657'
      kvbus check -c kvbus.yaml --connect

    What carries each output is loaded. Files with keys, tokens and certificates are read too; of these it says whose
    key reads what, and no key, token or salt. Options win over KVBUS_* variables, those over the file, the file over
    the defaults. What is open to whom goes to standard error. A bad configuration ends with exit code 78 and every
    problem at once there. With --connect what is found goes there too, and exit code 1 says that something is wrong.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    config = load_config(**flags)

    # these bring zmq: no other mistake should wait for it
    from kvbus.admin.credentials import read_credentials  # noqa: PLC0415
    from kvbus.daemon.keys import read_keys, read_state_keys_of, who_reads_what  # noqa: PLC0415
    from kvbus.daemon.outputs import factories  # noqa: PLC0415
    from kvbus.daemon.views import Views  # noqa: PLC0415
    from kvbus.parts.log.place import check_files  # noqa: PLC0415

    factories(config)
    keys = {} if without_keys else read_keys(config)
    Views(config, keys)
    if not without_keys:
        read_state_keys_of(config)
        read_credentials(config)
        check_files(config)
    for note in [*notes(config), *who_reads_what(config, keys)]:
        click.echo(f"note: {note}", err=True)
    for sentence in exposure(config):
        click.echo(f"open: {sentence}", err=True)
    if as_json:
        click.echo(json.dumps(config.to_dict(), indent=2))
    else:
        click.echo(config.to_yaml(), nl=False)
    if connect:
        from kvbus.cli import doctor  # noqa: PLC0415 - brings more

        doctor.show(doctor.examined(config), err=True)
