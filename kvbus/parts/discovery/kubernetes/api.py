"""The Kubernetes API as far as a list that is watched: one list, then its changes, from one resourceVersion on."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
import msgspec

from kvbus.parts.discovery.contract import DiscoveryError, host_in_url

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod has its token, the API server's authority and its own namespace."""

WATCH: Final = 60
"""Seconds after which the server ends a watch, and another goes on where it ended: a dead connection is noticed."""
TIMEOUT: Final = 10.0
"""Seconds for a list, and for a watch beyond its end."""
PAUSE: Final = 1.0
"""Least seconds between two watches."""
MAX_LIST: Final = 64 * 1024 * 1024
"""Bytes of a list."""
MAX_LINE: Final = 8 * 1024 * 1024
"""Bytes of a change."""
GONE: Final = 410
"""The resourceVersion is too old: what has changed since then is not known, so the list is read again."""

PATHS: Final = {
    "pods": "/api/v1/namespaces/{namespace}/pods",
    "endpointslices": "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
}

Objects = dict[str, dict[str, Any]]
"""By name."""


class GoneError(Exception):
    """The watch cannot go on where it was."""


class Api:
    """Connections to the API server, as the service account of the pod, or as the settings say.

    Args:
        server: base URL; None: of the cluster in which this runs.
        token_file: a bearer token; None: the service account's in the cluster, else none.
        ca_file: the authority of the server's certificate; None: the cluster's there, else those of the system.

    Raises:
        DiscoveryError: there is no cluster.
    """

    def __init__(self, server: str | None, token_file: Path | None, ca_file: Path | None) -> None:
        if server is None:
            try:
                host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
            except KeyError as error:
                raise DiscoveryError(f"not in a pod, so server is needed: {error} is not set") from error
            server = f"https://{host_in_url(host)}:{port}"
            token_file, ca_file = token_file or ACCOUNT / "token", ca_file or ACCOUNT / "ca.crt"
        self._server = server
        self._token_file = token_file
        self._ca_file = ca_file

    async def __aenter__(self) -> Self:
        """Begin.

        Raises:
            DiscoveryError: the authority cannot be read.
        """
        try:
            context = await asyncio.to_thread(ssl.create_default_context, cafile=self._ca_file)
        except OSError as error:
            raise DiscoveryError(f"{self._ca_file}: {error.strerror or error}") from error
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str, query: dict[str, str], seconds: float) -> aiohttp.ClientResponse:
        """Ask, and return the response with its body unread.

        Raises:
            DiscoveryError: the token cannot be read.
            aiohttp.ClientError, TimeoutError: nobody answers.
        """
        headers = {"Accept": "application/json"}
        if self._token_file is not None:
            try:  # it is another one every hour
                headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
            except OSError as error:
                raise DiscoveryError(f"{self._token_file}: {error.strerror or error}") from error
        timeout = aiohttp.ClientTimeout(total=seconds)
        return await self._session.get(
            self._server + path, params=query, headers=headers, timeout=timeout, allow_redirects=False
        )


class Watch:
    """Follows the objects of one kind with certain labels.

    Args:
        api: the client.
        resource: a key of :data:`PATHS`.
        namespace: of the objects.
        selector: their labels.
    """

    def __init__(self, api: Api, resource: str, namespace: str, selector: str) -> None:
        self._api = api
        self._path = PATHS[resource].format(namespace=namespace)
        self._what = f"{resource} in {namespace}"
        self._selector = selector
        self._objects: Objects = {}
        self._version = ""

    async def states(self) -> AsyncGenerator[Objects, None]:
        """Yield all objects, first and after each change.

        Raises:
            DiscoveryError: the API cannot be asked.
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
            raise DiscoveryError(f"{self._what}: the answer is no list ({error!r})") from error
        finally:
            response.close()

    async def _changes(self) -> AsyncGenerator[None, None]:
        """Take in one change after the other, until the server ends the watch."""
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
                    raise DiscoveryError(f"{self._what}: a change has more than {MAX_LINE} bytes")
                for line in filter(None, lines):
                    if self._change(self._decoded(line)):
                        yield
        except TimeoutError:
            return
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error
        except (LookupError, TypeError) as error:
            raise DiscoveryError(f"{self._what}: a line is no change ({error!r})") from error
        finally:
            response.close()

    def _change(self, event: Any) -> bool:
        """Take in one change; whether the objects are other ones now."""
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
        """Ask, and return the response with its body unread."""
        try:
            response = await self._api.get(self._path, {"labelSelector": self._selector, **query}, seconds)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error
        if response.status == 200:
            return response
        try:
            said = await response.content.read(2000)
        except (aiohttp.ClientError, TimeoutError):
            said = b""
        finally:
            response.close()
        if response.status == GONE and query:
            raise GoneError
        raise DiscoveryError(f"{self._what}: {response.status} {_message(said) or response.reason}")

    def _decoded(self, text: bytes) -> Any:
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DiscoveryError(f"{self._what}: {error}") from error

    def _unreachable(self, error: BaseException) -> DiscoveryError:
        return DiscoveryError(f"{self._what}: {str(error) or type(error).__name__}")


def _message(status: bytes) -> str:
    """What a Status of the API says, if it is one."""
    try:
        return str(msgspec.json.decode(status)["message"])
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return ""
