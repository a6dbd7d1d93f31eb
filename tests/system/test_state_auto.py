"""Tests for the default `state_dir: auto` with real processes and file systems.

kvbus keeps its state unless no directory is suitable.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doubles.bus import eventually
from tests.doubles.kvbus_process import Place, Program, run_async
from tests.system.test_second_process import BUFFER, forgetful_engine
from tests.system.test_start import own_mounts

needs_mounts = pytest.mark.skipif(not own_mounts(), reason="needs unshare -m (root) to have file systems of its own")


def one_liner(place: Place) -> tuple[str, ...]:
    """Return the command-line arguments of a kvbus without a configuration file.

    All settings except the endpoints have their defaults.
    """
    source, output = f"{place.engine},{place.engine_replay}", f"{place.out},{place.out_replay}"
    return ("run", "--source", source, "--output", output, "--http", place.http, "--log-format", "text")


def test_a_killed_kvbus_restores_blocks_that_the_engine_no_longer_replays(tmp_path: Path) -> None:
    place = Place(tmp_path)

    def the_place() -> Path:
        (kept,) = tmp_path.glob("kvbus-state-*")
        return kept

    async def main() -> None:
        with Program(tmp_path, *one_liner(place)) as first:
            await place.ready(first)
            async with forgetful_engine(place) as engine:
                for _ in range(6):
                    await engine.publish(BUFFER)
                    await eventually(lambda: place.sources()[0]["last_seq"] == engine.published - 1, "relayed")
                assert f"state_dir auto: the state is kept in {the_place()}" in first.said
                assert the_place().stat().st_mode & 0o777 == 0o700
                before = place.sources()[0]["blocks"]
                first.process.kill()
                first.process.wait(10)
                with Program(tmp_path, *one_liner(place), name="again") as again:
                    await place.ready(again)
                    await eventually(lambda: place.sources()[0]["state"] == "live", "the engine found again")
                    (source,) = place.sources()
                    assert (source["partial"], source["blocks"], source["epoch"]) == (False, before, 0)
                    assert "kvbus_state_writing 1.0" in place.get("/metrics")[1]
                    again.process.terminate()
                    assert await again.ends() == 0, again.said

    run_async(main())


class Elsewhere(Program):
    """A ``kvbus`` process that sees its own mounts, which the given shell commands make."""

    def __init__(self, directory: Path, mounts: str, *args: str) -> None:
        super().__init__(directory, *args)
        self._mounts = mounts
        self.env = {name: value for name, value in self.env.items() if not name.startswith("XDG_")}
        self.env |= {"HOME": str(directory / "home"), "XDG_RUNTIME_DIR": str(directory / "runtime")}
        del self.env["STATE_DIRECTORY"]
        for name in ("home", "runtime"):
            (directory / name).mkdir()

    @property
    def command(self) -> list[str]:
        return ["unshare", "-m", "sh", "-c", f'set -e\n{self._mounts}\nexec "$@"', "sh", *super().command]


@needs_mounts
def test_kvbus_does_not_use_shared_memory_that_is_too_small(tmp_path: Path) -> None:
    """kvbus does not put its state into a file system in memory that is too small, such as a container's /dev/shm
    of 64 MiB.
    """
    place = Place(tmp_path)
    small = f"mount -t tmpfs -o size=64m none {tmp_path / 'runtime'}\nmount -t tmpfs -o size=64m none /dev/shm"

    async def main() -> None:
        with Elsewhere(tmp_path, small, *one_liner(place)) as bus:
            await place.ready(bus)
            (kept,) = (tmp_path / "home" / ".local" / "state").iterdir()
            assert f"the state is kept in {kept}" in bus.said
            assert kept.joinpath("lock").is_file()
            bus.process.terminate()
            assert await bus.ends() == 0, bus.said

    run_async(main())


@needs_mounts
def test_kvbus_runs_with_a_warning_if_it_can_write_no_state(tmp_path: Path) -> None:
    place = Place(tmp_path)
    read_only = "\n".join(
        [f"mount -t tmpfs -o size=64m,ro none {tmp_path / 'runtime'}", "mount -t tmpfs -o size=2g,ro none /dev/shm"]
        + [f"mount --bind {path} {path}\nmount -o remount,ro,bind {path}" for path in (tmp_path / "home",)]
    )

    async def main() -> None:
        with Elsewhere(tmp_path, read_only, *one_liner(place)) as bus:
            await place.ready(bus)
            assert "WARNING" in bus.said
            assert "state_dir auto found no directory (" in bus.said
            assert "Read-only file system" in bus.said
            assert "so kvbus keeps no state: after a restart routers get AllBlocksCleared" in bus.said
            assert "kvbus_state_writing 0.0" in place.get("/metrics")[1]
            bus.process.terminate()
            assert await bus.ends() == 0, bus.said

    run_async(main())


def test_the_demo_leaves_no_state_directory(tmp_path: Path) -> None:
    with Program(tmp_path, "demo", "--seconds", "1", name="demo") as demo:
        assert demo.ended(60) == 0, demo.said
    assert [path for path in tmp_path.iterdir() if path.name.startswith("kvbus")] == []
