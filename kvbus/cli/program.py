"""The click group of kvbus's subcommands. It imports the module of a subcommand only when the subcommand is used.

It also turns each error into a message and an exit code.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvbus.common.errors import EXIT_MEANINGS, ExitCode, KvbusError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A subcommand of kvbus. Its module is imported only when the subcommand is used.

    Attributes:
        name: name of the subcommand.
        summary: the subcommand's line in the list of subcommands.
        home: name of the module in ``kvbus.cli`` that has the subcommand. In this module, the click command has the
            subcommand's name. If ``home`` is empty, the module has the subcommand's name, and the click command is
            called ``command``.
    """

    name: str
    summary: str
    home: str = ""

    @property
    def module(self) -> str:
        """Full name of the subcommand's module."""
        return f"kvbus.cli.{self.home or self.name}"

    @property
    def attribute(self) -> str:
        """Name of the click command in its module."""
        return self.name if self.home else "command"


class Program(click.Group):
    """A click group that imports subcommands on use, and turns errors into messages and exit codes."""

    def __init__(self, *args: Any, subcommands: Iterable[Subcommand] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.subcommands = {subcommand.name: subcommand for subcommand in subcommands}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the installed subcommands, in the order of their declaration."""
        lazy = [item.name for item in self.subcommands.values() if importlib.util.find_spec(item.module)]
        return lazy + super().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand's module, and return its click command; None if no subcommand has this name."""
        subcommand = self.subcommands.get(cmd_name)
        if subcommand is None or importlib.util.find_spec(subcommand.module) is None:
            return super().get_command(ctx, cmd_name)
        command = getattr(importlib.import_module(subcommand.module), subcommand.attribute)
        assert isinstance(command, click.Command)  # noqa: S101 - a bug of kvbus, not an error of the user
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand that the arguments name. The error for an unknown name suggests a similar one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if not near:
                raise
            raise click.UsageError(f"{error.message} Did you mean {near[0]}?", ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands into the help text, without importing their modules."""
        rows = [(name, self.subcommands[name].summary) for name in self.list_commands(ctx) if name in self.subcommands]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Append the list of exit codes to the help text."""
        super().format_epilog(ctx, formatter)
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code.value), meaning) for code, meaning in EXIT_MEANINGS.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line, and end the process with the exit code of the subcommand."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        if os.getpid() == 1:
            # PID 1 of a container has no default signal actions. A SIGTERM before the event loop installs its handlers
            # would be lost, and Kubernetes would kill the container at the end of its grace period.
            signal.signal(signal.SIGTERM, _end)
        try:
            result = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except click.Abort:
            sys.exit(ExitCode.INTERRUPTED)
        sys.exit(result if isinstance(result, int) else ExitCode.OK)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand. An error ends the process with a message and an exit code."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # flush here, because a closed pipe would print an error at interpreter exit
        except (click.exceptions.Exit, click.ClickException, click.Abort, KeyboardInterrupt):
            raise
        except BrokenPipeError:
            _forget_stdout()
            sys.exit(ExitCode.OK)  # the reader has closed the pipe
        except Exception as error:  # noqa: BLE001 - the last resort
            _fail(error, debug=bool(ctx.find_root().params.get("debug")))
        return result


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


def _forget_stdout() -> None:
    """Redirect standard output to the null device, so that the interpreter does not flush a closed pipe at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, sys.stdout.fileno())
    except (OSError, ValueError):  # standard output has no file descriptor, for example a test's buffer
        pass
    finally:
        os.close(devnull)


def _fail(error: Exception, *, debug: bool) -> NoReturn:
    known = _deliberate(error)
    if debug:
        traceback.print_exception(error)
    if known is not None:
        click.echo(f"kvbus: {known}", err=True)
        sys.exit(known.exit_code)
    click.echo(f"kvbus: internal error: {_one_line(error)}", err=True)
    if not debug:
        click.echo("kvbus: this is a bug; KVBUS_TRACEBACK=1 shows where it happened", err=True)
    sys.exit(ExitCode.INTERNAL)


def _deliberate(error: Exception) -> KvbusError | None:
    """Return the `KvbusError` that an exception is, or the first one in an exception group; otherwise None."""
    if isinstance(error, KvbusError):
        return error
    if isinstance(error, ExceptionGroup):
        return next((found for each in error.exceptions if (found := _deliberate(each)) is not None), None)
    return None


def _one_line(error: Exception) -> str:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
