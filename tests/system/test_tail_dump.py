"""Tests for ``kvbus tail`` and ``kvbus dump`` as a user runs them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from kvbus.cli.tail import Printer, to_json
from kvbus.client import Conflict, Reachable, Unreachable
from kvbus.core.wire.encoding import encode_batch
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved, BlockStored
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles import replay_faults

DATA = Path(__file__).parents[1] / "wire" / "data"
ESC = "\x1b"


def stored(*hashes, parent=None):
    tokens = msgspec.msgpack.encode(list(range(2 * len(hashes))))
    return BlockStored(tuple(hashes), parent, msgspec.Raw(tokens), 2, None, "GPU")


def batch(*events):
    return encode_batch(events, 12.5, 0)


def engine(**options):
    return EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True, **options)


def command(*args, env=None, stdout=subprocess.PIPE):
    return subprocess.Popen(
        [sys.executable, "-m", "kvbus", *args],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )


def ended(process, code=0):
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    return out, err


def run(*args, code=0, **options):
    return ended(command(*args, **options), code)


@pytest.fixture
def publisher():
    opened = engine()
    opened.start()
    yield opened
    opened.close()


def subscription(publisher, count=1):
    asyncio.run(publisher.wait_for_subscriber(60, count=count))


# -- tail


def test_tail_prints_updates_as_json(publisher):
    seen = threading.Event()

    def once_the_gap_is_seen(messages):
        # tail requests a replay once it is connected, which may be after batch 0. The answer would then fill the gap before
        # tail has shown it, so it has to wait.
        assert seen.wait(60)
        return messages

    tail = command("tail", publisher.endpoint, "--replay-endpoint", publisher.replay_endpoint, "--json", "--count", "3")
    subscription(publisher)
    publisher.replay_fault = once_the_gap_is_seen
    publisher.publish(batch(stored(1, 2)))
    publisher.publish(batch(BlockRemoved((1,), "GPU")), live=False)
    publisher.publish(batch(AllBlocksCleared()))
    lines = [json.loads(tail.stdout.readline()) for _ in range(2)]
    seen.set()
    out, err = ended(tail)
    lines += [json.loads(line) for line in out.splitlines()]
    assert [line["kind"] for line in lines] == ["batch", "gap", "batch", "batch"]
    (event,) = lines[0].pop("events")
    assert lines[0] == {"kind": "batch", "seq": 0, "topic": "", "replayed": False, "ts": 12.5, "rank": 0}
    assert event == {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [0, 1, 2, 3],
        "block_size": 2,
        "medium": "GPU",
    }
    assert lines[1] == {"kind": "gap", "first": 1, "last": 1}
    assert [line["seq"] for line in lines[2:]] == [1, 2]
    assert "3 batches, 3 events" in err


def test_tail_reports_that_the_publisher_is_unreachable(publisher):
    tail = command("tail", publisher.endpoint, "--json")
    subscription(publisher)
    publisher.publish(batch())
    assert json.loads(tail.stdout.readline())["kind"] == "batch"
    publisher.close()
    assert json.loads(tail.stdout.readline()) == {
        "kind": "unreachable",
        "endpoint": publisher.endpoint,
        "why": f"nothing listens at {publisher.endpoint} (connection refused)",
    }
    tail.send_signal(signal.SIGINT)
    ended(tail)


@pytest.mark.parametrize(
    ("update", "line", "plain"),
    [
        (Conflict(), "! several publishers send on this endpoint", {"kind": "conflict"}),
        (Unreachable("tcp://a:1", "because"), "! no connection: because", {"kind": "unreachable", "why": "because"}),
        (Reachable("tcp://a:1"), "= connected to tcp://a:1", {"kind": "reachable", "endpoint": "tcp://a:1"}),
    ],
)
def test_tail_prints_changes_of_the_connection(update, line, plain):
    out = io.StringIO()
    Printer(out, as_json=False).show(update)
    assert line in out.getvalue()
    assert to_json(update).items() >= plain.items()


def test_tail_from_start_prints_readable_lines(publisher):
    publisher.publish(batch(stored(255), BlockRemoved((255,), "GPU")))
    publisher.publish(batch())
    publisher.publish(b"\xc1")
    tail = command("tail", publisher.endpoint, "--replay-endpoint", publisher.replay_endpoint, "--from-start")
    lines = [tail.stdout.readline() for _ in range(5)]
    tail.send_signal(signal.SIGINT)
    _, err = ended(tail)
    assert "+ stored  1 [255]" in lines[0]
    assert "- removed 1 [255]" in lines[1]
    assert "empty batch" in lines[2]
    assert "unreadable: not_msgpack" in lines[3]
    assert "synced up to seq 2" in lines[4]
    assert ESC not in "".join(lines)
    assert "2 batches, 2 events" in err


def test_tail_escapes_control_characters_of_a_topic():
    with_escape = engine(topic=b"kv\x1b[31m")
    with_escape.start()
    try:
        tail = command("tail", with_escape.endpoint, "--count", "1")
        subscription(with_escape)
        with_escape.publish(batch(stored(1)))
        out, _ = ended(tail)
    finally:
        with_escape.close()
    assert r"kv\x1b[31m" in out
    assert ESC not in out


def test_tail_without_a_replay_reports_a_gap_as_lost(publisher):
    tail = command("tail", publisher.endpoint, "--count", "2")
    subscription(publisher)
    publisher.publish(batch(stored(1)))
    publisher.skip()
    publisher.publish(batch(stored(2)))
    out, err = ended(tail)
    assert "~ gap 1" in out
    assert "! lost 1 (no_replay)" in out
    assert "2 batches, 2 events, 1 lost" in err


@pytest.mark.parametrize(
    ("env", "coloured"), [({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_tail_prints_colours_only_to_a_terminal_that_accepts_them(publisher, env, coloured):
    reader, writer = os.openpty()
    try:
        base = {"TERM": "xterm", "NO_COLOR": ""}
        tail = command("tail", publisher.endpoint, "--count", "1", env={**base, **env}, stdout=writer)
        subscription(publisher)
        publisher.publish(batch(stored(1)))
        ended(tail)
        assert (ESC in os.read(reader, 4096).decode()) == coloured
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_tail_immediately_with_a_summary(publisher, number):
    tail = command("tail", publisher.endpoint)
    subscription(publisher)
    publisher.publish(batch(stored(1)))
    assert "stored" in tail.stdout.readline()
    tail.send_signal(number)
    _, err = ended(tail)
    assert "1 batches, 1 events" in err
    assert "Traceback" not in err


def test_tail_ends_quietly_if_its_pipe_is_closed(publisher):
    tail = command("tail", publisher.endpoint)
    subscription(publisher)
    tail.stdout.close()
    with tail:
        while tail.poll() is None:  # the pipe's buffer may accept the first write
            publisher.publish(batch(stored(1)))
            try:
                tail.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        assert tail.returncode == 0
        assert tail.stderr.read() == ""


def test_tail_from_start_needs_a_replay_endpoint():
    _, err = run("tail", "tcp://127.0.0.1:1", "--from-start", code=2)
    assert "--replay-endpoint" in err


@contextmanager
def snapshots(seq, *chunks):
    """Yield the endpoint of a ROUTER socket that answers one snapshot request, in a separate thread."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.rcvtimeo = 60_000
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def answer():
            client, request = router.recv_multipart()
            assert request == b"snapshot"
            router.send_multipart([client, seq.to_bytes(8, "big", signed=True), bytes(16), *chunks])

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{port}"
        finally:
            thread.join()


