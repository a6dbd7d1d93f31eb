"""``kvbus state``: what it says of a directory, what it removes, and that the numbering outlives it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvbus.cli import main
from kvbus.common.errors import StateKeyError
from kvbus.config import Config
from kvbus.daemon import state_inventory
from kvbus.daemon.daemon import Daemon
from kvbus.daemon.disk import Disk
from kvbus.daemon.state_inventory import Found, look
from tests.daemon.test_state_damage import blocks_of, next_seq_of
from tests.daemon.test_state_keys import NAMES, ONE, TWO, config, files, plain, ran, with_keys

__all__ = ["config"]


def ask(*args: str) -> Result:
    return CliRunner().invoke(main, ["state", *args])


def content(config: Config) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in files(config)}


@pytest.mark.parametrize("lines", [[], [ONE]])
async def test_it_says_what_the_files_are_and_nothing_of_what_is_in_them(
    config: Config, tmp_path: Path, lines: list[str]
) -> None:
    _, used = await ran(with_keys(config, tmp_path, *lines), range(20))
    before = content(config)
    done = ask("show", "-d", str(config.state_dir), "--json")
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert said["sealed"] == ("yes" if lines else "no")
    assert [file["name"] for file in said["files"]] == ["state-1.dump", "state-1.log"]
    assert all(file["version"].isdigit() and file["sealed"] == bool(lines) for file in said["files"])
    assert (said["bytes"], said["streams"], said["generation"]) == (
        sum(len(before[f["name"]]) for f in said["files"]),
        1,
        1,
    )
    assert said["highest_seq"] >= used
    assert (said["this_boot"], said["synced"], said["damaged"]) == (True, False, None)
    text = ask("show", "-d", str(config.state_dir)).stdout
    assert "state-1.log" in text
    assert not [name for name in NAMES if name in (done.stdout + text).encode()]
    assert content(config) == before


async def test_a_state_is_found_by_its_configuration(config: Config, tmp_path: Path) -> None:
    await ran(config, range(3))
    path = tmp_path / "kvbus.yaml"
    path.write_text(config.to_yaml())
    assert json.loads(ask("show", "-c", str(path), "--json").stdout)["directory"] == str(config.state_dir)
    for missing in ("null", str(tmp_path / "nowhere")):
        done = ask("show", "-c", str(path), "--set", f"state_dir={missing}")
        assert done.exit_code == 78


def test_files_of_no_version_and_what_is_no_file_are_told(tmp_path: Path) -> None:
    (tmp_path / "state-1.log").write_bytes(b"another file")
    (tmp_path / "state-2.log").write_bytes(b"kvbus-sealed010\nmore")
    (tmp_path / "log.spare").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "state-3.txt").write_bytes(b"")
    (tmp_path / "commit").write_bytes(b"no record")
    found = look(tmp_path)
    assert list(found.files) == [
        Found("log.spare", 0, "", sealed=False),
        Found("state-1.log", 12, "", sealed=False),
        Found("state-2.log", 20, "010", sealed=True),
    ]
    assert found.others == ["commit", "state-3.txt"]
    assert found.committed is None
    assert "damaged" in found.damaged
    assert (found.streams, found.highest) == (0, 0)
    assert "sealed: some" in ask("show", "-d", str(tmp_path)).stdout


async def test_a_directory_in_use_is_left_alone(config: Config) -> None:
    await ran(config, range(3))
    daemon = Daemon(config)
    before = content(config)
    try:
        done = ask("wipe", "-d", str(config.state_dir), "--yes")
        assert done.exit_code == 69
        assert "is in use by process" in str(done.stderr)
        assert content(config) == before
        assert ask("show", "-d", str(config.state_dir)).exit_code == 0
    finally:
        await daemon.close(drain=0)


async def test_nothing_goes_unless_it_is_asked_for_twice(config: Config) -> None:
    await ran(config, range(3))
    before = content(config)
    done = ask("wipe", "-d", str(config.state_dir))
    assert done.exit_code == 2
    assert "add --yes" in done.stderr
    assert "state-1.log" in done.stdout
    assert {name: each for name, each in content(config).items() if name != "lock"} == {
        name: each for name, each in before.items() if name != "lock"
    }


def broken_record(directory: Path) -> None:
    (directory / "commit").write_bytes(b"x")


def no_record(directory: Path) -> None:
    (directory / "commit").unlink()


def no_reservation(directory: Path) -> None:
    for path in directory.glob("*.seq"):
        path.unlink()


@pytest.mark.parametrize("damage", [None, broken_record, no_record, no_reservation])
@pytest.mark.parametrize("lines", [[], [ONE]])
async def test_a_bus_begins_empty_after_it_and_no_seq_goes_back(
    config: Config, tmp_path: Path, lines: list[str], damage: Callable[[Path], None] | None
) -> None:
    """Also where the key is lost, which is what it is for."""
    directory = Path(str(config.state_dir))
    _, used = await ran(with_keys(config, tmp_path, *lines), range(20), kill=True)
    shutil.copy(directory / "state-1.log", directory / "state-1.log.refused-20260101T000000")
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (directory / "log.spare").symlink_to(victim)
    (directory / "notes.txt").write_bytes(b"somebody else's")
    if damage is not None:
        damage(directory)
    now = with_keys(config, tmp_path, TWO)
    with pytest.raises(StateKeyError):
        Daemon(now)
    done = ask("wipe", "-d", str(directory), "--yes")
    assert done.exit_code == 0, done.output
    assert plain(config) == set()
    assert {path.name for path in files(config) if path.suffix != ".seq"} <= {"commit", "lock", "notes.txt"}
    assert victim.read_bytes() == b"precious"
    assert "holds no state" in ask("wipe", "-d", str(directory), "--yes").stderr
    daemon = Daemon(now)
    await daemon.start()
    try:
        assert not daemon.restored
        assert daemon.state is not None
        assert daemon.state.refused == 0
        assert blocks_of(daemon) == set()
        assert next_seq_of(daemon) > used
    finally:
        await daemon.close(drain=0)


async def test_what_cannot_be_removed_is_named(config: Config) -> None:
    await ran(config, range(3))
    directory = Path(str(config.state_dir))
    (directory / "state-7.dump").mkdir()
    done = ask("wipe", "-d", str(directory), "--yes")
    assert done.exit_code == 1
    assert "not removed: state-7.dump: " in done.stderr
    assert [path.name for path in files(config) if path.name.startswith("state-")] == ["state-7.dump"]


async def test_ended_in_the_middle_it_leaves_nothing_that_is_taken_for_a_state(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, used = await ran(config, range(20))

    class Stopped(Disk):
        def unlink(self, directory: int, name: str) -> None:
            if name.startswith("state-"):
                raise KeyboardInterrupt
            super().unlink(directory, name)

    directory = Path(str(config.state_dir))
    with pytest.raises(KeyboardInterrupt):
        state_inventory.wipe(directory, look(directory), Stopped())
    daemon = Daemon(config)
    await daemon.start()
    assert blocks_of(daemon) == set()
    assert next_seq_of(daemon) > used
    await daemon.close(drain=0)
