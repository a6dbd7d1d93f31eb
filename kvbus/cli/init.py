"""``kvbus init``: write a commented configuration for an engine and a router."""

from __future__ import annotations

from pathlib import Path

import click

from kvbus.cli.until import say
from kvbus.tools.starting import ENGINES, ROUTERS, commented


@click.command("init")
@click.option("--engine", type=click.Choice(list(ENGINES)), prompt="Engine", help="The engine that publishes events.")
@click.option("--router", type=click.Choice(list(ROUTERS)), prompt="Router", help="The router that reads from kvbus.")
@click.option("--model", default="MODEL", metavar="NAME", help="Name of the model, as requests use it.")
@click.option("--host", default="POD", metavar="ADDRESS", help="Address of this machine or pod, as the router sees it.")
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    default="kvbus.yaml",
    show_default=True,
    metavar="FILE",
    help="File to write; - for standard output. An existing file stays as it is.",
)
def command(*, engine: str, router: str, model: str, host: str, path: Path) -> None:
    """Write a configuration for an engine and a router, with the other setup steps as comments.

    \b
    Examples:
      kvbus init
      kvbus init --engine vllm --router llm-d --model Qwen/Qwen3-32B --host 10.0.0.7
      kvbus init --engine sglang --router smg -o - | less

    kvbus init asks for the engine and the router if an option does not name them. Without --model or --host, the file
    has MODEL or POD instead of the value.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    shown = str(path) == "-"
    name = "kvbus.yaml" if shown else str(path)
    text = commented(ENGINES[engine], ROUTERS[router], model=model, host=host, path=name)
    if shown:
        click.echo(text, nl=False)
        return
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise click.UsageError(f"{path} exists; name another file with --output") from error
    except OSError as error:
        raise click.UsageError(f"{path}: {error.strerror}") from error
    say(f"wrote {path}; read its comments, then run: kvbus doctor {path}")
