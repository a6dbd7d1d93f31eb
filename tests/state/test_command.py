"""Tests for ``kvbus state``, which reports what a state directory contains and deletes it.

After a deletion, seqs never go back.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvbus.cli import main
from kvbus.config import Config, load
from kvbus.core.events import BatchReceived
from kvbus.daemon.daemon import Daemon
from kvbus.state import directory as places
from kvbus.state.directory import open_store
from kvbus.state.sqlite import RESERVE_AHEAD
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.state.left import immutable, rows
from tests.state.test_damage import blocks_of, next_seq_of

SECRET = 0x5EC4E7
"""A token id that appears only in a saved state."""


def config_of(directory: Path) -> Config:
    return load(
        None,
        env={},
        overrides={
            "sources": [{"endpoint": f"ipc://{directory}/engine"}],
            "outputs": [{"endpoint": f"ipc://{directory}/live", "heartbeat": 0}],
            "http": None,
            "on_lost": "keep",
            "state_dir": str(directory / "state"),
        },
    )


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(tmp_path)


def directory_of(config: Config) -> Path:
    return Path(str(config.state_dir))


async def ran(config: Config, count: int) -> int:
    """Run a bus and kill it. Return the next seq of its stream."""
    daemon = Daemon(config)
    await daemon.start()
    for n in range(count):
        events = [store([n], tokens=[SECRET + n] * 4, block_size=4)]
        daemon.feed(BatchReceived(0, [b"", n.to_bytes(8, "big"), batch(*events)]))
    killed = directory_of(config).with_name("killed")
    shutil.copytree(directory_of(config), killed)
    used = next_seq_of(daemon)
    await daemon.close(drain=0)
    shutil.rmtree(directory_of(config))
    killed.rename(directory_of(config))
    return used


def ask(*args: str) -> Result:
    return CliRunner().invoke(main, ["state", *args])


def holds_a_secret(directory: Path) -> bool:
    content = b"".join(path.read_bytes() for path in directory.iterdir())
    return any((SECRET + n).to_bytes(4, "big") in content for n in range(20))


async def test_state_show_prints_sizes_and_no_content(config: Config) -> None:
    used = await ran(config, 20)
    directory = directory_of(config)
    assert holds_a_secret(directory)
    before = rows(directory)
    done = ask("show", "-d", str(directory), "--json")
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert set(said["files"]) == {"state.db", "state.db-wal"}
    assert said["bytes"] == sum(said["files"].values())
    assert (said["streams"], said["highest"]) == (1, used + RESERVE_AHEAD - 19 - 1)
    assert (said["this_boot"], said["synced"], said["damaged"]) == (True, False, None)
    assert said["frames"] >= 20
    text = ask("show", "-d", str(directory)).stdout
    assert "state.db" in text
    assert "damaged: no\nstreams: 1\n" in text
    assert "every commit waited until the disk had it: no\nwritten since the machine started: yes\n" in text
    assert str(SECRET) not in done.stdout + text
    assert rows(directory) == before


async def test_state_show_finds_the_state_of_a_configuration(config: Config, tmp_path: Path) -> None:
    await ran(config, 3)
    path = tmp_path / "kvbus.yaml"
    path.write_text(config.to_yaml())
    assert json.loads(ask("show", "-c", str(path), "--json").stdout)["directory"] == str(config.state_dir)
    for missing in ("null", str(tmp_path / "nowhere")):
        done = ask("show", "-c", str(path), "--set", f"state_dir={missing}")
        assert done.exit_code == 78


async def test_state_show_reports_a_damaged_state_and_does_not_change_it(config: Config) -> None:
    await ran(config, 3)
    directory = directory_of(config)
    (directory / "state.db").write_bytes(b"garbage" * 1000)
    (directory / "state.db-wal").unlink()
    done = ask("show", "-d", str(directory), "--json")
    assert done.exit_code == 0
    assert "not a database" in json.loads(done.stdout)["damaged"]
    assert (directory / "state.db").read_bytes() == b"garbage" * 1000


async def test_unused_directories_are_listed_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvbus state list` shows the directories of all configurations. `remove` deletes only old and unused ones."""
    for name in ("STATE_DIRECTORY", "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(places, "MEMORY", tmp_path)
    monkeypatch.setattr(places, "SYSTEM", tmp_path / "none")
    monkeypatch.setattr(places, "MIN_FREE", 0)
    opened = {}
    for name in ("running", "old", "new"):
        sources = [{"endpoint": "tcp://127.0.0.1:5557"}]
        outputs = [{"endpoint": f"ipc:///run/{name}"}]
        over = {"sources": sources, "outputs": outputs, "state_dir": "auto"}
        store = open_store(load(None, env={}, overrides=over))
        assert store is not None
        opened[name] = Path(store.location), store
    directories = {name: path for name, (path, _) in opened.items()}
    for name in ("old", "new"):
        opened[name][1].close()
    for each in (*directories["old"].iterdir(), directories["old"], *directories["running"].iterdir()):
        os.utime(each, (0, time.time() - 40 * 86_400))
    (tmp_path / "kvbus-state-file").write_text("not a directory")
    shown = {entry["directory"]: entry for entry in json.loads(ask("list", "--json").stdout)}
    assert set(shown) == {str(path) for path in directories.values()}
    assert shown[str(directories["running"])]["in_use"].startswith(f"process {os.getpid()} on ")
    assert shown[str(directories["new"])]["in_use"] is None
    assert shown[str(directories["new"])]["bytes"] > 0
    assert re.search(rf"{directories['old']}  [\d,]+ bytes  last used 40\.0 days ago\n", ask("list").stdout)
    listed = ask("remove")
    assert (listed.exit_code, listed.stdout.split()[0]) == (1, str(directories["old"]))
    assert len(listed.stdout.splitlines()) == 1
    assert directories["old"].exists()
    assert ask("remove", "--yes").exit_code == 0
    assert not directories["old"].exists()
    assert directories["new"].exists()
    assert ask("remove", "--unused-days", "0", "--yes").exit_code == 0
    assert {name for name, path in directories.items() if path.exists()} == {"running"}
    opened["running"][1].close()


def test_state_show_reads_a_state_on_a_read_only_mount(config: Config) -> None:
    used = asyncio.run(ran(config, 20))
    directory = directory_of(config)
    script = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && exec "$0" -m kvbus state show -d "$1" --json'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(done.stderr)
    said = json.loads(done.stdout)
    assert (said["streams"], said["highest"]) == (1, used + RESERVE_AHEAD - 19 - 1)
    assert (said["damaged"], said["frames"] >= 20) == (None, True)


async def test_state_wipe_refuses_a_directory_in_use(config: Config) -> None:
    await ran(config, 3)
    directory = directory_of(config)
    daemon = Daemon(config)
    before = rows(directory)
    try:
        done = ask("wipe", "-d", str(directory), "--yes")
        assert done.exit_code == 69
        assert "is in use by process" in str(done.stderr)
        assert rows(directory) == before
        done = ask("show", "-d", str(directory), "--json")
        assert done.exit_code == 0
        assert "is in use by process" in json.loads(done.stdout)["in_use"]
    finally:
        await daemon.close(drain=0)


async def test_state_wipe_without_yes_deletes_nothing(config: Config) -> None:
    await ran(config, 3)
    before = rows(directory_of(config))
    done = ask("wipe", "-d", str(config.state_dir))
    assert done.exit_code == 1
    assert "add --yes" in done.stderr
    assert "state.db" in done.stdout
    assert rows(directory_of(config)) == before


@pytest.mark.parametrize("damaged", ["", "deleted", "a directory"])
async def test_kvbus_begins_empty_with_higher_seqs_after_state_wipe(config: Config, damaged: str) -> None:
    directory = directory_of(config)
    used = await ran(config, 20)
    shutil.copy(directory / "state.db-wal", directory / "state.db-wal.refused-20260101T000000")
    (directory / "notes.txt").write_bytes(b"somebody else's")
    if damaged:
        (directory / "state.db").unlink()
    if damaged == "a directory":
        (directory / "state.db" / "below").mkdir(parents=True)
    done = ask("wipe", "-d", str(directory), "--yes")
    assert done.exit_code == 0, done.output
    assert not holds_a_secret(directory)
    assert {path.name for path in directory.iterdir()} <= {"state.db", "state.db-wal", "lock", "notes.txt"}
    daemon = Daemon(config)
    await daemon.start()
    try:
        assert not daemon.restored
        assert daemon.state is not None
        assert daemon.state.refused == 0
        assert blocks_of(daemon) == set()
        assert next_seq_of(daemon) > used
    finally:
        await daemon.close(drain=0)


async def test_state_wipe_names_files_that_it_cannot_delete(config: Config) -> None:
    await ran(config, 3)
    directory = directory_of(config)
    (directory / "state.db.refused-1").touch()
    with immutable(directory / "state.db.refused-1"):
        done = ask("wipe", "-d", str(directory), "--yes")
    assert done.exit_code == 1
    assert "not deleted: state.db.refused-1: " in done.stderr


def test_an_empty_directory_contains_no_state(tmp_path: Path) -> None:
    assert "holds no state" in ask("wipe", "-d", str(tmp_path), "--yes").stderr
    assert json.loads(ask("show", "-d", str(tmp_path), "--json").stdout)["files"] == {}
    assert list(tmp_path.iterdir()) == []
