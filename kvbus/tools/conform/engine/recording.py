"""A recorded stream, judged as far as a file shows a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvbus.tools.capture.format import Message as Recorded
from kvbus.tools.conform.engine.judge import EngineJudge
from kvbus.tools.conform.report import Report

_NOTE: Final = "a recording has no sockets, no replay and no publisher's id: their clauses are not seen"


def judge_recording(subject: str, messages: Iterable[Recorded]) -> Report:
    """Judge the messages of a recording.

    Raises:
        CaptureError: the file cannot be read.
    """
    judge = EngineJudge()
    before: Recorded | None = None
    for recorded in messages:
        if before is not None and recorded.seq > before.seq:  # while an engine restarts nobody can speak
            judge.silence.passed(max(0.0, recorded.t - before.t))
        before = recorded
        message = judge.parse([recorded.topic, recorded.seq.to_bytes(8, "big"), recorded.payload])
        if message is not None:
            judge.take(message)
    return Report(
        "engine", subject, judge.verdicts(), f"{judge.batches:,} batches", tried=judge.batches > 0, notes=[_NOTE]
    )
