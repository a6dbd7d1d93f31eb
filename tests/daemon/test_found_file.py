"""What was found, kept over a restart: whose it is, when it is damaged, and when it cannot be written."""

from __future__ import annotations

import pytest

from kvbus.daemon.disk import Disk
from kvbus.daemon.found_file import FoundFile
from kvbus.discovery.contract import Engine, Publisher
from tests.daemon.test_found import config

ENGINES = {"workers": [Engine("pod", (Publisher(0, "tcp://a:1", "tcp://a:2"), Publisher(1, "tcp://a:3")), "here", "t")]}


def test_what_is_kept_is_read_again(tmp_path):
    FoundFile(tmp_path, config("workers"), Disk()).keep(ENGINES)
    assert FoundFile(tmp_path, config("workers"), Disk()).read() == ENGINES


def test_nothing_is_kept_where_nothing_is_found(tmp_path):
    for file in (FoundFile(None, config("workers"), Disk()), FoundFile(tmp_path, config(fixed=("a",)), Disk())):
        file.keep(ENGINES)
        assert file.read() == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [lambda content: content[:-3], lambda content: content.replace(b"e", b"\xad")])
def test_a_damaged_file_is_none(tmp_path, caplog, damage):
    FoundFile(tmp_path, config("workers"), Disk()).keep(ENGINES)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert FoundFile(tmp_path, config("workers"), Disk()).read() == {}
    assert "is damaged" in caplog.text


def test_it_is_written_when_something_has_changed(tmp_path):
    file = FoundFile(tmp_path, config("workers"), Disk())
    file.keep(ENGINES)
    (path,) = tmp_path.iterdir()
    before = path.stat().st_ino
    file.keep({**ENGINES})
    assert path.stat().st_ino == before
    file.keep({})
    assert FoundFile(tmp_path, config("workers"), Disk()).read() == {}


def test_a_file_that_cannot_be_written_is_said(tmp_path, caplog):
    FoundFile(tmp_path / "missing", config("workers"), Disk()).keep(ENGINES)
    assert "cannot be written" in caplog.text
