from __future__ import annotations

import io
import json
import logging
import re
import warnings

import pytest

from kvbus.common.logs import BURST, WINDOW_S, JsonFormatter, RateLimit, TextFormatter, setup


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _root(monkeypatch):
    """Restore the root logger after each test, and start each test with environment variables that permit colours."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def _lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_logs_are_json_lines_if_the_output_is_not_a_terminal():
    stream = io.StringIO()
    setup(stream=stream)
    logging.getLogger("kvbus.relay").warning(
        "gap at %s", "engine/0", extra={"source": "engine/0", "hash": b"\x01\xff", "level": "mine"}
    )
    (line,) = _lines(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("ts"))
    assert line == {
        "level": "warning",
        "logger": "kvbus.relay",
        "message": "gap at engine/0",
        "source": "engine/0",
        "hash": "01ff",
    }


def test_a_json_line_contains_its_exception():
    stream = io.StringIO()
    setup(stream=stream)
    try:
        int("x")
    except ValueError:
        logging.getLogger("kvbus").exception("failed")
    (line,) = _lines(stream)
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: invalid literal for int() with base 10: 'x'")


def test_logs_are_coloured_text_on_a_terminal():
    stream = Terminal()
    setup(stream=stream)
    logging.getLogger("kvbus").error("gap", extra={"source": "a"})
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} \x1b\[31mERROR  \x1b\[0m gap source=a\n", stream.getvalue())


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_environment_variables_turn_colours_off(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    stream = Terminal()
    setup(stream=stream)
    logging.getLogger("kvbus").error("gap")
    assert "\x1b" not in stream.getvalue()
    assert "ERROR" in stream.getvalue()


def test_the_log_format_can_be_set():
    assert isinstance(setup(log_format="json", stream=Terminal()).formatter, JsonFormatter)
    off_terminal = io.StringIO()
    assert isinstance(setup(log_format="text", stream=off_terminal).formatter, TextFormatter)
    logging.getLogger("kvbus").error("gap")
    assert "\x1b" not in off_terminal.getvalue()


def test_control_characters_in_log_text_are_escaped():
    stream = Terminal()
    setup(stream=stream)
    logging.getLogger("kvbus").error("topic %s", "a\x1b[2J\nb\x9b", extra={"x": "c\rd"})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("topic a\\x1b[2J\\x0ab\\x9b x=c\\x0dd")


def test_lines_below_the_log_level_are_dropped():
    stream = io.StringIO()
    setup("warning", stream=stream)
    logging.getLogger("kvbus").info("no")
    logging.getLogger("kvbus").warning("yes")
    assert [line["message"] for line in _lines(stream)] == ["yes"]


def test_a_second_setup_replaces_the_log_handler():
    first, second = io.StringIO(), io.StringIO()
    setup(stream=first)
    setup(stream=second)
    logging.getLogger("kvbus").error("once")
    assert first.getvalue() == ""
    assert len(_lines(second)) == 1


def test_python_warnings_are_logged():
    stream = io.StringIO()
    setup(stream=stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("careful", UserWarning, stacklevel=1)
    (line,) = _lines(stream)
    assert "careful" in line["message"]
    assert line["logger"] == "py.warnings"


def test_a_repeated_line_is_suppressed_and_counted():
    stream, clock = io.StringIO(), Clock()
    setup(stream=stream, clock=clock)
    log = logging.getLogger("kvbus")
    for i in range(BURST + 7):
        log.warning("gap at %d", i)
    assert [line["message"] for line in _lines(stream)] == [f"gap at {i}" for i in range(BURST)]
    log.warning("another line")
    logging.getLogger("kvbus.other").warning("gap at %d", 99)
    assert len(_lines(stream)) == BURST + 2
    clock.now = WINDOW_S
    log.warning("gap at %d", 100)
    log.warning("gap at %d", 101)
    *_, counted, after = _lines(stream)
    assert (counted["message"], counted["suppressed"]) == ("gap at 100", 7)
    assert "suppressed" not in after


def test_the_count_of_suppressed_lines_restarts_with_each_window():
    stream, clock = io.StringIO(), Clock()
    setup(stream=stream, clock=clock)
    log = logging.getLogger("kvbus")
    for window in range(3):
        clock.now = window * WINDOW_S
        for _ in range(BURST + window):
            log.warning("gap")
    assert [line["suppressed"] for line in _lines(stream) if "suppressed" in line] == [1]
    clock.now = 3 * WINDOW_S
    log.warning("gap")
    assert _lines(stream)[-1]["suppressed"] == 2


def test_debug_lines_are_never_suppressed():
    stream = io.StringIO()
    setup("debug", stream=stream, clock=Clock())
    for _ in range(BURST * 3):
        logging.getLogger("kvbus").debug("batch")
    assert len(_lines(stream)) == BURST * 3


def test_the_rate_limit_keeps_a_bounded_number_of_templates():
    limit = RateLimit(burst=1, clock=Clock())

    def passes(i):
        return limit.filter(logging.makeLogRecord({"name": "kvbus", "msg": f"line {i}", "levelno": logging.INFO}))

    assert all(passes(i) for i in range(20_000))
    assert not passes(20_000 - 8192), "the oldest of 8,192"
    assert passes(20_000 - 8192 - 1), "the one before is forgotten"


def test_the_rate_limit_counts_each_rank_and_output_separately():
    stream = io.StringIO()
    setup(stream=stream, clock=Clock())
    log = logging.getLogger("kvbus.daemon")
    for _ in range(2 * BURST):
        for rank in range(8):
            log.info("source %s: connected", f"engine/{rank}", extra={"source": f"engine/{rank}", "rank": rank})
            log.info("output %s: bound", "routers", extra={"output": "routers", "stream": rank})
    lines = _lines(stream)
    for rank in range(8):
        assert sum(line.get("rank") == rank for line in lines) == BURST
        assert sum(line.get("stream") == rank for line in lines) == BURST
