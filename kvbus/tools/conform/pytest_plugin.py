"""A pytest plugin: items for the clauses of docs/spec, at an engine and at a router.

``pytest --kv-engine='ENDPOINT OPTIONS'`` has an item for each clause that binds publishers, and
``pytest --kv-router=OPTIONS`` one for each clause in each case that is played to routers. The values are what follows
``kvbus conform engine`` and ``kvbus conform router``. The first item that runs does the work for all that were chosen.
A broken MUST fails. A broken SHOULD and what was not seen are skipped, with the reason.
"""

from __future__ import annotations

import asyncio
import shlex
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvbus.tools.conform.engine.watch import Target
    from kvbus.tools.conform.report import Report, Verdict
    from kvbus.tools.conform.router.play import Trial

_ENGINE: Final = "--kv-engine"
_ROUTER: Final = "--kv-router"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options. They begin with ``--kv-``."""
    group = parser.getgroup("kvbus", "KV-cache events over ZeroMQ: is my engine right? Is my router?")
    for option, role, of in ((_ENGINE, "engine", "clause"), (_ROUTER, "router", "clause in each case")):
        text = f"an item for each {of}; the value is what follows `kvbus conform {role}`, quoted"
        group.addoption(option, metavar="OPTIONS", help=text)
    group.addoption("--kv-strict", action="store_true", help="a SHOULD that is broken fails, too")


def _parsed(option: str, text: str, options: Callable[[Any], Any]) -> Any:
    import click  # noqa: PLC0415 - imported on use

    command = click.command(option, add_help_option=False)(options(lambda **said: said))
    try:
        return command.main(shlex.split(text), standalone_mode=False)
    except (click.ClickException, ValueError) as error:
        said = error.format_message() if isinstance(error, click.ClickException) else error
        raise pytest.UsageError(f"{option}: {said}") from error


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the items, where an engine or a router is named."""
    for judged in (Engine, Router):
        if config.getoption(judged.option):
            items.extend(judged.from_parent(session, name=judged.option).collect())


class Judged(pytest.Collector):
    """All items of one peer, and the report that the first of them makes.

    Attributes:
        option: names the peer.
    """

    option: ClassVar[str]
    _report: Report | None = None

    def collect(self) -> Iterator[VerdictItem]:
        """Yield the items."""
        raise NotImplementedError

    def judge(self) -> Report:
        """Return what is found at the peer."""
        raise NotImplementedError

    def verdict(self, number: str, case: str) -> tuple[Verdict, list[str]]:
        """Return the verdict about a clause in a case, and what has to be known beyond it."""
        if self._report is None:
            self._report = self.judge()
        if not self._report.tried:
            pytest.fail(" ".join(self._report.notes), pytrace=False)
        found = (each for each in self._report.verdicts if (str(each.clause), each.case) == (number, case))
        return next(found), self._report.notes


class Engine(Judged):
    """The publisher behind an endpoint."""

    option = _ENGINE

    def collect(self) -> Iterator[VerdictItem]:
        """Yield an item for each clause."""
        from kvbus.tools.conform.engine.clauses import WATCHED  # noqa: PLC0415 - imported on use

        self._target()  # what the options say wrongly is said now
        for number, asked in WATCHED.items():
            yield VerdictItem.from_parent(self, name=f"{number} {asked.clause.title}", number=number)

    def judge(self) -> Report:
        """Watch it."""
        from kvbus.tools.conform.engine.watch import Watch  # noqa: PLC0415 - brings zmq

        watch = Watch(self._target())
        asyncio.run(watch.run())
        return watch.report()

    def _target(self) -> Target:
        from kvbus.tools.conform.engine.watch import Target  # noqa: PLC0415 - brings zmq
        from kvbus.tools.conform.options import engine_options  # noqa: PLC0415 - imported on use

        said = _parsed(_ENGINE, self.config.getoption(_ENGINE), engine_options)
        return Target.of(said.pop("subject"), **said)


class Router(Judged):
    """The router that is asked in one way."""

    option = _ROUTER

    def collect(self) -> Iterator[VerdictItem]:
        """Yield an item for each clause in each case."""
        from kvbus.tools.conform.router.cases import CASES, CLAUSES  # noqa: PLC0415 - imported on use

        self._trial(())  # what the options say wrongly is said now
        for case in CASES:
            for number in case.clauses:
                name = f"{number} {case.name}: {CLAUSES[number].title}"
                yield VerdictItem.from_parent(self, name=name, number=number, case=case.name)

    def judge(self) -> Report:
        """Play the cases of the chosen items, and the plainest before them."""
        chosen = [each.case for each in self.session.items if isinstance(each, VerdictItem) and each.parent is self]
        trial = self._trial(chosen)
        asyncio.run(trial.run(str))
        return trial.report

    def _trial(self, names: Iterable[str]) -> Trial:
        from kvbus.tools.conform.options import router_options  # noqa: PLC0415 - imported on use
        from kvbus.tools.conform.router.play import trial  # noqa: PLC0415 - brings zmq

        try:
            return trial(_parsed(_ROUTER, self.config.getoption(_ROUTER), router_options), names)
        except ValueError as error:
            raise pytest.UsageError(f"{_ROUTER}: {error}") from error


class VerdictItem(pytest.Item):
    """One clause, of routers in one case."""

    def __init__(self, *, number: str, case: str = "", **named: Any) -> None:
        super().__init__(**named)
        self._number = number
        self.case = case

    def runtest(self) -> None:
        """Fail where the clause is broken, skip where nothing is certain to be wrong."""
        from kvbus.tools.conform.report import Outcome  # noqa: PLC0415 - imported on use

        judged = self.parent
        assert isinstance(judged, Judged)  # noqa: S101 - made so
        verdict, notes = judged.verdict(self._number, self.case)
        text = f"{verdict.outcome} ({verdict.level}): {verdict.seen}"
        if verdict.fails(strict=self.config.getoption("--kv-strict")):
            shown = [f"{each.what}: {each.data[:64].hex()} ({len(each.data)} bytes)" for each in verdict.evidence]
            pytest.fail("\n".join([text, *shown, *(f"note: {note}" for note in notes)]), pytrace=False)
        if verdict.outcome is not Outcome.KEPT:
            pytest.skip(text)

    def reportinfo(self) -> tuple[str, None, str]:
        """Where it is from, for people."""
        assert isinstance(self.parent, Judged)  # noqa: S101 - made so
        return self.parent.option, None, self.name
