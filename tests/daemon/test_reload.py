"""When a reload happens, and how it is counted; what it does to a running bus is in tests/system/test_reload.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvbus.admin.credentials import Credentials, read_credentials
from kvbus.admin.tokens import line_of, new_token
from kvbus.config import Config, load
from kvbus.core.stats import ProcessStats
from kvbus.daemon import reload
from kvbus.daemon.change import Change
from kvbus.daemon.daemon import Daemon
from kvbus.daemon.keys import Keys, read_keys
from kvbus.daemon.placement import Placement, place
from kvbus.daemon.reload import Reloader
from kvbus.errors import BindError
from tests.security.keys import Keyring
from tests.system.bus import eventually


class Recorder:
    """A daemon that does what it is asked by writing it down."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.placement = place(Placement(), config)
        self.keys = read_keys(config)
        self.started = True
        self.process = ProcessStats()
        self.source_sockets = self
        self.admin = self
        self.credentials = read_credentials(config)
        self.discovery = self
        self.changes = self
        self.changing = asyncio.Lock()
        self.applied: list[Change] = []
        self.taken = False
        """Another process has an address that a change needs."""

    def is_open(self, _slot: int) -> bool:
        return True

    def preview(self, config: Config) -> Config:
        return config

    async def adopt(self, config: Config) -> None:
        """Nothing discovers here."""

    async def apply(self, change: Change, keys: Keys) -> None:
        if self.taken:
            raise BindError("ipc:///run/b", "address in use")
        self.config, self.placement = change.config, change.placement
        self.applied.append(change)
        await self.apply_keys(keys)

    async def apply_keys(self, keys: Keys) -> None:
        self.keys = keys

    def renew(self, credentials: Credentials) -> None:
        self.credentials = credentials


class Fixture:
    """A reloader, its daemon, and the configuration on disk."""

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
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    made = Fixture(Keyring(tmp_path))
    yield made
    made.reloader.close()


async def test_a_good_configuration_is_applied(fixture: Fixture) -> None:
    fixture.sources = ["a", "b"]
    await fixture.reload("applied")
    (change,) = fixture.daemon.applied
    assert [stream.label for stream in change.added] == ["b"]


@pytest.mark.parametrize(
    ("settings", "named"), [({"block_size": 32}, "block_size = 32"), ({"shutdown_timeout": -1}, "shutdown_timeout")]
)
async def test_a_bad_one_is_refused_and_named(
    fixture: Fixture, settings: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    fixture.settings |= settings
    await fixture.reload("refused")
    assert not fixture.daemon.applied
    assert "configuration refused, the one before stays in force" in caplog.text
    assert named in caplog.text


async def test_a_change_that_the_daemon_cannot_make_is_refused(fixture: Fixture) -> None:
    fixture.daemon.taken = True
    await fixture.reload("refused")
    fixture.daemon.taken = False
    await fixture.reload("applied")
    assert fixture.daemon.process.config_reloads == {"refused": 1, "applied": 1}


async def test_a_configuration_whose_keys_cannot_be_read_is_refused(fixture: Fixture) -> None:
    fixture.keys.bus.secret_file.unlink()
    await fixture.reload("refused")


async def test_changed_key_files_are_found_without_a_signal(fixture: Fixture) -> None:
    before = fixture.daemon.keys
    fixture.reloader.watch()
    fixture.keys.allow(fixture.keys.router, fixture.keys.stranger)
    await eventually(lambda: fixture.daemon.process.key_reloads["applied"], "found")
    assert fixture.daemon.keys != before
    assert fixture.daemon.process.config_reloads == {}


async def test_a_bad_key_file_is_said_once_until_it_is_another_mistake(
    fixture: Fixture, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def counted(config: Config) -> Keys:
        nonlocal looks
        looks += 1
        return read_keys(config)

    async def after_more_looks() -> None:
        before = looks
        await eventually(lambda: looks > before + 2, "more looks")

    monkeypatch.setattr(reload, "read_keys", counted)
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
    assert caplog.text.count("the keys before stay in force") == 2


def replace(file: Path, text: str) -> None:
    """Put another file in its place, so that nobody reads a part of it."""
    file.with_name("new").write_text(text)
    file.with_name("new").rename(file)


async def test_tokens_change_without_a_signal_and_a_bad_file_throws_nobody_out(
    fixture: Fixture, tmp_path: Path, caplog: pytest.LogCaptureFixture
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
    assert "those before stay in force" in caplog.text
    assert not any(token in caplog.text for token in tokens)


async def test_tokens_are_read_at_a_signal_though_the_configuration_is_bad(fixture: Fixture, tmp_path: Path) -> None:
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
