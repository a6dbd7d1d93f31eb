"""The files of a state directory: found by their names, and read in the order in which one names the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus.common.errors import StateKeyError
from kvbus.core.write_ahead_log import StateError
from kvbus.daemon.commit_record import NO_LOG, Committed
from kvbus.daemon.disk import Disk
from kvbus.daemon.generations import SPARE, Generations, name_of
from kvbus.daemon.state_file import MAGIC, header, identity
from kvbus.daemon.state_keys import NO_KEYS, StateKeys

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


NEW, OLD = b"n" * 32, b"o" * 32
SEALING = StateKeys(NEW, (NEW, OLD), clear=True)


def sealed(path: Path, name: str, keys: StateKeys, file_id: bytes = b"number 1") -> None:
    (path / "state" / name).write_bytes(header(Disk(), keys, OURS, file_id, NO_LOG, 0)[0])


def under(keys: StateKeys, tmp_path: Path) -> Generations:
    generations = Generations(Disk(), tmp_path / "state", OURS, keys)
    generations.enter()
    return generations


def test_a_file_opens_with_its_key_alone(files: Generations, tmp_path: Path) -> None:
    sealed(tmp_path, "state-1.log", SEALING)
    sealed(tmp_path, "state-2.dump", NO_KEYS)
    again = under(StateKeys(OLD, (OLD, NEW), clear=False), tmp_path)
    again.open("state-1.log").close()
    with pytest.raises(StateKeyError, match=r"state-2\.dump is not sealed"):
        again.open("state-2.dump")
    with pytest.raises(StateKeyError, match=r"state-1\.log is sealed"):
        files.open("state-1.log")
    again.leave()


def test_a_key_that_is_missing_is_found_beside_what_is_damaged(files: Generations, tmp_path: Path) -> None:
    (tmp_path / "state" / "state-1.dump").write_bytes(b"")
    put(tmp_path, "state-1.log", b"number 1")
    files.check_keys()
    sealed(tmp_path, "state-2.log", SEALING)
    with pytest.raises(StateKeyError, match=r"state-2\.log is sealed"):
        files.check_keys()


@pytest.mark.parametrize(
    ("keys", "before", "kept"),
    [
        (NO_KEYS, NO_KEYS, True),
        (SEALING, SEALING, True),
        (SEALING, StateKeys(OLD, (OLD,)), False),
        (SEALING, NO_KEYS, False),
        (StateKeys(None, (NEW,)), SEALING, False),
        (StateKeys(None, (NEW,)), NO_KEYS, True),
    ],
)
def test_a_log_is_kept_to_be_written_over_if_it_is_sealed_as_the_next_one(
    files: Generations, tmp_path: Path, keys: StateKeys, before: StateKeys, *, kept: bool
) -> None:
    """What the next one does not reach would stay as it is."""
    sealed(tmp_path, "state-1.log", before)
    (tmp_path / "state" / "state-1.dump").touch()
    now = under(keys, tmp_path)
    now.drop(lambda generation: generation < 2)
    assert files.numbers("log") == files.numbers("dump") == []
    assert (tmp_path / "state" / SPARE).exists() == kept
    sealed(tmp_path, SPARE, before)
    now.drop_foreign()
    assert (tmp_path / "state" / SPARE).exists() == kept
    now.leave()


def test_what_was_moved_aside_in_clear_goes_when_files_are_sealed(files: Generations, tmp_path: Path) -> None:
    sealed(tmp_path, "state-1.log.refused-1", NO_KEYS)
    sealed(tmp_path, "state-2.log.refused-1", SEALING)
    (tmp_path / "state" / "state-3.log.refused-1").symlink_to(tmp_path)
    files.drop_foreign()
    names = set(Disk().names(files.directory))
    assert len(names) == 3
    now = under(SEALING, tmp_path)
    now.drop_foreign()
    assert set(Disk().names(files.directory)) == names - {"state-1.log.refused-1"}
    now.leave()


def test_a_log_of_another_configuration_is_not_written_over_under_a_key(files: Generations, tmp_path: Path) -> None:
    put(tmp_path, "state-1.log", b"number 1", whose=identity(["another"]))
    now = under(SEALING, tmp_path)
    now.drop(lambda _: True)
    assert Disk().names(files.directory) == []
    now.leave()
