"""Logging to stderr as JSON lines, or as text on a terminal, with a limit for repeated lines.

The limit applies to lines with the same message template that are about the same subject, for example the same source
or output. For example, for each source ``log.warning("gap at %s", label, extra={"source": label})`` writes at most
:data:`BURST` lines in :data:`WINDOW_S` seconds. The first line after that time has the number of suppressed lines. No
line contains a token, a hash or a topic.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

LogFormat = Literal["auto", "json", "text"]

BURST: Final = 5
WINDOW_S: Final = 10.0
_MAX_TEMPLATES: Final = 8192
"""Maximum number of pairs of a message template and a subject whose log lines the rate limit counts.

It allows two templates for each rank that an engine may have.
"""
_SUBJECTS: Final = ("source", "output", "stream", "caller", "path", "status")
"""Extra fields of a log record that name the subject of the line, such as the source.

The limit for repeated lines applies to each subject separately. So lines about one source, output or reader do not
suppress lines about another subject.
"""
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "suppressed",
    "taskName",
}
_COLOURS: Final = {"DEBUG": "2", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "31;1"}
_CONTROL: Final = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


def setup(
    level: str = "info",
    log_format: LogFormat = "auto",
    *,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> logging.Handler:
    """Send all log records to a new handler at the root logger. Remove the handler of an earlier call.

    Args:
        level: the lowest level to write: debug, info, warning or error.
        log_format: ``json``, ``text``, or ``auto``, which means text on a terminal and JSON lines otherwise.
        stream: the stream to write to. None means stderr.
        clock: function that returns the time in seconds, for the limit of repeated lines.

    Returns:
        The new handler.
    """
    stream = sys.stderr if stream is None else stream
    terminal = stream.isatty()
    handler = _Handler(stream)
    if log_format == "text" or (log_format == "auto" and terminal):
        colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        handler.setFormatter(TextFormatter(colour=colour))
    else:
        handler.setFormatter(JsonFormatter())
    handler.addFilter(RateLimit(clock=clock))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(capture=True)
    return handler


class _Handler(logging.StreamHandler[TextIO]):
    """The handler that ``setup`` installs. ``setup`` recognizes its earlier handler by this class."""


class RateLimit(logging.Filter):
    """A filter that limits the number of log lines with the same message template and the same subject.

    At most ``burst`` of these lines are written in ``window`` seconds. The first line after that time has the number of
    suppressed lines. Debug lines are never suppressed, because a user who enables them wants to see all of them.
    """

    def __init__(
        self, burst: int = BURST, window: float = WINDOW_S, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._burst = burst
        self._window = window
        self._clock = clock
        self._lock = threading.Lock()
        # The start of the current window and the number of lines in it, by logger, message template and subject (the
        # source, output, … that the line names). If the dictionary is full, the entry that was unused for longest is
        # dropped.
        self._seen: OrderedDict[tuple[object, ...], tuple[float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a log record.

        If records with the same template and subject were suppressed before, set ``record.suppressed`` to their number.
        """
        if record.levelno <= logging.DEBUG:
            return True
        key = (record.name, str(record.msg), *(getattr(record, name, None) for name in _SUBJECTS))
        now = self._clock()
        with self._lock:
            start, count = self._seen.pop(key, (now, 0))
            if now - start >= self._window:
                record.suppressed = max(0, count - self._burst)
                start, count = now, 0
            self._seen[key] = (start, count + 1)
            if len(self._seen) > _MAX_TEMPLATES:
                self._seen.popitem(last=False)
            return count < self._burst


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    if suppressed := getattr(record, "suppressed", 0):
        fields["suppressed"] = suppressed
    return fields


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


class JsonFormatter(logging.Formatter):
    """The format of log records as JSON lines: ``ts``, ``level``, ``logger``, ``message``, and all extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON line of one log record."""
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "ts": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in _extra(record).items() if key not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=_plain)


class TextFormatter(logging.Formatter):
    """The format of log records for people: time, level, message, and the record's extra fields as ``key=value``.

    Control characters are escaped.
    """

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """Return the text line of one log record."""
        moment = datetime.fromtimestamp(record.created, UTC).astimezone()
        level = f"{record.levelname:<7}"
        if self._colour:
            level = f"\x1b[{_COLOURS.get(record.levelname, '0')}m{level}\x1b[0m"
        text = record.getMessage() + "".join(f" {key}={_plain(value)}" for key, value in _extra(record).items())
        line = f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03d} {level} {text.translate(_CONTROL)}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line