@pytest.mark.parametrize("as_json", [True, False])
def test_tail_begins_with_a_snapshot(publisher, as_json):
    with snapshots(6, batch(stored(1, 2)), batch(stored(3))) as endpoint:
        tail = command(
            "tail", publisher.endpoint, "--snapshot-endpoint", endpoint, "--from-start", *["--json"] * as_json
        )
        lines = [tail.stdout.readline() for _ in range(2 if as_json else 4)]
        tail.send_signal(signal.SIGINT)
        _, err = ended(tail)
    assert "0 batches, 2 events" in err
    if as_json:
        taken, in_step = map(json.loads, lines)
        assert (taken["kind"], taken["seq"]) == ("snapshot", 6)
        assert [event["block_hashes"] for one in taken["batches"] for event in one["events"]] == [[1, 2], [3]]
        assert in_step == {"kind": "synced", "seq": 6}
    else:
        assert "= snapshot at seq 6" in lines[0]
        assert "6 s + stored  2 [1 2]" in lines[1]
        assert "6 s + stored  1 [3]" in lines[2]
        assert "synced up to seq 6" in lines[3]


def test_tail_can_bind_its_endpoint():
    tail = command("tail", "tcp://127.0.0.1:*", "--bind", "--count", "1")
    endpoint = tail.stderr.readline().split()[-1]
    dialling = EnginePublisher(endpoint, None, bind=False)
    dialling.start()
    try:
        subscription(dialling)
        dialling.publish(batch(stored(1)))
        out, _ = ended(tail)
    finally:
        dialling.close()
    assert "stored" in out


