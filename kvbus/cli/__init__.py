"""The ``kvbus`` command. Each subcommand is a click command in its own module, which is imported on use."""

from __future__ import annotations

import click

try:
    from kvbus.cli.program import Program, Subcommand
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("kvbus"):
        raise
    raise ImportError(
        "files of kvbus are missing, which happens if kvbus-client was uninstalled in the same environment: "
        "install kvbus again, with pip install --force-reinstall --no-deps"
    ) from error

_SUBCOMMANDS = (
    Subcommand("run", "Run the bus.", "run"),
    Subcommand("init", "Write a configuration for an engine and a router."),
    Subcommand("demo", "Show kvbus at work, with simulated engines and routers."),
    Subcommand("check", "Validate a configuration and print it in full.", "run"),
    Subcommand("doctor", "Find out what is wrong, and what to do."),
    Subcommand("top", "Watch a running bus: sources, outputs, routers."),
    Subcommand("index", "Run a server that knows which source holds the longest prefix of a prompt."),
    Subcommand("query", "Ask which source holds the longest prefix of a prompt."),
    Subcommand("tail", "Print a stream's decoded batches and gaps."),
    Subcommand("dump", "Print a stream's live blocks, rebuilt from its replay."),
    Subcommand("record", "Capture a stream to a file."),
    Subcommand("anonymize", "Replace the tokens and names in a capture, so that it can be shared."),
    Subcommand("play", "Publish a capture as an engine would."),
    Subcommand("sim", "Run a simulated engine."),
    Subcommand("conform", "Check an engine or a router against the wire specification."),
    Subcommand("state", "Show or delete the state on disk."),
    Subcommand("keygen", "Make a key pair for CURVE.", "keys"),
    Subcommand("token", "Make a bearer token for the HTTP port.", "keys"),
    Subcommand("completion", "Print a script that completes kvbus's commands and options in a shell."),
)


@click.group(cls=Program, subcommands=_SUBCOMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvbus", message="%(prog)s %(version)s")
@click.option(
    "--debug",
    is_flag=True,
    envvar="KVBUS_TRACEBACK",
    help="Show the traceback of an internal error (also: KVBUS_TRACEBACK=1).",
)
def main(*, debug: bool) -> None:
    """Carry KV-cache events from LLM engines to KV-aware routers: exact, rebuildable, observable.

    \b
    Examples:
      kvbus demo
      kvbus init --engine vllm --router llm-d
      kvbus run kvbus.yaml
      kvbus run --source tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 --output 'tcp://*:5657,tcp://*:5658'
      kvbus check kvbus.yaml
      kvbus doctor kvbus.yaml
      kvbus tail tcp://127.0.0.1:5657

    The exit codes at the end of this page are the same for every command.
    """  # noqa: D301 - \b is click's: keep these lines as they are
