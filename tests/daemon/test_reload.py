"""Tests for when the daemon reloads its configuration, and how it counts reloads.

tests/system/test_reload.py has tests for the effect on a running bus.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvbus.common.errors import ConfigError, Problem
from kvbus.config import Config, load
from kvbus.core.findings.finding import Finding
from kvbus.core.stats import ProcessStats
from kvbus.daemon import serve
from kvbus.daemon.daemon import Daemon
from kvbus.daemon.keys import Keys, read_keys
from kvbus.daemon.serve import ConfigFile, Reloader
from kvbus.http.credentials import Credentials, line_of, new_token, read_credentials
from tests.doubles.bus import eventually
from tests.security.keys import Keyring


class Recorder:
    """A substitute for the daemon that only records the requested changes."""

    def __init__(self, config: Config) -> None:
        self.config = self.configured = config
        self.keys = read_keys(config)
        self.started = True
        self.process = ProcessStats()
        self.admin = self
        self.credentials = read_credentials(config)
        self.changes = self
        self.changing = asyncio.Lock()
        self.levels: list[str] = []
        self.reload_findings: dict[str, Finding] = {}

    def set_log_level(self, level: str) -> None:
        self.levels.append(level)

    async def apply_keys(self, keys: Keys) -> None:
        self.keys = keys

    def renew(self, credentials: Credentials) -> None:
        self.credentials = credentials


class ReloadFixture:
    """A reloader with its substitute for the daemon, and the configuration that it loads."""

    def __init__(self, keys: Keyring) -> None:
        self.keys = keys
        self.settings: dict[str, Any] = {"key_reload_interval": 0.01}
        self.sources = ["a"]
        self.daemon = Recorder(self.load())
        self.reloader = Reloader(cast("Daemon", self.daemon), self.load)

    def load(self) -> Config:
        output = {"endpoint": "tcp://127.0.0.1:5657", **self.keys.output}
        sources = [{"name": name, "endpoint": f"ipc:///run/{name}"} for name in self.sources]
        return load(None, env={}, overrides={"sources": sources, "outputs": [output], **self.settings})

    async def reload(self, outcome: str) -> None:
        counts = self.daemon.process.config_reloads
        before = counts[outcome]
        self.reloader.reload()
        await eventually(lambda: counts[outcome] > before, outcome)


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[ReloadFixture]:
    made = ReloadFixture(Keyring(tmp_path))
    yield made
    made.reloader.close()


async def test_a_reload_applies_only_the_log_level(fixture: ReloadFixture, caplog: pytest.LogCaptureFixture) -> None:
    fixture.settings["log_level"] = "debug"
    await fixture.reload("applied")
    fixture.settings |= {"log_level": "error", "block_size": 32, "limits": {"max_events": 7}}
    await fixture.reload("refused")
    assert fixture.daemon.levels == ["debug", "error"]
    assert fixture.daemon.process.config_refused == ["block_size", "limits.max_events"]
    (finding,) = fixture.daemon.reload_findings.values()
    assert (finding.id, finding.key, finding.remedy) == (
        "reload_refused",
        "block_size",
        "restart kvbus, or take the change back",
    )
    assert "the configuration changes block_size, limits.max_events: restart kvbus to apply that" in caplog.text


@pytest.mark.parametrize(
    ("settings", "sources", "named"),
    [
        ({}, ["a"], []),
        ({"log_level": "debug"}, ["a"], []),
        ({"shutdown_timeout": 1}, ["a"], ["shutdown_timeout"]),
        ({"http": None, "on_lost": "keep"}, ["a"], ["http", "on_lost"]),
        ({"limits": {"max_events": 7}}, ["a"], ["limits.max_events"]),
        ({}, ["b"], ["sources[0].endpoint", "sources[0].name"]),
        ({}, ["a", "b"], ["sources"]),
        ({"outputs": [{"endpoint": "tcp://*:1", "layout": "merged"}]}, ["a"], ["outputs[0].endpoint", "outputs[0].layout"]),
    ],
)  # fmt: skip
def test_changed_keys_lists_the_keys_that_need_a_restart(
    settings: dict[str, Any], sources: list[str], named: list[str]
) -> None:
    def config(sources: list[str], **settings: Any) -> Config:
        outputs = [{"endpoint": "tcp://127.0.0.1:5657"}]
        given = [{"name": name, "endpoint": f"ipc:///run/{name}"} for name in sources]
        return load(None, env={}, overrides={"sources": given, "outputs": outputs, **settings})

    assert sorted(serve.changed_keys(config(["a"]), config(sources, **settings))) == named


async def test_unreadable_key_files_leave_the_previous_keys_in_force(
    fixture: ReloadFixture, caplog: pytest.LogCaptureFixture
) -> None:
    before = fixture.daemon.keys
    fixture.keys.bus.secret_file.unlink()
    for refusals in (1, 2):  # each SIGHUP logs the refusal again
        fixture.reloader.reload()
        await eventually(lambda refusals=refusals: fixture.daemon.process.key_reloads["refused"] == refusals, "refused")
    assert fixture.daemon.keys == before
    assert caplog.text.count("the previous keys stay in force") == 2


async def test_an_error_in_a_key_file_is_logged_once_until_it_changes(
    fixture: ReloadFixture, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def counted(config: Config) -> Keys:
        nonlocal looks
        looks += 1
        return read_keys(config)

    async def after_more_looks() -> None:
        before = looks
        await eventually(lambda: looks > before + 2, "more looks")

    monkeypatch.setattr(serve, "read_keys", counted)
    refused, file = fixture.daemon.process.key_reloads, fixture.keys.bus.secret_file
    good = file.rename(file.with_name("good"))
    fixture.reloader.watch()
    await after_more_looks()
    assert refused["refused"] == 1
    bad = file.with_name("bad")
    bad.touch(mode=0o600)
    bad.write_text("none")
    bad.rename(file)
    await after_more_looks()
    assert refused["refused"] == 2
    fixture.keys.allow(fixture.keys.stranger)
    good.rename(file)
    await eventually(lambda: refused["applied"], "good again")
    assert refused == {"refused": 2, "applied": 1}
    assert caplog.text.count("the previous keys stay in force") == 2


def replace(file: Path, text: str) -> None:
    """Replace a file by renaming a new one, so that no reader sees part of the new content."""
    file.with_name("new").write_text(text)
    file.with_name("new").rename(file)


async def test_tokens_change_without_a_signal_and_a_bad_file_keeps_old_tokens(
    fixture: ReloadFixture, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, tokens = tmp_path / "tokens", [new_token(), new_token()]
    file.write_text(line_of("a", tokens[0], content=True))
    fixture.settings["http_tokens_file"] = file
    daemon = Recorder(fixture.load())
    reloader, counts = Reloader(cast("Daemon", daemon), fixture.load), daemon.process.key_reloads
    reloader.watch()
    try:
        for bad in ("", "a sha256:abc", "# of a\na"):
            before = counts["refused"]
            replace(file, bad)
            await eventually(lambda before=before: counts["refused"] > before, "refused")
            assert [token.name for token in daemon.credentials.tokens] == ["a"]
        file.unlink()
        await eventually(lambda: counts["refused"] == 4, "refused")
        replace(file, line_of("b", tokens[1], content=True))
        await eventually(lambda: [token.name for token in daemon.credentials.tokens] == ["b"], "another token")
        assert counts == {"refused": 4, "applied": 1}
    finally:
        reloader.close()
    assert "the previous ones stay in force" in caplog.text
    assert not any(token in caplog.text for token in tokens)


async def test_a_signal_reloads_tokens_even_if_the_configuration_is_bad(fixture: ReloadFixture, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(line_of("a", new_token(), content=True))
    fixture.settings["http_tokens_file"] = file
    daemon = Recorder(fixture.load())
    reloader = Reloader(cast("Daemon", daemon), fixture.load)
    fixture.settings["block_size"] = 32
    file.write_text("# nobody\n")
    reloader.reload()
    await eventually(lambda: daemon.process.config_reloads["refused"], "refused")
    assert daemon.credentials.tokens == ()


class Edited(ReloadFixture):
    """A reloader that watches a configuration file. The file has only the log level."""

    def __init__(self, keys: Keyring, path: Path) -> None:
        self.path = path
        super().__init__(keys)
        self.write("[info]")
        self.reloader = Reloader(cast("Daemon", self.daemon), self.load_now, ConfigFile(path))
        self.reloader.watch()

    def load_now(self) -> Config:
        """Load the configuration with the present value of ``load``, which a test may replace."""
        return self.load()

    def write(self, level: str) -> None:
        replace(self.path, level)

    def load(self) -> Config:
        if self.path.exists():
            text = self.path.read_text()
            if not text.endswith("]"):
                raise ConfigError([Problem("log_level", "is broken", text)])
            self.settings["log_level"] = text.strip("[]")
        return super().load()

    @property
    def level(self) -> str:
        return self.daemon.levels[-1] if self.daemon.levels else "info"

    async def looked_twice(self) -> None:
        """Wait until the reloader has read the file two more times."""
        looks, content = 0, ConfigFile.content

        def counted(file: ConfigFile) -> bytes:
            nonlocal looks
            looks += 1
            return content(file)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ConfigFile, "content", counted)
            await eventually(lambda: looks > 12, "looks")


@pytest.fixture
async def edited(tmp_path: Path) -> AsyncIterator[Edited]:
    made = Edited(Keyring(tmp_path), tmp_path / "kvbus.yaml")
    yield made
    made.reloader.close()


async def test_a_configuration_problem_is_logged_once_and_shown_until_its_end(
    edited: Edited, caplog: pytest.LogCaptureFixture
) -> None:
    process = edited.daemon.process
    edited.write("[debug")
    await eventually(lambda: process.config_refused == ["log_level"], "refused")
    await edited.looked_twice()
    assert edited.level == "info"
    assert process.config_reloads == {"refused": 1}
    assert caplog.text.count("is not valid") == 1
    edited.write("[warning")
    await eventually(lambda: process.config_reloads["refused"] == 2, "another mistake")
    edited.settings["shutdown_timeout"] = 1
    edited.write("[info]")
    await eventually(lambda: process.config_refused == ["shutdown_timeout"], "what takes a restart")
    await edited.looked_twice()
    assert process.config_reloads == {"refused": 3}
    del edited.settings["shutdown_timeout"]
    edited.write("[error]")
    await eventually(lambda: process.config_refused == [], "the file is what is in force")
    assert edited.level == "error"


async def test_loading_a_configuration_with_an_error_is_retried(
    edited: Edited, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kvbus tries again to load a changed configuration with an error.

    In Kubernetes, a Secret may arrive after the configuration that needs it.
    """
    load, there = edited.load, list[bool]()

    def later() -> Config:
        if not there:
            raise ConfigError([Problem("http_tokens_file", "is not there", "/t")])
        return load()

    monkeypatch.setattr(edited, "load", later)
    edited.write("[debug]")
    await eventually(lambda: edited.daemon.process.config_refused, "refused")
    there.append(True)
    await eventually(lambda: edited.level == "debug", "taken over")
    assert edited.daemon.process.config_reloads == {"refused": 1, "applied": 1}


