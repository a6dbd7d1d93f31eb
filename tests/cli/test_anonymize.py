"""Tests for ``kvbus anonymize`` and ``kvbus record --anonymize``.

The output file contains nothing confidential. It is either complete or absent.
"""

import asyncio
import contextlib
import gzip
import re
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.tools.capture.anonymize import Pseudonyms
from kvbus.tools.capture.format import CaptureWriter, Message, read_capture
from tests.doubles.bus import eventually, running_bus
from tests.doubles.payloads import pack
from tests.doubles.renaming import run, same_but_for_names
from tests.doubles.socket_routers import RouterOnASet
from tests.ports import free_port
from tests.wire.captures import DATA, load, truth

NAME = "vllm033_map_extras"
CAPTURE = str(DATA / f"{NAME}.jsonl")


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def invoke(*args, **more):
    return CliRunner().invoke(main, ["anonymize", *map(str, args)], **more)


@pytest.fixture(autouse=True)
def _handlers():
    """Restore the signal handlers after each test.

    The command runs in the process of the tests. Its handlers of SIGTERM and SIGHUP would end this process.
    """
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_anonymize_changes_only_the_names_in_a_capture(name, tmp_path):
    out = tmp_path / name
    done = invoke(CAPTURE, "-o", out)
    assert (done.exit_code, done.stdout) == (0, "")
    assert re.fullmatch(
        rf"kvbus: wrote {len(load(NAME))} messages to .*{name}; kvbus anonymize --help .*\n", done.stderr
    )
    assert names(tmp_path) == [name]
    assert (out.read_bytes()[:2] == b"\x1f\x8b") is name.endswith(".gz")
    same_but_for_names(run(load(NAME)), run(list(read_capture(out))))
    assert b"adapter" not in b"".join(message.payload for message in read_capture(out))


def test_anonymize_writes_beside_the_capture_and_overwrites_no_file(tmp_path):
    with CaptureWriter(tmp_path / "stream.jsonl.gz") as writer:
        writer.write(Message(0.0, b"", 0, pack([1.0, [], 0])))
    assert invoke(tmp_path / "stream.jsonl.gz").exit_code == 0
    written = tmp_path / "stream.anonymized.jsonl.gz"
    before = written.read_bytes()
    again = invoke(tmp_path / "stream.jsonl.gz")
    assert (again.exit_code, "exists already; name another file with -o" in again.stderr) == (78, True)
    over = invoke(tmp_path / "stream.jsonl.gz", "-o", tmp_path / "stream.jsonl.gz")
    assert (over.exit_code, written.read_bytes()) == (78, before)


def test_anonymize_reads_standard_input_and_writes_standard_output(tmp_path):
    with Path(CAPTURE).open("rb") as capture:
        done = subprocess.run(
            [sys.executable, "-m", "kvbus", "anonymize", "-"],
            stdin=capture,
            capture_output=True,
            check=True,
            timeout=60,
        )
    out = tmp_path / "out.jsonl"
    out.write_bytes(done.stdout)
    same_but_for_names(run(load(NAME)), run(list(read_capture(out))))


def test_anonymize_makes_a_new_key_each_time_unless_a_key_file_is_given(tmp_path):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    made = {}
    for name, options in {"a": (), "b": (), "c": ("--key-file", key), "d": ("--key-file", key)}.items():
        assert invoke(CAPTURE, "-o", tmp_path / name, *options).exit_code == 0
        made[name] = (tmp_path / name).read_bytes()
    assert made["c"] == made["d"]
    assert len(set(made.values())) == 3
    assert bytes(range(32)) not in b"".join(made.values())


