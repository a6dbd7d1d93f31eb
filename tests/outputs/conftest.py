"""Fixtures that run a test with each installed output type, and with the example of a separately distributed type."""

import functools
import sys

import pytest

from kvbus.config import parts
from tests.outputs.driven import driving
from tests.outputs.example.install import install
from tests.outputs.readers import KINDS, LOGS
from tests.outputs.relayed import relaying
from tests.transport.conftest import raised  # noqa: F401

TYPES = sorted({*parts.installed(parts.OUTPUTS), "lines"})


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example of a separately distributed output type, installed for this process."""
    directory = tmp_path_factory.mktemp("site")
    install(directory)
    sys.path.insert(0, str(directory))
    yield
    sys.path.remove(str(directory))
    sys.modules.pop("kvbus_lines", None)


@pytest.fixture(params=TYPES)
def output(request, example, tmp_path):
    """A function that opens an output's driver. The test runs once for each output type."""
    if request.param in LOGS:
        LOGS[request.param].server = request.getfixturevalue(request.param)
    return functools.partial(driving, request.param, tmp_path)


@pytest.fixture(params=[name for name in TYPES if name not in KINDS or KINDS[name].sends_state])
def state_output(request, example, tmp_path):
    """A function that opens an output's driver with a relay.

    The test runs once for each output type that sends the state.
    """
    return functools.partial(relaying, request.param, tmp_path)


@pytest.fixture(params=[name for name in TYPES if name not in KINDS or KINDS[name].asks])
def asked_output(request, example, tmp_path):
    """A function that opens an output's driver.

    The test runs once for each output type whose readers can request a replay.
    """
    return functools.partial(driving, request.param, tmp_path)
