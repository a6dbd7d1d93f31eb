"""Tests for the directory that `state_dir: auto` chooses: the first base with enough room, a subdirectory for each bus.

kvbus uses no directory of another user.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbus.common.errors import InUseError, StateDirError
from kvbus.config import Config, load
from kvbus.core.events import BatchReceived
from kvbus.daemon.daemon import Daemon
from kvbus.state import directory as places
from kvbus.state.contract import StoreError
from kvbus.state.directory import MIN_FREE, Base, name_of, open_store, unusable
from kvbus.state.sqlite import SqliteStore
from tests.doubles.bus import eventually
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.ports import free_ports
from tests.state.left import reserve
from tests.typed import there

BASES = ("told", "runtime", "memory", "system", "home/.local/state")


def config(*, outputs: list[dict[str, Any]] | None = None, **settings: Any) -> Config:
    overrides = {
        "sources": [{"endpoint": "tcp://127.0.0.1:5557"}],
        "outputs": outputs or [{"endpoint": "tcp://*:5657", "replay_endpoint": "tcp://*:5658"}],
        **settings,
    }
    return load(None, env={}, overrides=overrides)


def somebody_elses(path: Path) -> None:
    path.mkdir(mode=0o700)
    try:
        os.chown(path, 12345, 12345)
    except OSError as error:  # a user who is not root, or root of a namespace with that user alone
        pytest.skip(f"a directory cannot be given away here: {error}")


class Machine:
    """A simulated machine, on which all directories that kvbus tries for its state are directories of the test.

    They stand for ``$STATE_DIRECTORY``, ``$XDG_RUNTIME_DIR``, /dev/shm, /var/lib/kvbus and ~/.local/state.
    """

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.free: dict[str, int] = {}
        self._patch = patch
        for name in BASES[:-1]:
            (directory / name).mkdir()
        (directory / "home").mkdir()
        patch.setenv("STATE_DIRECTORY", str(directory / "told"))
        patch.setenv("XDG_RUNTIME_DIR", str(directory / "runtime"))
        patch.delenv("XDG_STATE_HOME", raising=False)
        patch.setenv("HOME", str(directory / "home"))
        patch.setattr(places, "MEMORY", directory / "memory")
        patch.setattr(places, "SYSTEM", directory / "system")
        patch.setattr(os, "statvfs", self._statvfs)

    def _statvfs(self, path: Path) -> os.statvfs_result:
        block = 4096
        free = self.free.get(str(path.relative_to(self.directory)), 2 * MIN_FREE)
        path.lstat()
        return os.statvfs_result((block, block, 10**9, 10**9, free // block, 0, 0, 0, 0, 255))

    def without(self, *variables: str) -> None:
        for name in variables:
            self._patch.delenv(name)

    def used(self, of: Config | None = None) -> str | None:
        """Return the base directory in which kvbus keeps its state now, or None if it keeps none."""
        store = open_store(of or config())
        if store is None:
            return None
        store.close()
        return str(Path(store.location).parent.relative_to(self.directory)) if store.keeps_state else None

    def location(self, base: str) -> Path:
        return self.directory / base / name_of(config(), Base(self.directory / base, shared=base.startswith("home")))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


class TestOrderOfDirectories:
    def test_kvbus_uses_the_first_directory_with_enough_space(self, machine: Machine):
        found = []
        for base in BASES:
            found.append(machine.used())
            machine.free[base] = MIN_FREE - 4096
            shutil.rmtree(machine.location(base))
        assert tuple(found) == BASES
        assert machine.used() is None

    def test_enough_space_is_that_of_a_million_blocks(self, machine: Machine, caplog: pytest.LogCaptureFixture):
        machine.free["told"] = MIN_FREE
        assert machine.used() == "told"
        shutil.rmtree(machine.location("told"))
        machine.free |= dict.fromkeys(BASES, MIN_FREE - 4096)
        assert machine.used() is None
        assert "only 1023 MiB of the disk are free, 1024 are needed" in caplog.text

    def test_kvbus_uses_the_first_state_directory_of_systemd(self, machine: Machine, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("STATE_DIRECTORY", f"{machine.directory / 'told'}:{machine.directory / 'other'}")
        assert machine.used() == "told"

    def test_kvbus_uses_shared_memory_without_environment_variables(self, machine: Machine):
        machine.without("STATE_DIRECTORY", "XDG_RUNTIME_DIR")
        assert machine.used() == "memory"

    def test_kvbus_uses_xdg_state_home(self, machine: Machine, monkeypatch: pytest.MonkeyPatch):
        machine.free |= dict.fromkeys(BASES[:-1], 0)
        monkeypatch.setenv("XDG_STATE_HOME", str(machine.directory / "elsewhere"))
        assert machine.used() == "elsewhere"
        assert (machine.directory / "elsewhere").stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize("value", ["", "relative", "./here"])
    def test_a_relative_path_in_an_environment_variable_is_skipped(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch, value: str
    ):
        for name in ("STATE_DIRECTORY", "XDG_RUNTIME_DIR"):
            monkeypatch.setenv(name, value)
        assert machine.used() == "memory"

    def test_kvbus_creates_no_missing_base_directory(self, machine: Machine):
        for base in BASES[:-1]:
            (machine.directory / base).rmdir()
        assert machine.used() == "home/.local/state"
        assert not any((machine.directory / base).exists() for base in BASES[:-1])

    def test_kvbus_creates_no_missing_home_directory(self, machine: Machine):
        machine.free |= dict.fromkeys(BASES[:-1], 0)
        (machine.directory / "home").rmdir()
        assert machine.used() is None
        assert not (machine.directory / "home").exists()


class TestExistingState:
    def test_an_existing_state_directory_is_used_on_a_full_disk(self, machine: Machine):
        assert machine.used() == "told"
        machine.free["told"] = 0
        assert machine.used() == "told"

    def test_an_existing_state_directory_is_used_before_a_preferred_base(self, machine: Machine):
        machine.free["told"] = 0
        assert machine.used() == "runtime"
        machine.free["told"] = 10 * MIN_FREE
        assert machine.used() == "runtime"

    @pytest.mark.parametrize("furthest", ["told", "memory"])
    def test_of_several_state_directories_that_with_the_highest_seq_is_used(self, machine: Machine, furthest: str):
        """kvbus finds two state directories, because it was started with different environment variables before.

        It uses the one that has reserved the highest seqs. With the other one, its seqs would go back.
        """
        for base in ("told", "memory", "home/.local/state"):
            machine.location(base).mkdir(mode=0o700, parents=True)
        for base in ("told", "memory"):
            reserve(machine.location(base), "a", 2000 if base == furthest else 1000)
        assert machine.used() == furthest

    def test_an_unusable_state_directory_is_skipped(self, machine: Machine):
        machine.location("told").mkdir(mode=0o700)
        machine.location("told").joinpath("lock").mkdir()
        assert machine.used() == "runtime"


class TestUnusable:
    def test_unusable_finds_a_directory_without_creating_it(self, machine: Machine):
        assert unusable(config()) is None
        machine.free |= dict.fromkeys(BASES[:-1], MIN_FREE - 4096)
        # The last base directory does not exist yet, so the free space of its parent directory counts.
        assert unusable(config()) is None
        assert not (machine.directory / "home" / ".local").exists()

    def test_unusable_names_a_problem_of_each_base_without_space(self, machine: Machine):
        machine.free |= dict.fromkeys([*BASES, "home"], MIN_FREE - 4096)
        problems = unusable(config())
        assert problems is not None
        assert len(problems) == len(BASES)
        assert "only 1023 MiB of the disk are free, 1024 are needed" in problems[0]

    def test_unusable_accepts_an_existing_state_directory_on_a_full_disk(self, machine: Machine):
        machine.used()
        machine.free |= dict.fromkeys([*BASES, "home"], 0)
        assert unusable(config()) is None


class TestOwner:
    def test_the_state_directory_is_private_to_its_user(self, machine: Machine):
        machine.used()
        assert machine.location("told").stat().st_mode & 0o777 == 0o700
        assert machine.location("told").stat().st_uid == os.getuid()

    @pytest.mark.parametrize(
        ("make", "why"),
        [
            (lambda path: path.symlink_to(path.parent.parent), "Not a directory|symbolic link"),
            (lambda path: path.symlink_to("nowhere"), "Not a directory|symbolic link"),
            (lambda path: path.touch(), "Not a directory"),
            (lambda path: path.mkdir(mode=0o750), "other users can read or write the directory"),
            (somebody_elses, "the directory belongs to another user"),
        ],
        ids=["link", "link to nowhere", "file", "open to others", "somebody else's"],
    )
    def test_a_state_directory_that_is_not_private_is_not_used(
        self, machine: Machine, caplog: pytest.LogCaptureFixture, make: Callable[[Path], object], why: str
    ):
        if "somebody" in why and os.getuid():
            pytest.skip("needs root to give a directory away")
        path = machine.location("told")
        make(path)
        if why.startswith("others"):
            path.chmod(0o750)
        before = path.lstat()
        machine.free |= dict.fromkeys(BASES[1:], 0)
        assert machine.used() is None
        assert any(f"{path}: {reason}" in caplog.text for reason in why.split("|"))
        assert path.lstat() == before
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def test_a_state_directory_in_use_by_another_process_is_refused(self, machine: Machine):
        store = there(open_store(config()))
        with pytest.raises(InUseError, match=f"the state in {store.location} is in use by process {os.getpid()} on "):
            open_store(config())
        store.close()


def named(**settings: Any) -> str:
    return name_of(config(**settings), Base(Path("/x")))


class TestDirectoryName:
    def test_the_directory_name_does_not_depend_on_the_sources(self):
        source = {"name": "b", "endpoint": "tcp://127.0.0.1:7557", "slot": 3}
        assert named(sources=[{"endpoint": "tcp://127.0.0.1:5557"}, source]) == named()
        assert named(worker="another", model="m", block_size=32, http="127.0.0.1:1") == named()

    def test_kvbuses_with_other_outputs_have_other_directory_names(self):
        others = [
            [{"endpoint": "tcp://*:5659", "replay_endpoint": "tcp://*:5658"}],
            [{"endpoint": "tcp://127.0.0.1:5657"}],
            [{"endpoint": "ipc:///run/kvbus"}],
            [{"endpoint": "ipc://@kvbus"}],
            [{"endpoint": "tcp://router:5657", "bind": False}],
            [{"endpoint": "tcp://router:5657", "bind": False, "replay_endpoint": "tcp://*:5658"}],
            [{"endpoint": "tcp://router:5657", "bind": False, "replay_endpoint": "tcp://*:5758"}],
        ]
        names = [named(outputs=outputs) for outputs in others]
        assert len({*names, named()}) == len(names) + 1

    def test_the_first_bound_address_decides_the_directory_name(self):
        """The address of the first output gives a bus's state directory its name.

        No two running buses can have bound this address, and it does not change when an output is appended.
        """
        one, other = {"endpoint": "tcp://*:5657"}, {"name": "more", "endpoint": "tcp://*:6657"}
        assert named(outputs=[one, other]) == named(outputs=[one])
        dialling = {"name": "dials", "endpoint": "tcp://router:1", "bind": False}
        assert named(outputs=[dialling, one]) == named(outputs=[one])

    def test_kvbuses_that_bind_no_address_are_distinguished_by_their_engines(self):
        outputs = [{"endpoint": "tcp://router:5657", "bind": False}]
        sources = [[{"endpoint": f"tcp://127.0.0.1:{port}"}] for port in (5557, 5558)]
        assert named(outputs=outputs, sources=sources[0]) != named(outputs=outputs, sources=sources[1])

    def test_a_relative_ipc_path_depends_on_the_working_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        outputs = [{"endpoint": "ipc://kv"}]
        here = named(outputs=outputs)
        monkeypatch.chdir(tmp_path)
        assert named(outputs=outputs) != here
        assert named(outputs=outputs) == named(outputs=[{"endpoint": f"ipc://{tmp_path}/kv"}])

    def test_different_users_have_different_directory_names(self, monkeypatch: pytest.MonkeyPatch):
        mine = named()
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert named() != mine

    def test_machines_have_different_directory_names_in_a_shared_directory(self, monkeypatch: pytest.MonkeyPatch):
        shared = Base(Path("/x"), shared=True)
        here = named(), name_of(config(), shared)
        monkeypatch.setattr(socket, "gethostname", lambda: "another-container")
        assert named() == here[0], "a container has another name each time it is made"
        assert name_of(config(), shared) != here[1]


class TestNoState:
    def test_state_dir_null_causes_a_warning_about_its_cost(self, machine: Machine, caplog: pytest.LogCaptureFixture):
        store = there(open_store(config(state_dir=None)))
        assert not store.keeps_state
        assert Path(store.location) == machine.location("runtime"), "the numbering goes on all the same"
        store.close()
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert record.getMessage().startswith("state_dir is null, so kvbus keeps no state: after a restart routers")

    def test_state_dir_null_deletes_the_old_state_and_keeps_its_seqs(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.delenv("STATE_DIRECTORY")
        store = there(open_store(config()))
        for _ in store.checkpoint(["a"], [b"secret"], lambda: False):
            pass
        store.append(b"secret", b"secret")
        store.reserved.raise_to(77)
        store.reserve(store.reserved)
        store.close()
        store = there(open_store(config(state_dir=None)))
        assert store.reserved.highest == 77
        store.close()
        store = there(open_store(config()))
        assert (store.refused, store.reserved.highest) == (0, 77)
        assert not store.load(["a"], print, print)
        store.close()

    def test_kvbus_warns_if_it_finds_no_directory_for_its_state(
        self, machine: Machine, caplog: pytest.LogCaptureFixture
    ):
        for base in BASES[:-1]:
            (machine.directory / base).rmdir()
        (machine.directory / "home").rmdir()
        machine.without("XDG_RUNTIME_DIR")
        assert open_store(config()) is None
        record = next(record for record in caplog.records if record.levelno == logging.WARNING)
        assert "state_dir auto found no directory" in record.getMessage()
        assert f"{machine.location('told')}: No such file or directory" in record.getMessage()
        assert "so kvbus keeps no state: after a restart routers get AllBlocksCleared" in record.getMessage()


class TestConfiguredDirectory:
    def test_kvbus_creates_the_configured_state_directory(self, tmp_path: Path):
        store = there(open_store(config(state_dir=str(tmp_path / "a" / "b"))))
        assert Path(store.location) == tmp_path / "a" / "b"
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
        store.close()

    def test_a_state_dir_that_is_a_file_is_a_configuration_error(self, tmp_path: Path):
        (tmp_path / "file").touch()
        with pytest.raises(StateDirError, match=f"state_dir {tmp_path / 'file'}: ") as caught:
            open_store(config(state_dir=str(tmp_path / "file")))
        assert caught.value.exit_code == 78

    def test_a_configured_state_directory_has_only_one_process(self, tmp_path: Path):
        store = there(open_store(config(state_dir=str(tmp_path))))
        with pytest.raises(InUseError, match=f"state_dir {tmp_path} is in use"):
            open_store(config(state_dir=str(tmp_path)))
        store.close()


def on_free_ports(**settings: Any) -> Config:
    engine, live = free_ports(2)
    return config(
        sources=[{"endpoint": f"tcp://127.0.0.1:{engine}"}],
        outputs=[{"endpoint": f"tcp://127.0.0.1:{live}", "heartbeat": 0}],
        http=None,
        on_lost="keep",
        **settings,
    )


async def test_a_kvbus_finds_its_own_state_again(machine: Machine):
    mine, other = on_free_ports(), on_free_ports()
    for count in (1, 2):
        for of in (mine, other):
            daemon = Daemon(of)
            assert daemon.relay.outputs[0].streams[0].next_seq == count - 1
            await daemon.start()
            daemon.feed(BatchReceived(0, [b"", (count - 1).to_bytes(8, "big"), batch(store([count]))]))
            await daemon.close(drain=0)
    assert len(list((machine.directory / "told").iterdir())) == 2


async def test_kvbus_starts_without_state_if_the_store_cannot_be_written(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    daemon = Daemon(on_free_ports())

    def broken(store: SqliteStore, *_: object) -> None:
        raise StoreError(f"{store.location}: Input/output error")

    monkeypatch.setattr(SqliteStore, "checkpoint", broken)
    await daemon.start()
    assert daemon.process.state_writing is False
    said = f"kvbus cannot write its state to {machine.directory}"
    await eventually(lambda: said in caplog.text, "the finding")
    assert [record.levelname for record in caplog.records if str(machine.directory) in record.getMessage()].count(
        "ERROR"
    ) == 0, "one line says it"
    assert "[state_dir]: free disk space for state_dir" in caplog.text
    daemon.feed(BatchReceived(0, [b"", bytes(8), batch(store([1]))]))
    assert daemon.relay.outputs[0].streams[0].next_seq == 1
    await daemon.close(drain=0)