@pytest.mark.parametrize(
    ("content", "mode", "wrong"),
    [
        (None, 0, "No such file"),
        (b"k" * 31, 0o600, "31 bytes are too few for a key, 32 are needed: head -c 32 /dev/urandom > "),
        (b"k" * 32, 0o604, r"other users can read it \(mode 0604\): run chmod o="),
    ],
)
def test_anonymize_refuses_a_bad_key_file_and_writes_nothing(content, mode, wrong, tmp_path):
    key = tmp_path / "key"
    if content is not None:
        key.write_bytes(content)
        key.chmod(mode)
    done = invoke(CAPTURE, "-o", tmp_path / "out", "--key-file", key)
    assert done.exit_code == 78
    assert re.search(wrong, done.stderr)
    assert not (tmp_path / "out").exists()
    alone = CliRunner().invoke(main, ["record", "tcp://127.0.0.1:1", str(tmp_path / "out"), "--key-file", str(key)])
    assert (alone.exit_code, "--key-file is for --anonymize" in alone.stderr) == (2, True)


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (b'{"t":0,"topic":"","seq":0,"payload":"kA=="}\n{"t":0,"secret', r"in\.jsonl:2: not a recorded message"),
        (None, r"in\.jsonl:1: No such file"),
    ],
)
def test_anonymize_refuses_a_bad_capture_and_leaves_no_file(lines, wrong, tmp_path):
    if lines is not None:
        (tmp_path / "in.jsonl").write_bytes(lines)
    done = invoke(tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl")
    assert done.exit_code == 78
    assert re.search(wrong, str(done.stderr))
    assert names(tmp_path) == (["in.jsonl"] if lines is not None else [])


def test_anonymize_names_an_output_file_that_it_cannot_write(tmp_path):
    done = invoke(CAPTURE, "-o", tmp_path / "nowhere" / "out.jsonl")
    assert (done.exit_code, "out.jsonl: No such file" in done.stderr) == (78, True)


def test_anonymize_counts_payloads_that_are_not_msgpack(tmp_path):
    with CaptureWriter(tmp_path / "in.jsonl") as writer:
        for seq, payload in enumerate((b"\xc1", pack([1.0, [], 0]))):
            writer.write(Message(0.0, b"", seq, payload))
    assert "wrote 2 messages" in (said := invoke(tmp_path / "in.jsonl").stderr)
    assert ", 1 of them not msgpack;" in said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupted_anonymize_leaves_no_file(number, code, tmp_path):
    """A signal that arrives while the command works ends it without an output file.

    The command's input is a pipe that stays open, so the command cannot finish before the signal.
    """
    out = tmp_path / "out.jsonl"
    with subprocess.Popen(
        [sys.executable, "-m", "kvbus", "anonymize", "-", "-o", out], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b'{"t":0,"topic":"","seq":0,"payload":"kA=="}\n')
        process.stdin.flush()
        done = threading.Event()
        while not [name for name in names(tmp_path) if ".partial" in name]:
            assert process.poll() is None
            done.wait(0.01)
        process.send_signal(number)
        process.wait(60)
    assert process.returncode == code
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["vllm033_restart", "vllm033_map_bytes", "sglang0523_eagle_bigram"])
async def test_kvbus_and_a_router_hold_the_blocks_of_an_anonymized_capture(name, tmp_path):
    """With an anonymized capture, kvbus and a router hold the engine's blocks under their pseudonyms.

    `kvbus play` publishes the capture. A fifth of the live batches is lost, and the bus gets them by a replay.
    """
    key, out = tmp_path / "key", tmp_path / "out.jsonl"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    assert invoke(DATA / f"{name}.jsonl", "-o", out, "--key-file", key).exit_code == 0
    async with running_bus() as bus:
        play = ["play", str(out), "--endpoint", bus.engine, "--bind", "--replay-endpoint", bus.engine_replay]
        faults = ["--rate", "4000", "--subscribers", "1", "--drop", "0.2"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvbus", *play, *faults, stderr=asyncio.subprocess.DEVNULL
        )
        with contextlib.closing(RouterOnASet(bus.out, bus.out_replay)) as router:
            try:
                last = load(name)[-1].seq
                restarts = sum(two.seq < one.seq for one, two in pairwise(load(name)))
                await eventually(
                    lambda: bus.source.stats.restarts == restarts and bus.caught_up(last), "every batch relayed"
                )
                await router.replay()
            finally:
                process.terminate()
                await process.wait()
            held = set(router.view.blocks)
    names = Pseudonyms(b"k" * 32)
    renamed: dict[type, Any] = {int: names.number, bytes: names.octets}
    assert held == {(group, medium, renamed[type(block)](block)) for group, medium, block in truth(name)}
    assert not held & truth(name)


def test_record_with_anonymize_changes_only_the_names_in_the_capture(tmp_path):
    """`kvbus record --anonymize` records a capture that a test plays as an engine.

    The recorded file differs from the played capture only in its names.
    """
    port = free_port()
    out = tmp_path / "out.jsonl.gz"
    endpoint = f"tcp://127.0.0.1:{port}"
    messages = load(NAME)
    count = str(len(messages))
    record = [sys.executable, "-m", "kvbus", "record", endpoint, str(out), "--anonymize", "--count", count]
    play = [sys.executable, "-m", "kvbus", "play", CAPTURE, "--endpoint", endpoint, "--bind", "--rate", "5000"]
    with subprocess.Popen(record, stderr=subprocess.PIPE) as recorder:
        subprocess.run(
            [*play, "--subscribers", "1", "--exit-after", "0.2"], check=True, timeout=60, capture_output=True
        )
        assert recorder.wait(60) == 0
    recorded = list(read_capture(out))
    assert b"adapter" not in b"".join(message.payload for message in recorded)
    same_but_for_names(run(messages), run(recorded))
    with gzip.open(out, "rb") as opened:
        assert len(opened.read().splitlines()) == len(messages)