# -- dump


def test_tail_prints_hashes_as_texts_on_request(publisher):
    large = 6280583736533942967
    tail = command("tail", publisher.endpoint, "--json", "--hashes", "string", "--count", "1")
    subscription(publisher)
    publisher.publish(batch(stored(large, b"\xab", parent=-7)))
    ((event,),) = [json.loads(line)["events"] for line in ended(tail)[0].splitlines()]
    assert (event["block_hashes"], event["parent_block_hash"]) == ([str(large), "ab"], "-7")
    lines = [
        json.loads(line)
        for line in run("dump", "--replay-endpoint", publisher.replay_endpoint, "--hashes", "string", "--json")[
            0
        ].splitlines()
    ]
    assert [(line["hash"], line["parent"]) for line in lines] == [(str(large), "-7"), ("ab", str(large))]


def test_dump_prints_every_live_block(publisher):
    publisher.publish(batch(stored(1, b"\xab\xcd", parent=7)))
    publisher.publish(batch(stored(3), BlockRemoved((1,), "GPU")))
    out, err = run("dump", "--replay-endpoint", publisher.replay_endpoint, "--json")
    assert [json.loads(line) for line in out.splitlines()] == [
        {
            "rank": 0,
            "hash": "abcd",
            "parent": 1,
            "medium": "GPU",
            "group_idx": None,
            "block_size": 2,
            "token_ids": [2, 3],
            "copies": 1,
        },
        {
            "rank": 0,
            "hash": 3,
            "parent": None,
            "medium": "GPU",
            "group_idx": None,
            "block_size": 2,
            "token_ids": [0, 1],
            "copies": 1,
        },
    ]
    assert err == ""


@pytest.mark.parametrize("framing", ["3", "4", "sim"])
@pytest.mark.parametrize("asked", ["auto", "same"])
def test_dump_prints_exactly_the_blocks_of_the_engine(framing, asked):
    truth = json.loads((DATA / "vllm033_map_int.truth.json").read_text())["blocks"]
    replayed = engine(framing=framing)
    replayed.start()
    try:
        for line in (DATA / "vllm033_map_int.jsonl").read_text().splitlines():
            replayed.publish(base64.b64decode(json.loads(line)["payload"]))
        asked = framing if asked == "same" else asked
        out, _ = run("dump", "--replay-endpoint", replayed.replay_endpoint, "--framing", asked, "--copies", "--json")
        count, _ = run("dump", "--replay-endpoint", replayed.replay_endpoint)
    finally:
        replayed.close()
    blocks = {(block["hash"], block["group_idx"]): block for block in map(json.loads, out.splitlines())}
    assert {key: block["copies"] for key, block in blocks.items()} == {
        (block["hash"], block["group_idx"]): block["copies"] for block in truth
    }
    assert all(blocks[block["hash"], block["group_idx"]]["token_ids"] == block["tokens"] for block in truth)
    assert 0 < int(count.split()[0]) <= len(truth)


