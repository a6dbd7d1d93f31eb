"""Tests for the format of capture files: reading returns what was written, and an error names the invalid line."""

import gzip
import stat
from pathlib import Path

import pytest

from kvbus.common.errors import ExitCode
from kvbus.tools.capture.format import CaptureError, CaptureWriter, Message, read_capture

MESSAGES = [Message(0.0, b"", 0, b"\x90"), Message(1.5, b"kv@a", 2**64 - 2, b"\x00\xff")]


@pytest.mark.parametrize("name", ["stream.jsonl", "stream.jsonl.gz"])
def test_a_written_capture_is_read_back_unchanged(name, tmp_path):
    path = tmp_path / name
    with CaptureWriter(path) as writer:
        for message in MESSAGES:
            writer.write(message)
        assert writer.written == 2
    assert list(read_capture(path)) == MESSAGES
    assert (path.read_bytes()[:2] == b"\x1f\x8b") is name.endswith(".gz")


def test_a_capture_line_is_in_the_file_when_write_returns(tmp_path):
    path = tmp_path / "stream.jsonl"
    with CaptureWriter(path) as writer:
        writer.write(MESSAGES[0])
        assert path.read_bytes() == b'{"t":0.0,"topic":"","seq":0,"payload":"kA=="}\n'


def test_empty_lines_of_a_capture_are_ignored(tmp_path):
    path = tmp_path / "stream.jsonl"
    path.write_text('\n{"t":0,"topic":"","seq":0,"payload":"kA=="}\n\n')
    assert list(read_capture(path)) == MESSAGES[:1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "stream.jsonl:2: not a recorded message"),
        (b"[]", "stream.jsonl:2: not a recorded message"),
        (b'{"t":0,"topic":"","seq":0}', "stream.jsonl:2: not a recorded message: .*payload"),
        (b'{"t":0,"topic":"","seq":0,"payload":"?"}', "stream.jsonl:2: not a recorded message"),
        (b'{"t":0,"topic":"","seq":-1,"payload":""}', "stream.jsonl:2: seq -1 is not an unsigned"),
        (b"\xff\xfe", "stream.jsonl:2: not a recorded message"),
    ],
)
def test_the_error_names_a_bad_line_of_a_capture(line, message, tmp_path):
    path = tmp_path / "stream.jsonl"
    path.write_bytes(b'{"t":0,"topic":"","seq":0,"payload":"kA=="}\n' + line + b"\n")
    with pytest.raises(CaptureError, match=message) as error:
        list(read_capture(path))
    assert error.value.exit_code is ExitCode.CONFIG


def test_a_truncated_compressed_capture_raises_capture_error(tmp_path):
    path = tmp_path / "stream.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"t":0,"topic":"","seq":0,"payload":"kA=="}\n')[:-6])
    with pytest.raises(CaptureError, match=r"stream\.jsonl\.gz:"):
        list(read_capture(path))


def test_missing_files_and_directories_raise_capture_error(tmp_path):
    with pytest.raises(CaptureError, match=r"nowhere\.jsonl:1: No such file"):
        list(read_capture(tmp_path / "nowhere.jsonl"))
    with pytest.raises(CaptureError, match=r"out\.jsonl: No such file"):
        CaptureWriter(tmp_path / "no" / "out.jsonl")


@pytest.mark.parametrize("name", ["stream.jsonl", "stream.jsonl.gz"])
def test_only_the_owner_can_read_a_capture_file(name, tmp_path):
    with CaptureWriter(tmp_path / name):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_an_existing_file_is_replaced_only_on_request(tmp_path):
    path = tmp_path / "stream.jsonl"
    path.write_text("kept")
    path.chmod(0o644)
    with pytest.raises(CaptureError, match=r"stream\.jsonl: File exists"):
        CaptureWriter(path)
    assert path.read_text() == "kept"
    with CaptureWriter(path, replace=True) as writer:
        writer.write(MESSAGES[0])
    assert list(read_capture(path)) == MESSAGES[:1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_disk_raises_capture_error():
    with CaptureWriter(Path("/dev/full")) as writer, pytest.raises(CaptureError, match="No space left"):
        writer.write(MESSAGES[0])
