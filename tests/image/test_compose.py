"""Tests that run the services of the Compose file in containers, with the commands, users, mounts and protections
in it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.compose import KVBUS, SERVICES, kept, mounts
from tests.doubles.bus import eventually
from tests.image.conftest import IMAGE, Podman


def options(service: str) -> list[str]:
    """Return the options of `podman run` that correspond to a service of the Compose file."""
    described = SERVICES[service]
    found = ["--init"] if described["init"] else []
    found += ["--read-only"] if described["read_only"] else []
    found += [f"--cap-drop={capability}" for capability in described["cap_drop"]]
    found += [f"--security-opt={option.split(':')[0]}" for option in described["security_opt"]]
    found += [f"--env={name}={value}" for name, value in described.get("environment", {}).items()]
    found += [f"--volume={here}:{there}:ro" for there, here in mounts(service).items()]
    found += [f"--volume={there}" for there in kept(service)]
    return found


class Circuit:
    """All services of the Compose file in one pod.

    Its only network is loopback, to which the services' names resolve.
    """

    def __init__(self, podman: Podman, name: str, directory: Path) -> None:
        self._podman = podman
        self._name = name
        self._hosts = directory / "hosts"
        self._hosts.write_text("".join(f"127.0.0.1 {service}\n" for service in ("localhost", *KVBUS)))
        podman("pod", "create", "--name", name, "--network", "none")

    def start(self, service: str) -> None:
        command = [str(part) for part in SERVICES[service]["command"]]
        place = ("run", "--detach", "--pull=never", "--pod", self._name, "--name", f"{self._name}-{service}")
        hosts = f"--volume={self._hosts}:/etc/hosts:ro"
        self._podman(*place, hosts, *options(service), IMAGE, *command)

    def inside(self, service: str, *command: str) -> tuple[int, str]:
        done = self._podman("exec", f"{self._name}-{service}", *command, check=False)
        return done.returncode, done.stdout

    def printed(self, service: str) -> list[str]:
        return self._podman("logs", f"{self._name}-{service}").stdout.splitlines()

    def said(self, service: str) -> str:
        return self._podman("logs", f"{self._name}-{service}").stderr

    async def until_healthy(self, service: str) -> None:
        _, *command = SERVICES[service]["healthcheck"]["test"]
        await eventually(lambda: self.inside(service, *command)[0] == 0, f"{service} healthy: {self.said(service)}")


@pytest.fixture
def circuit(podman: Podman, name: str, tmp_path: Path) -> Iterator[Circuit]:
    made = Circuit(podman, name, tmp_path)
    with asyncio.Runner() as runner:
        for service in KVBUS:
            made.start(service)
            if "healthcheck" in SERVICES[service]:
                runner.run(made.until_healthy(service))
    yield made
    podman("pod", "stop", "--time", "20", name)
    for service in KVBUS:
        code = podman("inspect", "--format", "{{.State.ExitCode}}", f"{name}-{service}").stdout.strip()
        assert code == "0", made.said(service)


def test_the_compose_services_carry_batches_to_each_router_in_containers(circuit: Circuit) -> None:
    def whole(printed: list[str]) -> list[dict[str, Any]]:
        return [line for line in map(json.loads, printed) if line["kind"] == "batch"]

    with asyncio.Runner() as runner:
        runner.run(
            eventually(lambda: len(whole(circuit.printed("router-b"))) > 10, f"router-b: {circuit.said('kvbus')}")
        )
        runner.run(eventually(lambda: len(circuit.printed("router-a")) > 10, f"router-a: {circuit.said('kvbus')}"))
    seqs = [batch["seq"] for batch in whole(circuit.printed("router-b"))]
    assert seqs == list(range(len(seqs))), "from the start, and dense"
