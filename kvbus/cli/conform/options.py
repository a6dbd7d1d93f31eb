"""Options that the judges of engines and of routers share, and what is made of a report."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvbus.tools.conform.report import Report

F = TypeVar("F", bound="Callable[..., Any]")


def report_options(function: F) -> F:
    """Add the options ``as_json``, ``strict`` and ``without_bytes`` to a command, for `deliver`."""
    for option in (
        click.option(
            "--without-bytes", is_flag=True, help="Leave out the bytes that show a verdict: they may hold prompts."
        ),
        click.option("--strict", is_flag=True, help="A SHOULD that is broken is a failure, too."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    ):
        function = option(function)
    return function


def deliver(report: Report, *, as_json: bool, strict: bool, without_bytes: bool) -> NoReturn:
    """Print a report, and end with its exit code."""
    from kvbus.tools.conform import report as forms  # noqa: PLC0415 - brings rich

    if without_bytes:
        report = report.without_bytes()
    if as_json:
        click.echo(forms.as_json(report), nl=False)
    else:
        forms.print_table(report, sys.stdout)
    raise click.exceptions.Exit(int(report.exit_code(strict=strict)))
