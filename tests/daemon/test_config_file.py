"""Tests that kvbus notices a changed configuration file.

The file is linked as Kubernetes links it, rewritten in place, or deleted.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kvbus.config.yamlfile import MAX_BYTES
from kvbus.daemon.serve import ConfigFile
from tests.doubles.config_map import Volume


async def test_a_swapped_link_is_a_change_only_with_another_content(tmp_path: Path) -> None:
    volume = Volume(tmp_path, "a: 1")
    file = ConfigFile(volume.file)
    assert await file.settled(0) == file.loaded
    volume.swap("a: 2")
    assert await file.settled(0) not in (None, file.loaded)
    volume.swap("a: 1")
    assert await file.settled(0) == file.loaded


async def test_a_change_with_the_same_size_and_times_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "kvbus.yaml"
    path.write_text("a: 1")
    at = path.stat().st_mtime_ns
    file = ConfigFile(path)
    path.write_text("a: 2")
    os.utime(path, ns=(at, at))
    assert await file.settled(0) not in (None, file.loaded)


async def test_a_file_that_is_being_written_is_not_settled(tmp_path: Path) -> None:
    path = tmp_path / "kvbus.yaml"
    path.write_text("a: 1")
    file = ConfigFile(path)
    path.write_text("a:")
    looking = asyncio.create_task(file.settled(0.2))
    while not looking.done():
        with path.open("a") as more:
            more.write("#")
        await asyncio.sleep(0.001)
    assert await looking is None


@pytest.mark.parametrize("spoil", ["gone", "link to nothing", "directory"])
async def test_a_file_that_becomes_unreadable_is_a_change(tmp_path: Path, spoil: str) -> None:
    path = tmp_path / "kvbus.yaml"
    path.write_text("a: 1")
    file = ConfigFile(path)
    path.unlink()
    if spoil == "link to nothing":
        path.symlink_to("nothing")
    elif spoil == "directory":
        path.mkdir()
    assert file.loaded
    assert await file.settled(0) == b""


def test_a_configuration_file_is_read_only_up_to_its_maximum_size(tmp_path: Path) -> None:
    path = tmp_path / "kvbus.yaml"
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    largest = ConfigFile(path).loaded
    with path.open("ab") as file:
        file.write(b"more")
    assert ConfigFile(path).loaded == largest
