import pytest

from tests.log.kinds import Kafka, Kind, Memory, Nats, Redis
from tests.transport.conftest import raised  # noqa: F401


@pytest.fixture(params=["memory", "kafka", "nats", "redis"])
def kind(request, tmp_path) -> Kind:
    """Each kind of log: the test runs once for each."""
    if request.param == "memory":
        return Memory()
    made = {"kafka": Kafka, "nats": Nats, "redis": Redis}[request.param]
    return made(request.getfixturevalue(request.param))
