"""What was found, kept over a restart: whose it is, when it is damaged, and when it cannot be written."""

from __future__ import annotations

from collections import Counter

import pytest

from kvbus.daemon.disk import Disk
from kvbus.daemon.found_file import FoundFile
from kvbus.parts.discovery.contract import Engine, Publisher
from tests.daemon.test_found import config

ENGINES = {"workers": [Engine("pod", (Publisher(0, "tcp://a:1", "tcp://a:2"), Publisher(1, "tcp://a:3")), "here", "t")]}


def test_what_is_kept_is_read_again(tmp_path):
    FoundFile(tmp_path, config("workers"), Disk(), Counter()).keep(ENGINES, 0.0)
    assert FoundFile(tmp_path, config("workers"), Disk(), Counter()).read() == ENGINES


def test_nothing_is_kept_where_nothing_is_found(tmp_path):
    for file in (
        FoundFile(None, config("workers"), Disk(), Counter()),
        FoundFile(tmp_path, config(fixed=("a",)), Disk(), Counter()),
    ):
        file.keep(ENGINES, 0.0)
        file.look(1.0)
        assert file.read() == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [lambda content: content[:-3], lambda content: content.replace(b"e", b"\xad")])
def test_a_damaged_file_is_none(tmp_path, caplog, damage):
    FoundFile(tmp_path, config("workers"), Disk(), Counter()).keep(ENGINES, 0.0)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert FoundFile(tmp_path, config("workers"), Disk(), Counter()).read() == {}
    assert "is damaged" in caplog.text


def test_it_is_written_when_something_has_changed(tmp_path):
    file = FoundFile(tmp_path, config("workers"), Disk(), Counter())
    file.keep(ENGINES, 0.0)
    (path,) = tmp_path.iterdir()
    before = path.stat().st_ino
    file.keep({**ENGINES}, 0.0)
    assert path.stat().st_ino == before
    file.keep({}, 0.0)
    assert FoundFile(tmp_path, config("workers"), Disk(), Counter()).read() == {}


def test_a_file_that_cannot_be_written_is_said(tmp_path, caplog):
    FoundFile(tmp_path / "missing", config("workers"), Disk(), Counter()).keep(ENGINES, 0.0)
    assert "cannot be written" in caplog.text
    assert "a restart finds engines anew" in caplog.text


def test_one_that_could_not_be_written_is_tried_again(tmp_path):
    failures: Counter[str] = Counter()
    file = FoundFile(tmp_path / "later", config("workers"), Disk(), failures)
    file.keep(ENGINES, 0.0)
    (tmp_path / "later").mkdir()
    file.look(1.0)
    assert FoundFile(tmp_path / "later", config("workers"), Disk(), Counter()).read() == ENGINES
    assert failures == {"found": 1}
