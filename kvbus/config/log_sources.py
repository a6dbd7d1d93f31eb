"""Sources that are read from a log: which they are, and what cannot be with the log's numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvbus.config import logs
from kvbus.core.wire.profiles import PROFILES

if TYPE_CHECKING:
    from kvbus.config.findings import Findings
    from kvbus.config.models import Config
    from kvbus.config.outputs import OutputConfig
    from kvbus.config.paths import Path
    from kvbus.config.sources import SourceConfig

AS_WRITTEN: Final[dict[str, Any]] = {
    "block_size": "auto",
    "groups": "prefix",
    "orphans": "pass",
    "without_media": (),
    "expiring_media": (),
}
"""Keys by which kvbus would tell something else than the log has, and what they have to be."""


def settings_of(source: SourceConfig) -> dict[str, Any] | None:
    """Return the settings of a source that is read from a log."""
    found = [settings for kind, settings in (source.discover or {}).items() if kind in logs.TYPES]
    return found[0] if found else None


def numbered(config: Config) -> tuple[OutputConfig, ...]:
    """Return the outputs, with the log's numbers where sources are read from one and nothing else was said."""
    if not any(settings_of(source) is not None for source in config.sources):
        return config.outputs
    return tuple(
        output if "numbers" in output.model_fields_set else output.model_copy(update={"numbers": "log"})
        for output in config.outputs
    )


def check(found: Findings) -> None:
    """Refuse what would give routers other numbers, or another content, than the log has."""
    config = found.config
    read = [settings_of(source) for source in config.sources]
    logged = [settings for settings in read if settings is not None]
    for i, output in enumerate(config.outputs):
        at: Path = ("outputs", i, "numbers")
        wanted = "log" if logged else "own"
        if output.numbers != wanted and config.sources and found.sound(at, ("sources",)):
            wrong = "goes with sources that are read from a log, and with them alone"
            found.report(at, wrong, value=output.numbers, example=f"numbers: {wanted}")
    if not logged or not found.sound(("sources",)):
        return
    for i, each in enumerate(read):
        if each is None:
            wrong = (
                "stands beside sources that are read from a log: give it a kvbus of its own, which writes to the log"
            )
            found.report(("sources", i), wrong)
    for name, wanted_value in AS_WRITTEN.items():
        given = getattr(config, name)
        if given != wanted_value and found.sound((name,)):
            found.report((name,), "what is read from a log is told as it was written", value=given)
    if config.state_dir not in (None, "auto") and found.sound(("state_dir",)):
        wrong = "the log has the state of what is read from it"
        found.report(("state_dir",), wrong, value=config.state_dir, example="state_dir: null")
    tokens = all(settings.get("token_ids") == "keep" for settings in logged)
    for i, output in enumerate(config.outputs):
        _output(found, i, output, tokens=tokens)


def _output(found: Findings, i: int, output: OutputConfig, *, tokens: bool) -> None:
    def report(name: str, wrong: str, value: object, example: str) -> None:
        if found.sound(("outputs", i, name)):
            found.report(("outputs", i, name), wrong, value=value, example=example)

    if output.type != "zmq":
        report("type", "routers alone get the numbers of a log", output.type, "type: zmq")
        return
    if output.layout != "per_topic":
        wrong = "the numbers of a log are those of one stream, and each needs a topic of its own"
        report("layout", wrong, output.layout, "layout: per_topic")
    if output.snapshot_endpoint is not None:
        wrong = "two kvbus that read one log cannot have one publisher id"
        report("snapshot_endpoint", wrong, output.snapshot_endpoint, "snapshot_endpoint: null")
    profile = PROFILES[output.profile]
    if not profile.as_it_comes:
        wrong = "what its routers get depends on more than one record, so it has no number in the log"
        report("profile", wrong, output.profile, "profile: vllm")
    elif profile.hashes_tokens and not tokens:
        wrong = (
            f"routers of profile {output.profile} hash the tokens themselves, and the log has none "
            "unless its writers have token_ids: keep, and discover says so"
        )
        report("profile", wrong, output.profile, "discover: {…: {token_ids: keep, …}}")
