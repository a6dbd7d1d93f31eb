"""Fixtures with one Kubernetes control plane for the test session, if its programs are installed."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.budget import ends_servers
from tests.cluster.api import RESTRICTED, Api, Object
from tests.cluster.control_plane import HOME_ENV, MISSING, PATIENCE, ApiServer, ControlPlane


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with a running etcd. Skip the tests if its programs are missing."""
    home = Path(os.environ.get(HOME_ENV, "/nonexistent"))
    if not all((home / "bin" / program).is_file() for program in ("etcd", "kube-apiserver")):
        pytest.skip(MISSING)
    made = ControlPlane(tmp_path_factory.mktemp("kubernetes"), home)
    try:
        yield made
    finally:
        with ends_servers():
            made.close()


@pytest.fixture(scope="session")
def server(plane: ControlPlane) -> ApiServer:
    """A running Kubernetes API server that all tests share, and that none of them stops."""
    return plane.api_server()


@pytest.fixture
def api(server: ApiServer) -> Iterator[Api]:
    """A client of the API server as its administrator. A test to which the server sends a warning fails."""
    server.api.warnings.clear()
    yield server.api
    assert server.api.warnings == []


@pytest.fixture(scope="session")
def elsewhere(server: ApiServer) -> str:
    """The namespace `elsewhere`. A preset of the chart names it in addition to the release's own namespace."""
    return server.api.namespace(RESTRICTED, "elsewhere")


@pytest.fixture(scope="session")
def serve(plane: ControlPlane, server: ApiServer) -> Callable[[str], None]:
    """A function that installs the custom resource definitions of another project in the API server.

    Its argument is the beginning of their files' names.
    """

    @functools.cache
    def served_now(pattern: str) -> None:
        found = sorted(plane.crds.glob(f"{pattern}*.yaml"))
        assert found, pattern
        for path in found:
            made = server.api.create(YAML(typ="safe").load(path.read_text()))
            until = time.monotonic() + PATIENCE
            while not served(server.api.read(made)):
                assert time.monotonic() < until, f"{path.name} is not served"
                time.sleep(0.05)

    return served_now


def served(crd: Object) -> bool:
    conditions = {each["type"]: each["status"] for each in crd.get("status", {}).get("conditions") or ()}
    return conditions.get("Established") == "True"
