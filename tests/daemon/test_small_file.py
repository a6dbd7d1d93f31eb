"""A file is replaced whole, or is as it was."""

from __future__ import annotations

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
