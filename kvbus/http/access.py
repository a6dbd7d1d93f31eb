"""The rules that decide which client may read a path of the HTTP port.

Some paths are open to every client. The other paths are open to programs on this machine (or in this pod), and to
clients with a valid token.

A program is local if both ends of its connection have loopback addresses. A connection through `kubectl port-forward`
arrives on loopback, so its client counts as local. A request's headers cannot prove that a client is local. But a
browser states truthfully the host name that it requests, and the site whose page sent the request. So kvbus can refuse
requests from pages of other sites, and requests for a host name that an attacker has pointed to loopback (DNS
rebinding).

A client that is not local sends a bearer token, from any address and through any proxy. A browser never adds such a
token to a request by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from aiohttp import web

from kvbus.config.endpoints import host_name, is_loopback
from kvbus.core.stats import HttpRefusal
from kvbus.http.credentials import Credentials, Token, find

_FORWARDING: Final = frozenset({"forwarded", "via", "x-real-ip"})
_OWN_PAGE: Final = frozenset({"same-origin", "none"})
"""Values of the header Sec-Fetch-Site with which a browser may read the paths that are open to local clients.

``same-origin`` marks a request from kvbus's own page, and ``none`` marks a request for an address that a user has
typed.
"""

_HOW: Final = {
    HttpRefusal.PEER: (
        "only loopback may read it: ask {url} on the host of kvbus or in its container, or through "
        "`kubectl port-forward POD {port}` or `ssh -L {port}:127.0.0.1:{port} HOST`"
    ),
    HttpRefusal.FORWARDED: (
        "a proxy passed the request on (Forwarded, X-Forwarded-*, X-Real-IP or Via), so its sender is not known: "
        "ask {url} without the proxy"
    ),
    HttpRefusal.HOST: (
        "the Host header has to be localhost, 127.0.0.1 or [::1], or one of http_allowed_hosts: ask {url}"
    ),
    HttpRefusal.CROSS_SITE: "a page of another website has sent the request: enter {url} in the browser yourself",
    HttpRefusal.TOKEN: "the bearer token is not valid: http_tokens_file has no line for it",
    HttpRefusal.RIGHTS: "the token allows only reading the status",
}

_TOKEN_IDS: Final = "token ids, which are what users wrote"
_CONTENT: Final = frozenset({"/blocks", "/events?output="})


def how_to_get_in(refusal: HttpRefusal, path: str, url: str) -> str:
    """Return a sentence that explains to a refused client how to get access.

    Args:
        refusal: the reason for the refusal.
        path: the requested path.
        url: the URL of kvbus on this machine, without a path.
    """
    how = _HOW[refusal].format(url=f"{url}{path}", port=url.rpartition(":")[2])
    return f"{path} shows {_TOKEN_IDS if path in _CONTENT else 'the state of the bus'}, and {how}"


class Caller(NamedTuple):
    """A client that may read the requested path of the HTTP port.

    Attributes:
        name: the client's name in the log.
        content: whether the client may read blocks and batches, besides the status.
        token: the client's line of ``http_tokens_file``; None for a local program.
    """

    name: str
    content: bool = True
    token: Token | None = None


LOOPBACK: Final = Caller("loopback")


class Access:
    """The check of every request for a path that is not open to all clients.

    Args:
        allowed_hosts: the values that are allowed in the Host header, besides the names of this machine.
        credentials: the valid tokens.
    """

    def __init__(self, allowed_hosts: Iterable[str], credentials: Credentials | None = None) -> None:
        self._allowed = frozenset(host_name(host) for host in allowed_hosts)
        self.credentials = credentials or Credentials()

    def caller(self, request: web.Request, *, content: bool) -> Caller | HttpRefusal:
        """Return the client that sent a request, or the reason why it has no access.

        Args:
            request: the request.
            content: whether the requested path shows blocks or batches.
        """
        refusal = self.refusal(request)
        if refusal is None:
            return LOOPBACK
        found = self._principal(request)
        if isinstance(found, Caller) and content and not found.content:
            return HttpRefusal.RIGHTS
        return refusal if found is None else found

    def holds(self, caller: Caller) -> bool:
        """Return whether a client still has access.

        A local client always has access. Any other client has access while its token is valid.
        """
        return caller.token is None or caller.token in self.credentials.tokens

    def _principal(self, request: web.Request) -> Caller | HttpRefusal | None:
        """Return the owner of the request's token, or the reason why the token is invalid; None without a token."""
        given = request.headers.getall("Authorization", [])
        if not given or not self.credentials.tokens:
            return None
        scheme, _, token = given[0].partition(" ")
        if len(given) > 1 or scheme.lower() != "bearer":
            return HttpRefusal.TOKEN
        found = find(self.credentials.tokens, token.strip())
        return HttpRefusal.TOKEN if found is None else Caller(found.name, found.content, found)

    def refusal(self, request: web.Request) -> HttpRefusal | None:
        """Check that a request comes from a local program that kvbus trusts.

        Return None if it does, otherwise the reason.
        """
        # Check both ends of the connection. The proxy of a service mesh forwards the requests of all clients from
        # 127.0.0.6 to the pod's address, so a loopback address of the client alone does not prove that the client is
        # local.
        for name in ("peername", "sockname"):
            end = None if request.transport is None else request.transport.get_extra_info(name)
            if not end or not is_loopback(end[0]):
                return HttpRefusal.PEER
        for name in map(str.lower, request.headers):
            if name in _FORWARDING or name.startswith("x-forwarded-"):
                return HttpRefusal.FORWARDED
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1 or not self._is_local(hosts[0]):
            return HttpRefusal.HOST
        target = request.raw_path
        # Besides the Host header, the request line may name a host, as in GET http://HOST/blocks.
        if not target.startswith("/") and not self._is_local(urlsplit(target).netloc):
            return HttpRefusal.HOST
        return None if _is_own_page(request, hosts[0]) else HttpRefusal.CROSS_SITE

    def _is_local(self, authority: str) -> bool:
        name = host_name(authority)
        return name is not None and (is_loopback(name) or name in self._allowed)


def _is_own_page(request: web.Request, host: str) -> bool:
    """Return whether the request was sent by kvbus's own page or by a program, and not by a page of another site."""
    origins = request.headers.getall("Origin", [])
    sites = request.headers.getall("Sec-Fetch-Site", [])
    ours = f"{request.scheme}://{host}".lower()
    return all(origin.lower() == ours for origin in origins) and _OWN_PAGE.issuperset(sites)
