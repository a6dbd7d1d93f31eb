import pytest

from tests.log.kinds import Directory, Kafka, Kind, Nats, Redis
from tests.transport.conftest import raised  # noqa: F401


@pytest.fixture(params=["directory", "kafka", "nats", "redis"])
def kind(request, tmp_path) -> Kind:
    """Every log, in turn."""
    if request.param == "directory":
        return Directory(tmp_path / "log")
    made = {"kafka": Kafka, "nats": Nats, "redis": Redis}[request.param]
    return made(request.getfixturevalue(request.param))
