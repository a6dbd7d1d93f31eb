"""A discoverer that watches pods through the Kubernetes API. Each engine has the name of its pod."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Self

import aiohttp
import msgspec
from pydantic import BeforeValidator

from kvbus.common.errors import Problem
from kvbus.config.problems import shown
from kvbus.config.values import ApiUrl, Section, Text, key
from kvbus.parts.discovery.contract import (
    DiscoveryError,
    Engine,
    EntryError,
    Publisher,
    Services,
    fitting_name,
    host_in_url,
    publishers_at,
)

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Directory in which Kubernetes puts the files of the pod's service account.

They are kvbus's token, the API server's certificate authority, and the name of kvbus's namespace.
"""

WATCH: Final = 60
"""Time in seconds after which the API server ends a watch, as kvbus requests.

kvbus then starts another watch, which continues where the first one ended. So a dead connection is noticed within this
time.
"""
TIMEOUT: Final = 10.0
"""Timeout in seconds of reading the list of pods.

A watch has a timeout that is longer by :data:`WATCH` seconds, because the API server should end it after
:data:`WATCH` seconds.
"""
PAUSE: Final = 1.0
"""Minimum time in seconds from the start of one watch to the start of the next."""
MAX_LIST: Final = 64 * 1024 * 1024
"""Maximum size in bytes of the API server's list of pods."""
MAX_LINE: Final = 8 * 1024 * 1024
"""Maximum size in bytes of one watch event, which is one line of the API server's answer."""
GONE: Final = 410
"""HTTP status with which the API server refuses to continue a watch, because its ``resourceVersion`` is too old.

The API server no longer has the changes since that version, so kvbus reads the list of pods again.
"""

Objects = dict[str, dict[str, Any]]
"""Kubernetes objects, such as pods, as decoded JSON, by the name of the object."""


class GoneError(Exception):
    """The API server cannot continue a watch, because it no longer has the changes since the watch's version."""


class Api:
    """A client of the Kubernetes API server.

    It uses the pod's service account, or the configured credentials.

    Args:
        server: the base URL of the API server; None for the API server of the cluster in which kvbus runs.
        token_file: file with a bearer token. If it is None and ``server`` is None, the client uses the service
            account's token. If it is None and ``server`` is set, the client sends no token.
        ca_file: file with the certificate authority. If it is None and ``server`` is None, the client uses the
            cluster's certificate authority. If it is None and ``server`` is set, the client uses those of the system.

    Raises:
        DiscoveryError: ``server`` is None, and kvbus does not run in a cluster.
    """

    def __init__(self, server: str | None, token_file: Path | None, ca_file: Path | None) -> None:
        if server is None:
            try:
                host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
            except KeyError as error:
                text = f"kvbus does not run in a pod, so the key server is needed: {error} is not set"
                raise DiscoveryError(text) from error
            server = f"https://{host_in_url(host)}:{port}"
            token_file, ca_file = token_file or ACCOUNT / "token", ca_file or ACCOUNT / "ca.crt"
        self._server = server
        self._token_file = token_file
        self._ca_file = ca_file

    async def __aenter__(self) -> Self:
        """Open the HTTP session.

        Raises:
            DiscoveryError: the file of the certificate authority cannot be read.
        """
        try:
            context = await asyncio.to_thread(ssl.create_default_context, cafile=self._ca_file)
        except OSError as error:
            raise DiscoveryError(f"{self._ca_file}: {error.strerror or error}") from error
        # Clear this flag, which is set by default from Python 3.13 on. With it, certificate authorities without key
        # identifiers are refused, such as those of Amazon EKS.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str, query: dict[str, str], seconds: float) -> aiohttp.ClientResponse:
        """Send a GET request, and return the response. The caller reads the body of the response.

        Raises:
            DiscoveryError: the token file cannot be read.
            aiohttp.ClientError, TimeoutError: the API server does not answer.
        """
        headers = {"Accept": "application/json"}
        if self._token_file is not None:
            try:  # read the file for each request, because Kubernetes replaces the token every hour
                headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
            except OSError as error:
                raise DiscoveryError(f"{self._token_file}: {error.strerror or error}") from error
        timeout = aiohttp.ClientTimeout(total=seconds)
        return await self._session.get(
            self._server + path, params=query, headers=headers, timeout=timeout, allow_redirects=False
        )


