from tests.transport.conftest import raised  # noqa: F401
