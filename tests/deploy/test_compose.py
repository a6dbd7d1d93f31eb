"""Tests for the Compose file: each service's command runs as a process on free ports, and together they relay
batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.deploy.compose import DEPLOY, KVBUS, PORTS, SERVICES, Elsewhere, kept, mounts
from tests.doubles.bus import eventually
from tests.monitoring.prometheus import running_prometheus
from tests.ports import free_ports


def test_the_compose_file_has_its_services_and_protects_them() -> None:
    assert set(SERVICES) == {"engine", "kvbus", "router-a", "router-b", "prometheus", "grafana"}
    assert set(KVBUS) == {"engine", "kvbus", "router-a", "router-b"}
    for service in KVBUS.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]


def test_every_file_that_a_service_mounts_exists() -> None:
    for service in SERVICES:
        for path in mounts(service).values():
            assert path.exists(), f"{service}: {path}"


def test_the_state_directory_of_kvbus_is_in_a_named_volume() -> None:
    """The volume in the Compose file is at the path of the image's state directory.

    The container's root is read-only, and its /dev/shm is small and does not outlive it.
    """
    dockerfile = (DEPLOY.parent / "Dockerfile").read_text()
    (told,) = re.findall(r"STATE_DIRECTORY=(\S+)", dockerfile)
    assert kept("kvbus") == [told]
    assert f"chown 65532:65532 /rootfs{told}" in dockerfile
    assert f"-v kvbus:{told} kvbus\n" in dockerfile
    assert not kept("engine")


def test_services_publish_ports_only_on_loopback_and_pin_their_image_versions() -> None:
    for name, service in SERVICES.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert ":" in service["image"], name
        assert not service["image"].endswith(":latest"), name


class Circuit:
    """The services of the Compose file that run kvbus, each as a process of this machine."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.elsewhere = Elsewhere(self.ports)
        self.config = directory / "kvbus.yaml"
        self.config.write_text(self.elsewhere.moved((DEPLOY / "kvbus.yaml").read_text()))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self, service: str) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")}
        own = {"XDG_RUNTIME_DIR": str(self._directory), "STATE_DIRECTORY": str(self._directory)}
        return clean | own | self.elsewhere.environment(service)

    def start(self, service: str) -> None:
        command = [
            str(self.config) if part == "/etc/kvbus/kvbus.yaml" else part for part in self.elsewhere.command(service)
        ]
        out = self._stack.enter_context((self._directory / f"{service}.out").open("wb"))
        err = self._stack.enter_context((self._directory / f"{service}.err").open("wb"))
        process = subprocess.Popen(
            [sys.executable, "-m", "kvbus", *command], env=self.environment(service), stdout=out, stderr=err
        )
        self.processes[service] = process
        self._stack.callback(self._end, service)

    def _end(self, service: str) -> None:
        process = self.processes[service]
        process.terminate()
        assert process.wait(60) == 0, self.said(service)

    def said(self, service: str) -> str:
        return (self._directory / f"{service}.err").read_text()

    def printed(self, service: str) -> str:
        assert self.processes[service].poll() is None, self.said(service)
        return (self._directory / f"{service}.out").read_text()

    def healthy(self) -> bool:
        """Return whether kvbus is healthy, by the same command that Compose uses as its health check."""
        assert self.processes["kvbus"].poll() is None, self.said("kvbus")
        kind, program, *args = SERVICES["kvbus"]["healthcheck"]["test"]
        assert (kind, program) == ("CMD", "python")
        done = subprocess.run(
            [sys.executable, *map(self.elsewhere.moved, args)], capture_output=True, timeout=60, check=False
        )
        return done.returncode == 0

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[9477]}{path}", timeout=60) as answer:
            return json.load(answer)


def batches(printed: str) -> list[dict[str, Any]]:
    """Return the batches in the output of `tail --json`. An incomplete last line is ignored."""
    lines = [json.loads(line) for line in printed.splitlines(keepends=True) if line.endswith("\n")]
    assert not [line for line in lines if line["kind"] in {"gap", "lost"}]
    return [line for line in lines if line["kind"] == "batch"]


def until(condition: Callable[[], object], what: str) -> None:
    with asyncio.Runner() as runner:
        runner.run(eventually(condition, what))


@pytest.fixture
def circuit(tmp_path: Path) -> Iterator[Circuit]:
    with contextlib.ExitStack() as stack:
        made = Circuit(tmp_path, stack)
        for service in KVBUS:
            made.start(service)
            if service == "kvbus":
                until(made.healthy, "a kvbus that is healthy")
        yield made


def test_the_commands_of_the_compose_file_carry_batches_to_each_router(circuit: Circuit) -> None:
    until(lambda: len(batches(circuit.printed("router-b"))) > 10, "batches at router-b")
    until(lambda: len(circuit.printed("router-a").splitlines()) > 10, "lines at router-a")
    (source,) = circuit.get("/sources")
    assert source["state"] == "live"
    assert source["partial"] is False
    seqs = [batch["seq"] for batch in batches(circuit.printed("router-b"))]
    assert seqs == list(range(len(seqs))), "from the start, and dense"


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus (.ci/run installs it)")
def test_the_prometheus_of_the_compose_file_scrapes_kvbus_and_has_the_rules(circuit: Circuit, tmp_path: Path) -> None:
    files = mounts("prometheus")
    config = files.pop("/etc/prometheus/prometheus.yml").read_text()
    for path in files.values():  # as in the container, the files lie beside the configuration
        shutil.copy(path, tmp_path / path.name)
    config = circuit.elsewhere.moved(config).replace("scrape_interval: 5s", "scrape_interval: 200ms")
    with running_prometheus(tmp_path, config) as server:
        until(lambda: server.query('kvbus_source_batches_total{source="engine"} > 0'), "a scrape of kvbus")
        groups = server.get("/api/v1/rules")["groups"]
        assert {group["name"] for group in groups} >= {
            "kvbus-recorded",
            "kvbus-sources",
            "kvbus-outputs",
            "kvbus-process",
        }


def test_the_grafana_of_the_compose_file_has_the_dashboards_and_a_data_source() -> None:
    yaml = YAML(typ="safe", pure=True)
    files = mounts("grafana")
    provisioning = files["/etc/grafana/provisioning"]
    (provider,) = yaml.load((provisioning / "dashboards" / "kvbus.yaml").read_text())["providers"]
    for dashboard in (DEPLOY / "grafana").glob("*.json"):
        assert f"{provider['options']['path']}/{dashboard.name}" in files
    (source,) = yaml.load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert host in SERVICES
    assert SERVICES[host]["ports"] == [f"127.0.0.1:{port}:{port}"]
