"""Watches pods or EndpointSlices: each engine among them is found by its pod's name."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Final, Literal

from kvbus.config.section import Section, key
from kvbus.config.values import ApiUrl, Text
from kvbus.parts.discovery.contract import DiscoveryError, Engine, Services
from kvbus.parts.discovery.kubernetes.api import ACCOUNT, Api, Watch
from kvbus.parts.discovery.kubernetes.objects import Ports, of_pods, of_slices

log = logging.getLogger("kvbus.discovery.kubernetes")

OWN_NAMESPACE: Final = ACCOUNT / "namespace"


class KubernetesSettings(Section):
    """The keys of ``discover: {kubernetes: …}``."""

    selector: Text = key(..., "Labels of the pods, or of the EndpointSlices.", example="app=engine")
    namespace: Text | None = key(
        None, "Their namespace.", example="default", default_text="that of the pod in which kvbus runs"
    )
    resource: Literal["pods", "endpointslices"] = key(
        "pods",
        "What is watched. The slices of a Service have the label `kubernetes.io/service-name`.",
        example="pods",
    )
    port: Text = key(
        "kv-events",
        "Port of the publisher of rank 0, by its name in the pod (in the slice) or by its number. The annotation "
        "`kvbus/port` of a pod says more.",
        example="kv-events",
    )
    replay_port: Text = key(
        "kv-replay",
        "Port of the replay; a name that an engine does not have: it has no replay. The annotation "
        "`kvbus/replay-port` of a pod says more, and `kvbus/data-parallel-size` how many ranks it has.",
        example="kv-replay",
    )
    server: ApiUrl | None = key(
        None,
        "The API server; null: that of the cluster in which kvbus runs. Elsewhere `kubectl proxy` is one.",
        example="http://127.0.0.1:8001",
    )
    token_file: Path | None = key(
        None,
        "A bearer token for it.",
        example="/etc/kvbus/kubernetes/token",
        default_text="the service account's in a pod; none with `server`",
    )
    ca_file: Path | None = key(
        None,
        "The authority of its certificate, PEM.",
        example="/etc/kvbus/kubernetes/ca.crt",
        default_text="the cluster's in a pod; the system's with `server`",
    )


class KubernetesDiscoverer:
    """Follows a selector; see :class:`~kvbus.parts.discovery.contract.Discoverer`."""

    Settings = KubernetesSettings

    def __init__(self, settings: KubernetesSettings, services: Services) -> None:
        self._settings = settings
        self._ports = Ports(settings.port, settings.replay_port, services.data_parallel_size)
        self._without: list[str] = []

    async def watch(self) -> AsyncGenerator[tuple[Engine, ...], None]:
        """Yield the engines, at first and after each change of them."""
        settings = self._settings
        namespace = settings.namespace or _own_namespace()
        read = of_pods if settings.resource == "pods" else of_slices
        where = f"kubernetes namespace {namespace}"
        before: tuple[Engine, ...] | None = None
        api = Api(settings.server, settings.token_file, settings.ca_file)
        watch = Watch(api, settings.resource, namespace, settings.selector)
        async with api, aclosing(watch.states()) as states:
            async for objects in states:
                engines, without = read(objects.values(), self._ports, where)
                self._warn(without)
                if engines != before:
                    before = engines
                    yield engines

    def _warn(self, without: list[str]) -> None:
        """Say once which objects have no such port."""
        if without != self._without and without:
            text = "%s have no port %s, and are no engines: %s"
            log.warning(text, self._settings.resource, self._settings.port, ", ".join(without))
        self._without = without


def _own_namespace() -> str:
    try:
        return OWN_NAMESPACE.read_text().strip()
    except OSError as error:
        raise DiscoveryError(f"not in a pod, so namespace is needed: {error}") from error