class Watch:
    """A watch of the pods in one namespace that match a label selector.

    Args:
        api: the client of the API server.
        namespace: the namespace of the pods.
        selector: the label selector.
    """

    def __init__(self, api: Api, namespace: str, selector: str) -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._what = f"pods in {namespace}"
        self._selector = selector
        self._objects: Objects = {}
        self._version = ""

    async def states(self) -> AsyncGenerator[Objects, None]:
        """Yield all matching pods: first when the watch begins, then after each change of a pod.

        Raises:
            DiscoveryError: the API server cannot be reached, or its answer is not valid.
        """
        while True:
            await self._list()
            yield self._objects
            try:
                while True:
                    pause = asyncio.get_running_loop().time() + PAUSE
                    async for _ in self._changes():
                        yield self._objects
                    await asyncio.sleep(pause - asyncio.get_running_loop().time())
            except GoneError:
                pass

    async def _list(self) -> None:
        response = await self._get(TIMEOUT)
        try:
            text = bytearray()
            async for piece in response.content.iter_any():
                text += piece
                if len(text) > MAX_LIST:
                    raise DiscoveryError(f"{self._what}: the list has more than {MAX_LIST} bytes")
            found = self._decoded(bytes(text))
            self._objects = {each["metadata"]["name"]: each for each in found["items"] or ()}
            self._version = found["metadata"]["resourceVersion"]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error
        except (LookupError, TypeError) as error:
            raise DiscoveryError(f"{self._what}: the answer is not a list ({error!r})") from error
        finally:
            response.close()

    async def _changes(self) -> AsyncGenerator[None, None]:
        """Apply watch events to the list of pods until the API server ends the watch.

        Yield after each change of a pod.
        """
        response = await self._get(
            WATCH + TIMEOUT,
            watch="true",
            allowWatchBookmarks="true",
            resourceVersion=self._version,
            timeoutSeconds=str(WATCH),
        )
        try:
            rest = b""
            async for piece in response.content.iter_any():
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > MAX_LINE:
                    raise DiscoveryError(f"{self._what}: a watch event has more than {MAX_LINE} bytes")
                for line in filter(None, lines):
                    if self._change(self._decoded(line)):
                        yield
        except TimeoutError:
            return
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error
        except (LookupError, TypeError) as error:
            raise DiscoveryError(f"{self._what}: a line is not a watch event ({error!r})") from error
        finally:
            response.close()

    def _change(self, event: Any) -> bool:
        """Apply one watch event to the list of pods. Return whether the list has changed."""
        kind, of = event["type"], event["object"]
        if kind == "ERROR":
            if of.get("code") == GONE:
                raise GoneError
            raise DiscoveryError(f"{self._what}: {of.get('message') or of}")
        self._version = of["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return False
        name = of["metadata"]["name"]
        if kind == "DELETED":
            return self._objects.pop(name, None) is not None
        self._objects[name] = of
        return True

    async def _get(self, seconds: float, **query: str) -> aiohttp.ClientResponse:
        """Send a GET request, and return the response. The caller reads the body of the response.

        Raise an error if the HTTP status of the response is not 200.
        """
        try:
            response = await self._api.get(self._path, {"labelSelector": self._selector, **query}, seconds)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error
        if response.status == 200:
            return response
        try:
            body = await response.content.read(2000)
        except (aiohttp.ClientError, TimeoutError):
            body = b""
        finally:
            response.close()
        if response.status == GONE and query:
            raise GoneError
        raise DiscoveryError(f"{self._what}: {response.status} {_message(body) or response.reason}")

    def _decoded(self, text: bytes) -> Any:
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DiscoveryError(f"{self._what}: {error}") from error

    def _unreachable(self, error: BaseException) -> DiscoveryError:
        return DiscoveryError(f"{self._what}: {str(error) or type(error).__name__}")


def _message(status: bytes) -> str:
    """Return the message in ``status``, the JSON of a Status object of the Kubernetes API; empty if there is none."""
    try:
        return str(msgspec.json.decode(status)["message"])
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return ""


LIVE: Final = "kvbus/port"
REPLAY: Final = "kvbus/replay-port"
RANKS: Final = "kvbus/data-parallel-size"
"""Name of the pod annotation that has the number of ranks of the pod's engine.

The annotations :data:`LIVE` and :data:`REPLAY` have the ports. An annotation overrides the configuration for its pod.
"""

Object = dict[str, Any]


class Ports(NamedTuple):
    """The ports of an engine's live stream and replay, each as a name or a number, and the engine's number of ranks."""

    live: str
    replay: str
    ranks: int


def of_pods(pods: Iterable[Object], ports: Ports, where: str) -> tuple[Engine, ...]:
    """Return the engines in these pods.

    A pod is an engine as soon as it has an address, even if it is not ready, because an engine publishes events before
    it is ready. A pod is no longer an engine once Kubernetes deletes it, or once it has ended.

    Args:
        pods: the pods as decoded JSON.
        ports: the configured ports and number of ranks. A pod's annotations override them.
        where: a description of the namespace, for :attr:`Engine.where`.
    """
    found: list[Engine] = []
    for pod in pods:
        meta, status = pod.get("metadata") or {}, pod.get("status") or {}
        address = status.get("podIP")
        if not address or meta.get("deletionTimestamp") or status.get("phase") in {"Succeeded", "Failed"}:
            continue
        name = str(meta.get("name"))
        engine = Engine(fitting_name(name), (), f"{where}, pod {name}")
        try:
            ranks = _publishers(pod, meta.get("annotations") or {}, address, ports)
            found.append(replace(engine, publishers=ranks))
        except EntryError as error:
            found.append(replace(engine, faults=(error.problem,)))
    return tuple(sorted(found, key=lambda engine: engine.name))


def _publishers(pod: Object, notes: dict[str, str], address: str, ports: Ports) -> tuple[Publisher, ...]:
    """Return the publishers of the engine in a pod.

    Args:
        pod: the pod as decoded JSON.
        notes: the pod's annotations.
        address: the pod's IP address.
        ports: the configured ports and number of ranks.

    Raises:
        EntryError: the pod lacks the port of the live stream, or an annotation is invalid.
    """
    spec = pod.get("spec") or {}
    named = {
        port["name"]: port["containerPort"]
        for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
        for port in container.get("ports") or ()
        if port.get("name")
    }
    keys = (
        f"annotation {LIVE}" if LIVE in notes else "port",
        f"annotation {REPLAY}" if REPLAY in notes else "replay_port",
    )
    wanted = notes.get(LIVE, ports.live)
    live = _port(wanted, named)
    if live is None:
        has = f"only {', '.join(sorted(named))}" if named else "no named port"
        wrong = f"the pod has no port of this name, {has}; if the pod is no engine, change selector"
        raise EntryError(Problem(keys[0], wrong, wanted, "5557"))
    size = notes.get(RANKS, str(ports.ranks))
    if not (size.isascii() and size.isdigit() and 1 <= int(size[:5]) <= 4096):
        raise EntryError(Problem(f"annotation {RANKS}", "must be a whole number from 1 to 4096", shown(size), '"2"'))
    return publishers_at(address, live, _port(notes.get(REPLAY, ports.replay), named), int(size), keys)


def _port(wanted: str, named: dict[str, Any]) -> int | None:
    if wanted.isascii() and wanted.isdigit():
        return int(wanted[:6])
    port = named.get(wanted)
    return port if isinstance(port, int) else None


OWN_NAMESPACE: Final = ACCOUNT / "namespace"


PodPort = Annotated[Text, BeforeValidator(lambda port: str(port) if type(port) is int else port)]
"""The type of a configuration key that names a port of a pod, by name or number.

It converts an integer to text, because YAML and Helm read a number without quotes as an integer.
"""


class KubernetesSettings(Section):
    """The configuration keys of ``discover: {kubernetes: …}``."""

    selector: Text = key(..., "Label selector of the pods.", example="app=engine")
    namespace: Text | None = key(
        None, "Namespace of the pods.", example="default", default_text="that of the pod in which kvbus runs"
    )
    port: PodPort = key(
        "kv-events",
        "Port of rank 0's publisher, as a name in the pod or a number. A pod's annotation `kvbus/port` overrides it.",
        example="kv-events",
    )
    replay_port: PodPort = key(
        "kv-replay",
        "Replay port: the name of a port of the pod, or a number. From a pod without this port, kvbus gets no replay. "
        "The pod annotation `kvbus/replay-port` overrides it. The pod annotation `kvbus/data-parallel-size` is the "
        "number of ranks.",
        example="kv-replay",
    )
    server: ApiUrl | None = key(
        None,
        "URL of the API server, such as that of `kubectl proxy`. null: the API server of the cluster in which kvbus "
        "runs.",
        example="http://127.0.0.1:8001",
    )
    token_file: Path | None = key(
        None,
        "File with a bearer token for the API server.",
        example="/etc/kvbus/kubernetes/token",
        default_text="in a pod: the service account's token; with `server`: none",
    )
    ca_file: Path | None = key(
        None,
        "Certificate authority of the API server, PEM.",
        example="/etc/kvbus/kubernetes/ca.crt",
        default_text="in a pod: the cluster's authority; with `server`: the system's authorities",
    )


class KubernetesDiscoverer:
    """A discoverer that finds pods by their labels; see :class:`~kvbus.parts.discovery.contract.Discoverer`."""

    Settings = KubernetesSettings

    def __init__(self, settings: KubernetesSettings, services: Services) -> None:
        self._settings = settings
        self._ports = Ports(settings.port, settings.replay_port, services.data_parallel_size)

    async def watch(self) -> AsyncGenerator[tuple[Engine, ...], None]:
        """Yield the set of engines: first when watching begins, then after each change of the set."""
        settings = self._settings
        namespace = settings.namespace or _own_namespace()
        where = f"kubernetes namespace {namespace}"
        before: tuple[Engine, ...] | None = None
        api = Api(settings.server, settings.token_file, settings.ca_file)
        watch = Watch(api, namespace, settings.selector)
        async with api, aclosing(watch.states()) as states:
            async for objects in states:
                engines = of_pods(objects.values(), self._ports, where)
                if engines != before:
                    before = engines
                    yield engines


def _own_namespace() -> str:
    try:
        return OWN_NAMESPACE.read_text().strip()
    except OSError as error:
        raise DiscoveryError(f"kvbus does not run in a pod, so the key namespace is needed: {error}") from error
