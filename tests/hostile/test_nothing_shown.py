"""Tests that kvbus shows no prompt content in logs or over HTTP, whether it accepts or refuses the input."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

from kvbus.core.wire.frames import END_SEQ
from tests.doubles.bus import eventually
from tests.doubles.kvbus_process import Place, engine_at, router_at, run_async
from tests.doubles.payloads import pack, payload, store, unpack
from tests.hostile.bad import BATCHES, FIELDS, FRAMES, with_field

MARK = 0xF0F00000
SECRET = "XYZZY"
TOKENS = re.compile(rf"{MARK // 10**5}\d{{5}}|{SECRET}|f0f0[0-9a-f]{{4}}|f0\\xf0", re.IGNORECASE)
"""Pattern of a marked token in decimal, in hexadecimal or as bytes, and of the mark of all other prompt content."""

TOKEN_FIELDS: tuple[Any, ...] = (
    [MARK + 1] * 15,
    [MARK + 1, SECRET],
    [MARK + 1, -MARK],
    [[MARK + 1]],
    [[MARK + 1, MARK + 2, MARK + 3]],
    {SECRET: MARK + 1},
    SECRET,
    MARK + 1,
    SECRET.encode(),
    float(MARK),
)
CONTENT = ("extra_keys", "session_id", "cache_salt", "lookahead_token_ids", "novelty")


def marked(value: Any) -> Any:
    if isinstance(value, list):
        return [marked(each) for each in value]
    return MARK + value % 2**16 if isinstance(value, int) and value >= 0 else value


def with_marks(bad: bytes) -> bytes:
    """Return a payload whose tokens are replaced by tokens that the test can find again in kvbus's output.

    If the payload cannot be decoded, return it unchanged.
    """
    try:
        batch = unpack(bad)
        for event in batch[1]:
            if isinstance(event, dict) and isinstance(event.get("token_ids"), list):
                event["token_ids"] = marked(event["token_ids"])
        return pack(batch)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return bad


def every_bad_batch() -> list[bytes]:
    good = store([901], tokens=[MARK + n for n in range(16)])
    found = [with_marks(bad.payload) for bad in BATCHES]
    found += [
        payload(good, with_field("token_ids", value, form), good) for value in TOKEN_FIELDS for form in ("map", "array")
    ]
    wrong: list[Any] = [SECRET, [SECRET], [[SECRET]], {SECRET: 1}, TOKEN_FIELDS[0]]
    found += [payload({**good, name: value}) for name in CONTENT for value in wrong]
    elsewhere: list[Any] = [None, 1.5, [], {}]
    found += [payload({**good, field: value}) for field in FIELDS for value in elsewhere]
    found += [payload(good)[:-3], payload(good) + b"\0", payload(good, rank="x")]
    return found


def streamed(place: Place) -> str:
    """Read the `/events` stream up to its first event with rates, which kvbus sends once a second, and return the text."""
    found = ""
    with urllib.request.urlopen(f"http://{place.http}/events", timeout=60) as answer:
        while "event: rates" not in found:
            found += answer.readline().decode()
    return found


def test_the_search_pattern_finds_marked_tokens():
    for text in (str(MARK + 1), hex(MARK + 2**16 - 1), repr(pack(MARK)), f"a {SECRET}"):
        assert TOKENS.search(text), text
    assert sum(TOKENS.search(repr(batch)) is not None for batch in every_bad_batch()) > 100


def test_logs_and_http_show_no_token(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(tmp_path, log_level="debug", state_dir=str(tmp_path / "state"))
        with place.kvbus() as command:
            await place.ready(command)
            async with engine_at(place) as engine:
                with router_at(place):
                    await place.subscribed()
                    for batch in every_bad_batch():
                        engine.publish(batch)
                    for _, frames, _ in FRAMES:
                        if 0 < len(frames) <= 64:
                            engine.send_frames(*frames[:-1], frames[-1] + SECRET.encode())
                    engine.send_frames(SECRET.encode(), END_SEQ, every_bad_batch()[0])
                    engine.replay_fault = lambda answer: [[*frames[:-1], every_bad_batch()[-1]] for frames in answer]
                    engine.skip()
                    engine.publish(payload(store([7], tokens=[MARK + n for n in range(16)])))
                    last = engine.next_seq - 1
                    await eventually(lambda: place.sources()[0]["last_seq"] == last, "all of it taken in")
                    (source,) = place.sources()
                    assert {"token_range", "wrong_type", "not_msgpack", "token_count"} <= set(source["examples"])
                    engine.replay_fault = list
                    engine.restart()
                    engine.publish(payload(store([8], tokens=[MARK + n for n in range(16)])))
                    await eventually(lambda: place.sources()[0]["epoch"] == 1, "the restart")
                    await eventually(lambda: str(MARK) in place.get("/blocks")[1], "where content is asked for, it is")
                    await eventually(lambda: "engine restarted" in place.get("/overview")[1], "the timeline")
                    shown = {"/events": streamed(place)}
                    for path in ("/sources", "/overview", "/history?source=engine", "/metrics", "/routers", "/"):
                        status, shown[path] = place.get(path)
                        assert status == 200, path
            command.process.terminate()
            assert await command.ends() == 0
            shown |= {"log": command.said, "stdout": command.printed}
            assert {where for where, text in shown.items() if TOKENS.search(text)} == set()

    run_async(main())
