"""The files of a state directory: found by their names, and read in the order in which one names the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus.core.write_ahead_log import StateError
from kvbus.daemon.commit_record import NO_LOG, Committed
from kvbus.daemon.disk import Disk
from kvbus.daemon.generations import SPARE, Generations, name_of
from kvbus.daemon.state_file import MAGIC, header, identity
from kvbus.daemon.state_keys import NO_KEYS

OURS = identity(["engine", "routers"])


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Generations]:
    generations = Generations(Disk(), tmp_path / "state", OURS, NO_KEYS)
    generations.enter()
    yield generations
    generations.leave()
    generations.leave()


def put(path: Path, name: str, file_id: bytes, before: bytes = NO_LOG, length: int = 0, whose: bytes = OURS) -> None:
    (path / "state" / name).write_bytes(header(Disk(), NO_KEYS, whose, file_id, before, length)[0])


def test_generations_are_told_by_the_names_of_files(files: Generations, tmp_path: Path) -> None:
    assert files.newest() == 0
    for name in ("state-3.dump", "state-12.log", "state-x.log", "state-7.dump.refused-1", "other"):
        (tmp_path / "state" / name).touch()
    assert (files.numbers("dump"), files.numbers("log"), files.newest()) == ([3], [12], 12)


def test_logs_follow_each_other_from_the_one_that_the_checkpoint_names(files: Generations, tmp_path: Path) -> None:
    put(tmp_path, name_of(1, "log"), b"number 1")
    put(tmp_path, name_of(2, "log"), b"number 2", b"number 1", 500)
    put(tmp_path, name_of(3, "log"), b"number 3", b"number 2", 600)
    put(tmp_path, name_of(4, "log"), b"number 4", b"number 3", 9)
    committed = Committed(3, b"number 3", 700)
    assert files.chain(b"number 1", committed) == [("state-1.log", 500), ("state-2.log", 600), ("state-3.log", 700)]
    assert files.chain(b"number 3", committed) == [("state-3.log", 700)]
    (tmp_path / "state" / "state-2.log").unlink()
    with pytest.raises(StateError, match="log is missing"):
        files.chain(b"number 1", committed)


def test_a_file_of_another_configuration_or_version_is_refused(files: Generations, tmp_path: Path) -> None:
    put(tmp_path, "state-1.log", b"number 1", whose=identity(["another"]))
    with pytest.raises(StateError, match="of another configuration"):
        files.open("state-1.log")
    assert files.other_version() is None
    (tmp_path / "state" / "state-2.dump").write_bytes(MAGIC[:-4] + b"001\n" + bytes(60))
    assert "state-2.dump is of version 001" in (files.other_version() or "")


def test_what_cannot_be_used_is_kept_once_for_people(files: Generations, tmp_path: Path) -> None:
    for name in ("state-1.dump", "state-1.log", "state-0.log.refused-19991231T235959", SPARE, "other"):
        (tmp_path / "state" / name).touch()
    assert files.move_aside("for a reason") == 2
    left = sorted(path.name.partition(".refused-")[0] for path in (tmp_path / "state").iterdir())
    assert left == ["other", "state-1.dump", "state-1.log"]
    assert files.newest() == 0


def test_a_log_that_nobody_needs_is_kept_to_be_written_over(files: Generations, tmp_path: Path) -> None:
    for name in ("state-1.dump", "state-1.log", "state-2.part", "state-3.dump", "state-3.log"):
        (tmp_path / "state" / name).write_text(name)
    files.drop(lambda generation: generation < 3)
    left = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert left == [SPARE, "state-3.dump", "state-3.log"]
    assert (tmp_path / "state" / SPARE).read_text() == "state-1.log"
