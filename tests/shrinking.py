"""Shorten a failing random run, so that a test prints only the steps that the failure needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def location_of(error: Exception) -> str:
    """Return a text with the type of an error and the function that raised it.

    Two errors of the same cause give the same text, even with other numbers.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{type(error).__name__}:{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}" if trace else repr(error)


def shorten(steps: list[T], fails: Callable[[list[T]], bool], seconds: float) -> list[T]:
    """Return a shorter list of steps that still fails.

    Steps that the failure does not need are removed, larger slices first, for at most ``seconds`` seconds.
    """
    end = time.monotonic() + seconds
    piece = max(1, len(steps) // 2)
    while piece and time.monotonic() < end:
        at, shorter = 0, False
        while at < len(steps) and time.monotonic() < end:
            fewer = steps[:at] + steps[at + piece :]
            if fails(fewer):
                steps, shorter = fewer, True
            else:
                at += piece
        if not shorter or piece > 1:
            piece //= 2
    return steps
