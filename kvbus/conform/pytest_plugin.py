"""A pytest plugin: ``pytest --kv-engine tcp://…`` has an item for each clause that binds publishers.

The first item that runs watches the engine, for all of them. A broken MUST fails; a broken SHOULD and what was not seen
are skipped, with the reason.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvbus.conform.report import Report
    from kvbus.conform.verdict import Verdict

_ENGINE: Final = "--kv-engine"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options. They begin with ``--kv-``."""
    group = parser.getgroup("kvbus", "KV-cache events over ZeroMQ: is my engine right?")
    group.addoption(_ENGINE, metavar="ENDPOINT", help="judge the publisher at this endpoint, an item for each clause")
    group.addoption(f"{_ENGINE}-replay", metavar="ENDPOINT", help="its replay endpoint")
    group.addoption(f"{_ENGINE}-snapshot", metavar="ENDPOINT", help="its snapshot endpoint")
    group.addoption(
        f"{_ENGINE}-api", metavar="URL", help="its OpenAI-style API: its cache is reset, it is put to sleep"
    )
    group.addoption(f"{_ENGINE}-seconds", type=float, default=30.0, metavar="S", help="watch for so long (default: 30)")
    group.addoption("--kv-strict", action="store_true", help="a SHOULD that is broken fails, too")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the items, where an engine is named."""
    if config.getoption(_ENGINE):
        items.extend(Engine.from_parent(session, name=_ENGINE).collect())


class Engine(pytest.Collector):
    """All clauses, and the report that the first of them makes."""

    _report: Report | None = None

    def collect(self) -> Iterator[pytest.Item]:
        """Yield an item for each clause."""
        from kvbus.conform.engine.clauses import WATCHED  # noqa: PLC0415 - imported on use

        for number, asked in WATCHED.items():
            yield ClauseItem.from_parent(self, name=f"{number} {asked.clause.title}", number=number)

    def verdict(self, number: str) -> Verdict:
        """Return the verdict about a clause; the first call watches the engine."""
        if self._report is None:
            self._report = _watched(self.config)
        if not self._report.tried:
            pytest.fail(" ".join(self._report.notes), pytrace=False)
        return next(each for each in self._report.verdicts if str(each.clause) == number)


class ClauseItem(pytest.Item):
    """One clause."""

    def __init__(self, *, number: str, **named: Any) -> None:
        super().__init__(**named)
        self._number = number

    def runtest(self) -> None:
        """Fail where the clause is broken, skip where nothing is certain to be wrong."""
        from kvbus.conform.verdict import Outcome  # noqa: PLC0415 - imported on use

        engine = self.parent
        assert isinstance(engine, Engine)  # noqa: S101 - made so
        verdict = engine.verdict(self._number)
        shown = [f"{each.what}: {each.data[:64].hex()} ({len(each.data)} bytes)" for each in verdict.evidence]
        text = "\n".join([f"{verdict.outcome} ({verdict.level}): {verdict.message}", *shown])
        if verdict.fails(strict=self.config.getoption("--kv-strict")):
            pytest.fail(text, pytrace=False)
        if verdict.outcome is not Outcome.KEPT:
            pytest.skip(text.partition("\n")[0])

    def reportinfo(self) -> tuple[str, None, str]:
        """Where it is from, for people."""
        return _ENGINE, None, self.name


def _watched(config: pytest.Config) -> Report:
    from kvbus.conform.engine.watch import Target, Watch  # noqa: PLC0415 - brings zmq

    named = {name: config.getoption(f"{_ENGINE}-{name}") for name in ("replay", "snapshot", "api", "seconds")}
    watch = Watch(Target(config.getoption(_ENGINE), **named))
    asyncio.run(watch.run())
    return watch.report()
