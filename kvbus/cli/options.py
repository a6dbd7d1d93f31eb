"""The options of ``run``, ``check`` and ``doctor`` that name the configuration file or set single keys of it."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvbus.config import Config, load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvbus.config.load import Look


def _endpoints(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        parts = value.split(",")
        if len(parts) > 2 or not all(parts):
            raise click.BadParameter(f"{value!r} is not ENDPOINT or ENDPOINT,REPLAY_ENDPOINT")
    return values


def _settings(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        key, separator, _ = value.partition("=")
        if not key or not separator:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE, such as outputs[0].layout=merged")
    return values


_HTTP = click.option("--http", metavar="HOST:PORT", help="Address of the metrics and the status page; null for none.")
_OPTIONS = (
    click.argument(
        "config", required=False, metavar="[CONFIG]", type=click.Path(path_type=Path), envvar="KVBUS_CONFIG"
    ),
    click.option(
        "-c",
        "--config",
        "named",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="The same as CONFIG (also: KVBUS_CONFIG).",
    ),
    click.option(
        "--source",
        multiple=True,
        callback=_endpoints,
        metavar="ENDPOINT[,REPLAY]",
        help="Endpoints of an engine, used instead of the sources in the configuration file. Repeatable.",
    ),
    click.option(
        "--output",
        multiple=True,
        callback=_endpoints,
        metavar="ENDPOINT[,REPLAY]",
        help="Endpoints to which routers connect, used instead of the outputs in the configuration file. Repeatable.",
    ),
    _HTTP,
    click.option("--model", metavar="NAME", help="Name of the model, which replaces {model} in topics."),
    click.option("--log-level", metavar="LEVEL", help="Log level: debug, info, warning or error."),
    click.option("--log-format", metavar="FORMAT", help="Log format: auto, json or text."),
    click.option(
        "--set",
        "settings",
        multiple=True,
        callback=_settings,
        metavar="KEY=VALUE",
        help="Set any configuration key, such as outputs[0].layout=merged. Repeatable.",
    ),
)


def config_options(function: Callable[..., Any], *, http: bool = True) -> Callable[..., Any]:
    """Add the argument CONFIG, and the options that `load_config` takes, to a command.

    ``http`` says whether the option ``--http`` is added, too.
    """

    @functools.wraps(function)
    def command(*, config: Path | None, named: Path | None, **flags: Any) -> Any:
        if named is not None and _is_on_the_command_line("config"):
            raise click.UsageError("name the configuration once, as CONFIG or with -c")
        return function(config=config if named is None else named, **flags)

    for option in reversed(_OPTIONS):
        command = command if option is _HTTP and not http else option(command)
    return command


def names_a_config() -> bool:
    """Return whether the command line names a configuration file.

    A file that only the environment variable ``KVBUS_CONFIG`` names does not count.
    """
    return _is_on_the_command_line("config") or _is_on_the_command_line("named")


def _is_on_the_command_line(parameter: str) -> bool:
    source = click.get_current_context().get_parameter_source(parameter)
    return source is click.core.ParameterSource.COMMANDLINE


def load_config(
    *,
    config: Path | None = None,
    source: tuple[str, ...] = (),
    output: tuple[str, ...] = (),
    http: str | None = None,
    model: str | None = None,
    log_level: str | None = None,
    log_format: str | None = None,
    settings: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    look: Look = lambda _config: (),
) -> Config:
    """Load the configuration that a command's options describe.

    Args:
        config: the YAML file; None for no file.
        source: engines as ``ENDPOINT`` or ``ENDPOINT,REPLAY_ENDPOINT``. They replace the file's sources.
        output: outputs as ``ENDPOINT`` or ``ENDPOINT,REPLAY_ENDPOINT``. They replace the file's outputs.
        http: value of the configuration key ``http``.
        model: value of the configuration key ``model``.
        log_level: value of the configuration key ``log_level``.
        log_format: value of the configuration key ``log_format``.
        settings: values of other configuration keys as ``KEY=VALUE``, applied in order after the other options.
        env: the environment; ``os.environ`` by default.
        look: function that checks the configuration against this machine, and returns the problems that it finds, such
            as missing files.

    Raises:
        ConfigError: the configuration has problems. The error lists all of them.
    """
    overrides: dict[str, Any] = {}
    if source:
        overrides["sources"] = _sections(source, "engine")
    if output:
        overrides["outputs"] = _sections(output, "routers")
    named = {"http": http, "model": model, "log_level": log_level, "log_format": log_format}
    overrides |= {key: value for key, value in named.items() if value is not None}
    for setting in settings:
        key, _, value = setting.partition("=")
        overrides.pop(key, None)  # the last setting of a key wins
        overrides[key] = value
    return load(config, env=os.environ if env is None else env, overrides=overrides, look=look)


def _sections(values: tuple[str, ...], name: str) -> list[dict[str, Any]]:
    sections = []
    for i, value in enumerate(values):
        endpoint, _, replay = value.partition(",")
        unique = name if len(values) == 1 else f"{name}-{i}"
        sections.append({"name": unique, "endpoint": endpoint, "replay_endpoint": replay or None})
    return sections
