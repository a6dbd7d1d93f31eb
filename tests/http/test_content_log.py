"""Tests for the log lines about clients that read token ids over HTTP.

They contain the total numbers of requests, blocks and bytes, and leave out no read.
"""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from kvbus.http import content_log
from kvbus.http.content_log import ContentLog


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[logging.LogRecord]:
    caplog.set_level(logging.INFO, "kvbus.http.content")
    found: list[logging.LogRecord] = []
    monkeypatch.setattr(content_log.log, "handle", found.append)
    return found


def amounts(lines: list[logging.LogRecord]) -> Counter[str]:
    total: Counter[str] = Counter()
    for line in lines:
        total.update({name: vars(line)[name] for name in ("answers", "blocks", "bytes")})
    return total


def test_the_content_log_sums_answers_and_writes_them_periodically(lines: list[logging.LogRecord]) -> None:
    log = ContentLog()
    log.look(100.0)
    for n in range(3):
        reading = log.begin("router-a", "/blocks")
        reading.add(n, 10)
        log.end(reading)
    log.look(101.0)
    assert not lines
    log.look(110.0)
    log.look(120.0)
    (line,) = lines
    assert line.getMessage() == "router-a read /blocks"
    assert amounts(lines) == {"answers": 3, "blocks": 3, "bytes": 30}
    assert (vars(line)["caller"], vars(line)["path"], vars(line)["status"]) == ("router-a", "/blocks", 200)


def test_the_content_log_counts_the_sent_part_of_an_open_answer(lines: list[logging.LogRecord]) -> None:
    log = ContentLog()
    reading = log.begin("router-a", "/events")
    log.write()
    assert not lines
    reading.add(5, 50)
    log.write()
    assert amounts(lines) == {"answers": 0, "blocks": 5, "bytes": 50}
    reading.add(1, 10)
    log.end(reading)
    log.write()
    log.write()
    assert amounts(lines) == {"answers": 1, "blocks": 6, "bytes": 60}


def test_the_content_log_separates_callers_and_writes_at_once_at_its_limit(
    lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_log, "MAX_LINES", 4)
    log = ContentLog()
    going_on = [log.begin(f"reader-{n}", "/events") for n in range(6)]
    for reading in going_on:
        reading.add(1, 1)
    log.write()
    for n in range(10):
        reading = log.begin(f"reader-{n % 5}", "/blocks")
        reading.status = 200 + n
        log.end(reading)
    log.write()
    assert amounts(lines) == {"answers": 10, "blocks": 6, "bytes": 6}
    assert len(lines) == 16
