"""A file is replaced whole, or is as it was."""

from __future__ import annotations

from collections import Counter

import pytest

from kvbus.daemon import small_file
from kvbus.daemon.disk import Disk


def test_it_holds_what_it_was_given_last(tmp_path):
    for content in (b"a", b"", b"longer"):
        small_file.replace(Disk(), tmp_path, "name", content)
        assert small_file.read(Disk(), tmp_path, "name") == content
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


def test_one_that_is_not_there_is_none(tmp_path):
    assert small_file.read(Disk(), tmp_path, "name") is None
    assert small_file.read(Disk(), tmp_path / "missing", "name") is None


def test_one_that_cannot_be_written_leaves_the_one_before(tmp_path):
    class Full(Disk):
        def pwrite(self, fd, data, at):
            raise OSError(28, "No space left on device")

    small_file.replace(Disk(), tmp_path, "name", b"before")
    with pytest.raises(OSError, match="No space"):
        small_file.replace(Full(), tmp_path, "name", b"after")
    assert small_file.read(Disk(), tmp_path, "name") == b"before"


def test_one_that_cannot_be_written_is_tried_again_more_and_more_rarely_and_with_the_newest_content(tmp_path, caplog):
    caplog.set_level("INFO")
    failures: Counter[str] = Counter()
    kept = small_file.KeptFile(Disk(), tmp_path / "later", "name.kind", "it costs", failures)
    kept.keep(b"old", 0.0)
    tries = []
    for now in range(200):
        before = failures.total()
        kept.look(now)
        tries += [now] * (failures.total() - before)
    assert tries == [1, 3, 7, 15, 31, 63, 123, 183]
    kept.keep(b"new", 200.0)
    (tmp_path / "later").mkdir()
    kept.look(259.0)
    assert small_file.read(Disk(), tmp_path / "later", "name.kind") is None
    kept.look(260.0)
    assert small_file.read(Disk(), tmp_path / "later", "name.kind") == b"new"
    assert (failures, caplog.text.count("it costs"), caplog.text.count("is written")) == ({"kind": 10}, 1, 1)
    (tmp_path / "later" / "name.kind").unlink()
    kept.look(10_000.0)
    assert small_file.read(Disk(), tmp_path / "later", "name.kind") is None, "nothing is left to be done"