def test_dump_warns_of_a_trimmed_history():
    trimmed = engine(buffer_steps=1)
    trimmed.start()
    try:
        for block in range(3):
            trimmed.publish(batch(stored(block)))
        out, err = run("dump", "--replay-endpoint", trimmed.replay_endpoint)
    finally:
        trimmed.close()
    assert out == "1 block\n"
    assert "starts at seq 2" in err


def test_dump_of_an_empty_stream_prints_no_blocks(publisher):
    assert run("dump", "--replay-endpoint", publisher.replay_endpoint) == ("0 blocks\n", "")


def test_dump_counts_the_blocks_of_a_snapshot():
    with snapshots(6, batch(stored(1, 2)), batch(stored(3))) as endpoint:
        assert run("dump", "--snapshot-endpoint", endpoint) == ("3 blocks\n", "")


def test_dump_adds_newer_batches_of_the_replay_to_a_snapshot(publisher):
    for block in range(10, 13):
        publisher.publish(batch(stored(block)))
    with snapshots(1, batch(stored(10, 11))) as endpoint:
        out, err = run(
            "dump", "--replay-endpoint", publisher.replay_endpoint, "--snapshot-endpoint", endpoint, "--json"
        )
    assert [json.loads(line)["hash"] for line in out.splitlines()] == [10, 11, 12]
    assert err == ""


def test_dump_uses_the_replay_if_the_publisher_has_no_snapshot(publisher):
    with snapshots(-2) as endpoint:
        out, err = run("dump", "--snapshot-endpoint", endpoint, code=69)
    assert out == ""
    assert "has no snapshot" in err
    publisher.publish(batch(stored(1)))
    with snapshots(-2) as endpoint:
        assert run("dump", "--replay-endpoint", publisher.replay_endpoint, "--snapshot-endpoint", endpoint) == (
            "1 block\n",
            "",
        )


def test_dump_ends_if_its_snapshot_request_gets_no_answer():
    _, err = run("dump", "--snapshot-endpoint", "tcp://127.0.0.1:1", "--timeout", "0.3", code=69)
    assert "no answer from tcp://127.0.0.1:1 within 0.3 s" in err


def test_dump_needs_a_replay_or_snapshot_endpoint():
    _, err = run("dump", code=2)
    assert "--snapshot-endpoint" in err


def test_dump_ends_if_its_replay_request_gets_no_answer(publisher):
    publisher.replay_fault = replay_faults.silent
    out, err = run("dump", "--replay-endpoint", publisher.replay_endpoint, "--timeout", "0.3", code=69)
    assert out == ""
    assert "within 0.3 s" in err


def test_dump_ignores_an_answer_with_the_wrong_framing(publisher):
    publisher.publish(batch(stored(1)))
    run("dump", "--replay-endpoint", publisher.replay_endpoint, "--framing", "3", "--timeout", "0.3", code=69)


def test_dump_ends_immediately_at_ctrl_c(publisher):
    publisher.replay_fault = replay_faults.silent
    dump = command("dump", "--replay-endpoint", publisher.replay_endpoint, "--timeout", "600")
    while publisher.replay_requests == 0:
        with pytest.raises(subprocess.TimeoutExpired):
            dump.wait(0.02)
    dump.send_signal(signal.SIGINT)
    out, err = ended(dump, 130)
    assert out == ""
    assert "interrupted" in err


@pytest.mark.parametrize("name", ["tail", "dump"])
def test_a_malformed_endpoint_is_a_usage_error_of_tail_and_dump(name):
    way = ["--replay-endpoint"] if name == "dump" else []
    _, err = run(name, *way, "nonsense", code=2)
    assert "nonsense" in err
    assert "tcp://127.0.0.1:" in err
