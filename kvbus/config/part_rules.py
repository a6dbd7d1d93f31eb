"""Contradictions of outputs that are not of type zmq, and of sources that are read from a log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from kvbus.config import dynamo, logs, parts
from kvbus.config.endpoints import parse_endpoint
from kvbus.config.logs import Wrong
from kvbus.core.wire.profiles import PROFILES

if TYPE_CHECKING:
    from kvbus.config.contradictions import Contradictions
    from kvbus.config.models import Config
    from kvbus.config.outputs import OutputConfig
    from kvbus.config.paths import Path

AS_WRITTEN: Final[dict[str, Any]] = {
    "block_size": "auto",
    "groups": "prefix",
    "orphans": "pass",
    "without_media": (),
    "expiring_media": (),
}
"""Keys that must have these values if sources are read from a log.

With other values, kvbus would change the events of the log before routers get them.
"""


def carriers(found: Contradictions) -> None:
    """Reject an output type whose package is not installed, and keys that do not fit the type of their output."""
    for i, output in enumerate(found.config.outputs):
        at = ("outputs", i, "type")
        # skip zmq: its packages are always installed, and importing them takes time
        if found.sound(at) and output.type != "zmq" and (lacking := parts.missing(parts.OUTPUTS, output.type)):
            found.report(at, lacking, value=output.type, example="type: zmq")
        for name, wrong, value, example in (*_dynamo(found.config, i), *_log(found.config, i)):
            key: Path = ("outputs", i, *name.split("."))
            if found.sound(at):
                found.report(key, wrong, value=value, example=example)


def _dynamo(config: Config, at: int) -> Iterator[Wrong]:
    """Yield the problems of an output (``outputs[at]``) that concern Dynamo."""
    output = config.outputs[at]
    if output.type != dynamo.TYPE:
        if output.dynamo is not None:
            wrong = f"only type: {dynamo.TYPE} has these keys, but the type is {output.type}"
            yield "dynamo", wrong, None, f"type: {dynamo.TYPE}"
        return
    needed = {"profile": dynamo.PROFILE, "topic": dynamo.TOPIC, "bind": True, "layout": "per_source"}
    for name, wanted in needed.items():
        if (given := getattr(output, name)) != wanted:
            text = str(wanted).lower() if isinstance(wanted, bool) else wanted
            yield name, f"type: {dynamo.TYPE} needs {name}: {text}", given, f"leave out {name}"
    for name in ("replay_endpoint", "snapshot_endpoint", "curve_secret_key_file"):
        if (given := getattr(output, name)) is not None:
            yield name, "Dynamo's event plane does not support this", given, f"leave out {name}"
    if parse_endpoint(output.endpoint).is_ipc:
        yield "endpoint", "Dynamo's frontends connect only over TCP", output.endpoint, "endpoint: tcp://*:5857"
    known = {source.name for source in config.sources}
    for name in (output.dynamo.workers if output.dynamo is not None else {}).keys() - known:
        yield "dynamo", f"workers has {name!r}, but no source has this name", None, "workers: {engine-0: 7587888543}"


def _log(config: Config, at: int) -> Iterator[Wrong]:
    """Yield the problems of an output (``outputs[at]``) that concern logs."""
    output = config.outputs[at]
    for name in logs.TYPES:
        if name != output.type and getattr(output, name) is not None:
            yield name, f"only type: {name} has these keys, but the type is {output.type}", None, f"type: {name}"
    if output.type not in logs.TYPES:
        return
    called = logs.TYPES[output.type]
    for name, wanted in (
        ("profile", "vllm"),
        ("topic", logs.TOPIC),
        ("bind", False),
        ("layout", "per_source"),
        ("on_subscribe", "state"),
    ):
        if (given := getattr(output, name)) != wanted:
            text = str(wanted).lower() if isinstance(wanted, bool) else repr(wanted)
            yield name, f"type: {output.type} needs {name}: {text}", given, f"leave out {name}"
    for name in ("replay_endpoint", "snapshot_endpoint", "curve_secret_key_file", "curve_server_key_file"):
        if (given := getattr(output, name)) is not None:
            yield name, f"an output to {called} does not support this", given, f"leave out {name}"
    address = parse_endpoint(output.endpoint)
    if address.is_ipc or address.is_wildcard:
        wrong = f"type: {output.type} needs the address of a {called} server"
        yield "endpoint", wrong, output.endpoint, f"endpoint: tcp://{output.type}-0:{logs.PORTS[output.type]}"
    given_keys = getattr(output, output.type)
    if given_keys is not None:
        yield from logs.half(output.type, given_keys)


def sources_of_a_log(found: Contradictions) -> None:
    """Reject settings with which routers would get other seqs or other events than those in the log."""
    config = found.config
    read = [source.log_settings for source in config.sources]
    logged = [settings for settings in read if settings is not None]
    for i, output in enumerate(config.outputs):
        at: Path = ("outputs", i, "numbers")
        wanted = "log" if logged else "own"
        if output.numbers != wanted and config.sources and found.sound(("sources",)):
            wrong = f"must be {wanted}, because the sources are {'' if logged else 'not '}read from a log"
            found.report(at, wrong, value=output.numbers, example=f"numbers: {wanted}")
    if not logged or not found.sound(("sources",)):
        return
    for i, each in enumerate(read):
        if each is None:
            wrong = "other sources are read from a log: give this engine its own kvbus, which writes to the log"
            found.report(("sources", i), wrong)
    for name, wanted_value in AS_WRITTEN.items():
        given = getattr(config, name)
        if given != wanted_value:
            found.report(
                (name,), "must not be set, because routers must get the content of a log unchanged", value=given
            )
    if config.state_dir not in (None, "auto"):
        wrong = "the log already has the state of sources that are read from it"
        found.report(("state_dir",), wrong, value=config.state_dir, example="state_dir: null")
    tokens = all(settings.get("token_ids") == "keep" for settings in logged)
    for i, output in enumerate(config.outputs):
        _output_of_a_log(found, i, output, tokens=tokens)


def _output_of_a_log(found: Contradictions, i: int, output: OutputConfig, *, tokens: bool) -> None:
    def report(name: str, wrong: str, value: object, example: str) -> None:
        found.report(("outputs", i, name), wrong, value=value, example=example)

    if output.type != "zmq":
        report("type", "only an output of type zmq can keep the seqs of a log", output.type, "type: zmq")
        return
    if output.layout != "per_topic":
        wrong = "each stream keeps its own seqs from the log, so each needs its own topic"
        report("layout", wrong, output.layout, "layout: per_topic")
    if output.snapshot_endpoint is not None:
        wrong = "snapshots need a publisher id, which two kvbus that read the same log cannot share"
        report("snapshot_endpoint", wrong, output.snapshot_endpoint, "snapshot_endpoint: null")
    profile = PROFILES[output.profile]
    if not profile.as_it_comes:
        wrong = "its routers need batches made from several records, and these have no seq in the log"
        report("profile", wrong, output.profile, "profile: vllm")
    elif profile.hashes_tokens and not tokens:
        wrong = (
            f"routers of profile {output.profile} hash the token ids themselves: the writers of the log need "
            "token_ids: keep, and discover needs the same key"
        )
        report("profile", wrong, output.profile, "discover: {…: {token_ids: keep, …}}")
