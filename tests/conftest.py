"""Settings for all tests: Hypothesis profiles, the order of tests, their budgets, and a directory for state.

Hypothesis is short and repeatable by default, twice as long with ``TEST_LONG=1``, and long and random with
``HYPOTHESIS_PROFILE=soak``. A test that does not set ``state_dir`` keeps its state in pytest's temporary directory, so
that no state remains on the machine.
"""

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from tests import budget
from tests.log import broker, clusters, nats_server, redis_server, server
from tests.long import LONG
from tests.sharing import Scheduling

# aiohttp reads the machine's certificate authorities at import, which takes 50 ms. Tests trust only their own.
os.environ["SSL_CERT_FILE"] = os.devnull
# libuv starts child processes with fork, during which gRPC's fork handlers may abort them.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# A script's background processes, and their children, ignore Ctrl-C. Many tests send Ctrl-C to their child processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "default",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=100 if LONG else 50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "soak",
    deadline=None,
    max_examples=3_000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


TESTS: Final = Path(__file__).parent
FAST: Final = {"conftest.py", "__init__.py", *budget.budgets("fast")}
"""The files and directories in ``tests`` that the fast tier collects."""


@pytest.fixture(scope="session", autouse=True)
def state_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let ``state_dir: auto`` use a directory of the test session, in this process and its child processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STATE_DIRECTORY", str(tmp_path_factory.mktemp("state")))
        yield


Started = TypeVar("Started", bound=server.Server | clusters.Cluster)


def _running(there: object, missing: str, make: Callable[[Path], Started], directory: Path) -> Iterator[Started]:
    """Start a server that all tests of the session share, and kill it at the end.

    If ``there`` is false, the server's program is not installed: skip the test with the reason ``missing``.
    """
    if not there:
        pytest.skip(missing)
    what = make(directory)
    for each in what.members if isinstance(what, clusters.Cluster) else [what]:
        each.of_session = True
    try:
        what.start()
        yield what
    finally:
        what.kill()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[broker.Broker]:
    yield from _running(
        os.environ.get(broker.HOME_ENV), broker.MISSING, broker.Broker, tmp_path_factory.mktemp("kafka")
    )


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nats_server.NatsServer]:
    yield from _running(
        nats_server.command(), nats_server.MISSING, nats_server.NatsServer, tmp_path_factory.mktemp("nats")
    )


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis_server.RedisServer]:
    """A running Redis or Valkey server, which all tests of the session share."""
    yield from _running(
        redis_server.command(), redis_server.MISSING, redis_server.RedisServer, tmp_path_factory.mktemp("redis")
    )


@pytest.fixture(scope="session")
def kafka_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.Cluster]:
    """A running Kafka cluster of three brokers, which all tests of the session share."""
    yield from _running(
        os.environ.get(broker.HOME_ENV), broker.MISSING, clusters.brokers, tmp_path_factory.mktemp("brokers")
    )


@pytest.fixture(scope="session")
def nats_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.Cluster]:
    """A running cluster of three NATS servers, which all tests of the session share."""
    yield from _running(
        nats_server.command(), nats_server.MISSING, clusters.nats_servers, tmp_path_factory.mktemp("nats-servers")
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=("fast", "all"),
        default="all",
        help="fast: the directories that budgets.toml lists under [fast], without slow tests, if no path is given",
    )


def _is_fast(config: pytest.Config) -> bool:
    return config.getoption("--tier") == "fast" and config.args_source is pytest.Config.ArgsSource.TESTPATHS


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect no tests from the directories with slower tests in a run of the fast tier."""
    if not _is_fast(config) or not collection_path.is_relative_to(TESTS) or collection_path == TESTS:
        return None
    return collection_path.relative_to(TESTS).parts[0] not in FAST or None


def pytest_configure(config: pytest.Config) -> None:
    budget.register(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Use the scheduler of :mod:`tests.sharing` with ``--dist loadgroup``."""
    if config.getvalue("dist") != "loadgroup":
        return None
    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Exclude the collected tests from garbage collection: there are thousands, and they live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the slow tests first. Leave them out if only the fast tests run (``--tier fast``)."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if _is_fast(config):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = items[len(slow) :]
