"""Read the services of ``deploy/compose.yaml`` for tests that run them.

One test runs them as processes. The other runs them with podman, if podman is installed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
COMPOSE: Final[dict[str, Any]] = YAML(typ="safe", pure=True).load((DEPLOY / "compose.yaml").read_text())
SERVICES: Final[dict[str, dict[str, Any]]] = COMPOSE["services"]
KVBUS: Final = {name: service for name, service in SERVICES.items() if service["image"] == "kvbus:local"}
"""The services that run kvbus's own image, in the order in which they start."""

PORTS: Final = (5557, 5558, 5657, 5658, 9477)


class Elsewhere:
    """Commands and files of the services, changed so that each service uses loopback and free ports."""

    def __init__(self, ports: dict[int, int]) -> None:
        self._ports = ports

    def moved(self, text: str) -> str:
        text = re.sub(r"(?<=//)(?:engine|kvbus)(?=:\d)|(?<=\")kvbus(?=:9477)", "127.0.0.1", text)
        return re.sub(r"(?<=:)\d{4}\b", lambda port: str(self._ports.get(int(port[0]), port[0])), text)

    def command(self, service: str) -> list[str]:
        return [self.moved(str(part)) for part in SERVICES[service]["command"]]

    def environment(self, service: str) -> dict[str, str]:
        return {name: self.moved(str(value)) for name, value in SERVICES[service].get("environment", {}).items()}


def mounts(service: str) -> dict[str, Path]:
    """Return the files of this repository that a service mounts, by their path in the container."""
    found = {}
    for volume in SERVICES[service].get("volumes", []):
        here, there, *_ = volume.split(":")
        if here not in COMPOSE["volumes"]:
            found[there] = (DEPLOY / here).resolve()
    return found


def kept(service: str) -> list[str]:
    """Return the paths in a service's container at which a named volume is mounted."""
    pairs = (volume.split(":")[:2] for volume in SERVICES[service].get("volumes", []))
    return [there for name, there in pairs if name in COMPOSE["volumes"]]
