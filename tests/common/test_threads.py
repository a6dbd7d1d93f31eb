"""What the loop's thread leaves to others on its core."""

from __future__ import annotations

from types import SimpleNamespace

from kvbus.common import threads


def test_threads_that_are_ready_may_have_the_core(monkeypatch):
    yielded = []
    monkeypatch.setattr(threads, "os", SimpleNamespace(sched_yield=lambda: yielded.append(True)))
    threads.let_threads_run()
    assert yielded == [True]
