"""Test that Dynamo's frontend routes requests by what kvbus tells it about the caches of two simulated engines.

Each answer contains the number of blocks that the engine had in its cache, and the number that the router expected. The
numbers must be equal, and a request must go to the worker that has its prefix.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.doubles.bus import wait_for
from tests.ports import free_port

from .dynamo import PYTHON_ENV
from .mocker import BLOCK, WORDS, Answer, Frontend, Mirror, Mocker, one_worker, write_model
from .support import Kvbus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.dynamo

PREFIX = 8
"""Number of blocks that the prompts of one session have in common."""


@dataclass
class Session:
    """Prompts with a common beginning. The last half block of each prompt is different."""

    number: int
    asked: int = 0

    def prompt(self) -> list[str]:
        self.asked += 1
        begin = [f"w{self.number * 7 % WORDS}", *(f"w{self.number}" for _ in range(PREFIX * BLOCK - 1))]
        return [*begin, *[f"w{WORDS - self.asked}"] * (BLOCK // 2)]


@dataclass
class Plane:
    """Two mockers, one kvbus beside each mocker, and a frontend."""

    directory: Path
    frontend: Frontend
    mockers: list[Mocker]
    buses: list[Kvbus]
    workers: list[int]
    held: dict[int, list[Session]] = field(default_factory=dict)
    """The sessions that each worker has in its cache, by the worker's position in ``workers``."""
    made: int = 0

    def place(self, at: int, count: int = 1) -> None:
        """Send the first prompt of ``count`` new sessions to one worker, so that it caches their prefixes.

        ``at`` is the worker's position in ``workers``.
        """
        for _ in range(count):
            session = Session(self.made)
            self.made += 1
            assert self.frontend.ask(session.prompt(), self.workers[at]) == Answer(self.workers[at], 0, 0)
            self.held.setdefault(at, []).append(session)

    def settle(self, *places: int) -> None:
        """Wait until the frontend's router knows, for each worker, the prefix that this worker has cached last.

        ``places`` are the workers' positions in ``workers``.
        """
        for at in places:
            session = self.held[at][-1]
            wait_for(partial(self._knows, session, at), f"session {session} of worker {at} known; {self.directory}", 60)

    def _knows(self, session: Session, at: int) -> bool:
        return self.frontend.ask(session.prompt(), self.workers[at]) == Answer(self.workers[at], PREFIX, PREFIX)

    def routes_by_the_truth(self) -> None:
        """Send the frontend a prompt of each session, without naming a worker.

        The prompts of a session have a common prefix. Check that the worker that has cached this prefix serves the
        prompt.
        """
        answers = {
            (at, each.number): self.frontend.ask(each.prompt()) for at, all_ in self.held.items() for each in all_
        }
        assert answers == {(at, number): Answer(self.workers[at], PREFIX, PREFIX) for at, number in answers}

    def evict(self, at: int) -> list[Session]:
        """Send one worker more sessions than its cache holds, and return the completely evicted sessions."""
        gone = self.held.pop(at)
        self.place(at, 40)  # at least 360 blocks, more than the cache's 300
        self.held[at] = self.held[at][-5:]
        return gone

    def knows_nothing_of(self, sessions: list[Session], at: int) -> None:
        """Check that the router expects no cached block of these evicted sessions at a worker."""
        answers = [self.frontend.ask(each.prompt(), self.workers[at]) for each in sessions]
        assert answers == [Answer(self.workers[at], 0, 0) for _ in sessions]

    @contextlib.contextmanager
    def another_frontend(self) -> Iterator[None]:
        """Continue with a new frontend that has read no events yet."""
        first = self.frontend
        with Frontend(self.directory, self.directory / "ours") as late:
            wait_for(lambda: late.serves(self.workers), f"the frontend serves; log: {late.log}", 60)
            self.frontend = late
            yield
        self.frontend = first


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    python = os.environ.get(PYTHON_ENV)
    if not python:
        pytest.skip(f"{PYTHON_ENV} names no Python with ai-dynamo-runtime (.ci/run sets it)")
    looked = [python, "-c", "import dynamo.frontend.main, dynamo.mocker.main"]
    if subprocess.run(looked, check=False, capture_output=True).returncode:
        pytest.skip(
            f"{python} has no dynamo.frontend and dynamo.mocker: .ci/dynamo-frontend.lock (.ci/run installs it)"
        )


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    """Two workers that have each served three sessions, a frontend that does not know them, and kvbus, which starts
    last.
    """
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    model = write_model(tmp_path / "model")
    with contextlib.ExitStack() as stack:
        stack.enter_context(Mirror(theirs, ours))
        hosts = ("127.0.0.2", "127.0.0.3")
        mockers = [stack.enter_context(Mocker(tmp_path, theirs, host, model)) for host in hosts]
        frontend = stack.enter_context(Frontend(tmp_path, ours))
        workers = [one_worker(each) for each in mockers]
        wait_for(lambda: frontend.serves(workers), f"the frontend serves; log: {frontend.log}", 60)
        made = Plane(tmp_path, frontend, mockers, [], workers)
        for at, worker in enumerate(workers):
            made.place(at, 3)
            # Without kvbus, the frontend's router expects no cached block, although the engine has some.
            assert frontend.ask(made.held[at][0].prompt(), worker) == Answer(worker, PREFIX, 0)
        for each in mockers:
            directory = tmp_path / f"kvbus-{each.host}"
            directory.mkdir()
            output: dict[str, Any] = {"type": "dynamo", "profile": "dynamo-plane", "replay_endpoint": None}
            output |= {"endpoint": f"tcp://{each.host}:{free_port()}", "dynamo": {"discovery": f"file://{ours}"}}
            made.buses.append(stack.enter_context(Kvbus(each, directory, output, probe_interval=0.5)))
        made.settle(0, 1)
        yield made


def test_a_late_frontend_routes_requests_to_the_worker_with_the_prefix(plane: Plane) -> None:
    plane.routes_by_the_truth()
    with plane.another_frontend():
        plane.settle(0, 1)
        plane.routes_by_the_truth()
        gone = plane.evict(0)
        plane.settle(0)
        plane.routes_by_the_truth()
        plane.knows_nothing_of(gone, 0)


def test_the_frontend_routes_correctly_after_kvbus_was_killed(plane: Plane) -> None:
    plane.buses[1].kill()
    gone = plane.evict(1)
    plane.buses[1].start_again()
    plane.settle(1)
    plane.routes_by_the_truth()
    plane.knows_nothing_of(gone, 1)


def test_the_frontend_routes_correctly_after_an_engine_was_killed(plane: Plane) -> None:
    before = plane.workers[0]
    plane.mockers[0].kill_and_start_again()
    plane.workers[0] = one_worker(plane.mockers[0], before)
    wait_for(lambda: plane.frontend.serves(plane.workers), "the new worker is served", 60)
    gone = plane.held.pop(0)
    plane.place(0, 2)
    plane.settle(0)
    plane.routes_by_the_truth()
    plane.knows_nothing_of(gone, 0)
