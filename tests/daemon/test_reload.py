"""When a reload happens, and how it is counted; what it does to a running bus is in tests/system/test_reload.py."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvbus.common.errors import BindError, ConfigError, Problem
from kvbus.config import Config, load
from kvbus.core.stats import ProcessStats
from kvbus.daemon import reload
from kvbus.daemon.change import Change
from kvbus.daemon.config_file import ConfigFile
from kvbus.daemon.daemon import Daemon
from kvbus.daemon.keys import Keys, read_keys
from kvbus.daemon.placement import Placement, place
from kvbus.daemon.reload import Reloader
from kvbus.http.credentials import Credentials, read_credentials
from kvbus.http.tokens import line_of, new_token
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


class Edited(Fixture):
    """A reloader that looks at the configuration's own file."""

    def __init__(self, keys: Keyring, path: Path) -> None:
        self.path = path
        super().__init__(keys)
        self.write("[a]")
        self.reloader = Reloader(cast("Daemon", self.daemon), self.load_now, ConfigFile(path))
        self.reloader.watch()

    def load_now(self) -> Config:
        """Load it by what ``load`` is now: a test may replace it."""
        return self.load()

    def write(self, sources: str) -> None:
        replace(self.path, sources)

    def load(self) -> Config:
        if self.path.exists():
            text = self.path.read_text()
            if not text.endswith("]"):
                raise ConfigError([Problem("sources", "is broken", text)])
            self.sources = text.strip("[]").split()
        return super().load()

    @property
    def labels(self) -> list[str]:
        return [source.name for source in self.daemon.config.sources]

    async def looked_twice(self) -> None:
        """The file is looked at again, and once more."""
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
    made = Edited(Keyring(tmp_path), tmp_path / "sources")
    yield made
    made.reloader.close()


async def test_a_changed_file_is_loaded_without_a_signal(edited: Edited) -> None:
    await edited.looked_twice()
    assert edited.daemon.process.config_reloads == {}
    edited.write("[a b]")
    await eventually(lambda: edited.labels == ["a", "b"], "taken over")
    await edited.looked_twice()
    assert edited.daemon.process.config_reloads == {"applied": 1}


async def test_a_refusal_is_said_once_and_counts_until_it_is_over(
    edited: Edited, caplog: pytest.LogCaptureFixture
) -> None:
    process = edited.daemon.process
    edited.write("[a b")
    await eventually(lambda: process.config_refused == ["sources"], "refused")
    await edited.looked_twice()
    assert edited.labels == ["a"]
    assert process.config_reloads == {"refused": 1}
    assert caplog.text.count("configuration refused") == 1
    edited.write("[a")
    await eventually(lambda: process.config_reloads["refused"] == 2, "another mistake")
    edited.write("[a]")
    await eventually(lambda: process.config_refused == [], "the file is what is in force")


async def test_what_was_refused_for_something_else_is_tried_again(edited: Edited) -> None:
    """A key file or an address may come after the configuration that names it."""
    edited.daemon.taken = True
    edited.write("[a b]")
    await eventually(lambda: edited.daemon.process.config_refused, "refused")
    edited.daemon.taken = False
    await eventually(lambda: edited.labels == ["a", "b"], "taken over")
    assert edited.daemon.process.config_reloads == {"refused": 1, "applied": 1}


async def test_a_file_that_goes_on_changing_is_not_loaded(edited: Edited, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes it in place passes through configurations that nobody wants."""
    count = itertools.count()
    content = ConfigFile.content
    monkeypatch.setattr(ConfigFile, "content", lambda file: content(file) + bytes(str(next(count)), "ascii"))
    edited.write("[b]")
    await eventually(lambda: next(count) > 50, "looks")
    assert edited.labels == ["a"]
    monkeypatch.undo()
    await eventually(lambda: edited.labels == ["b"], "taken over")


async def test_a_file_that_changes_while_it_is_loaded_is_not_applied(
    edited: Edited, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = edited.load
    half: list[list[str]] = []

    def torn() -> Config:
        config = load()
        if not half:
            half.append([source.name for source in config.sources])
            edited.write("[c]")
        return config

    monkeypatch.setattr(edited, "load", torn)
    edited.write("[b]")
    await eventually(lambda: edited.labels == ["c"], "the second one")
    assert half == [["b"]]
    assert edited.daemon.process.config_reloads == {"applied": 1}


async def test_a_signal_alone_loads_it_where_that_is_wanted(edited: Edited) -> None:
    edited.settings["reload"] = "signal"
    await edited.reload("applied")
    edited.write("[a b]")
    await eventually(lambda: edited.daemon.config.reload == "signal", "taken over")
    before = edited.daemon.process.config_reloads["applied"]
    edited.keys.allow(edited.keys.stranger)
    await eventually(lambda: edited.daemon.process.key_reloads["applied"], "files were looked at")
    assert edited.daemon.process.config_reloads["applied"] == before
    await edited.reload("applied")
    assert edited.labels == ["a", "b"]