async def test_a_file_that_still_changes_is_not_loaded(edited: Edited, monkeypatch: pytest.MonkeyPatch) -> None:
    """kvbus loads a file only after it has stopped changing.

    A program that writes the file in place produces incomplete configurations for a moment.
    """
    count = itertools.count()
    content = ConfigFile.content
    monkeypatch.setattr(ConfigFile, "content", lambda file: content(file) + bytes(str(next(count)), "ascii"))
    edited.write("[debug]")
    await eventually(lambda: next(count) > 50, "looks")
    assert edited.level == "info"
    monkeypatch.undo()
    await eventually(lambda: edited.level == "debug", "taken over")


async def test_a_configuration_file_that_changes_during_loading_is_not_applied(
    edited: Edited, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = edited.load
    half: list[str] = []

    def torn() -> Config:
        config = load()
        if not half:
            half.append(config.log_level)
            edited.write("[error]")
        return config

    monkeypatch.setattr(edited, "load", torn)
    edited.write("[debug]")
    await eventually(lambda: edited.level == "error", "the second one")
    assert half == ["debug"]
    assert edited.daemon.process.config_reloads == {"applied": 1}


async def test_only_a_signal_reloads_the_configuration_with_reload_signal(edited: Edited) -> None:
    signal = edited.daemon.config.model_copy(update={"reload": "signal"})
    edited.daemon.config = edited.daemon.configured = signal
    edited.settings["reload"] = "signal"
    edited.write("[debug]")
    edited.keys.allow(edited.keys.stranger)
    await eventually(lambda: edited.daemon.process.key_reloads["applied"], "files were looked at")
    assert edited.daemon.process.config_reloads == {}
    await edited.reload("applied")
    assert edited.level == "debug"
