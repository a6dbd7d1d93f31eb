"""``kvbus completion``: print the script that completes commands and options in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(*, shell: str) -> None:
    """Print a script that completes kvbus's commands and options in a shell.

    \b
    Examples:
      eval "$(kvbus completion bash)"                                    # in ~/.bashrc
      eval "$(kvbus completion zsh)"                                     # in ~/.zshrc
      kvbus completion fish > ~/.config/fish/completions/kvbus.fish
    """  # noqa: D301 - \b is click's: keep these lines as they are
    found = get_completion_class(shell)
    assert found is not None  # noqa: S101 - click has these three
    click.echo(found(click.get_current_context().find_root().command, {}, "kvbus", "_KVBUS_COMPLETE").source())
