"""Access to the paths of the HTTP port: for everybody, for programs on this machine (or in this pod), or by token.

A local program is recognised by both ends of its connection. A port-forward arrives on loopback, so it works too. A
request's headers cannot prove that a client is local. But browsers state truthfully which host name they ask for, and
which site's page sent the request. So kvbus can refuse pages of other sites, and names that an attacker has pointed to
loopback (DNS rebinding).

A principal proves itself by a bearer token, from anywhere and through any proxy. Browsers do not send one by
themselves.
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
"""Values of Sec-Fetch-Site for kvbus's own page, and for an address that a user typed."""

_HOW: Final = {
    HttpRefusal.PEER: (
        "only loopback may read it: ask {url} on the host of kvbus or in its container, or through "
        "`kubectl port-forward POD {port}` or `ssh -L {port}:127.0.0.1:{port} HOST`"
    ),
    HttpRefusal.FORWARDED: (
        "a proxy passed the request on (Forwarded, X-Forwarded-*, X-Real-IP or Via), so it is not known who asks: "
        "ask {url} without the proxy"
    ),
    HttpRefusal.HOST: (
        "the Host header has to be localhost, 127.0.0.1 or [::1], or one of http_allowed_hosts: ask {url}"
    ),
    HttpRefusal.CROSS_SITE: "a page of another site asked for it: enter {url} in the browser yourself",
    HttpRefusal.TOKEN: "the bearer token is none that may read: a line of http_tokens_file lets one in",
    HttpRefusal.RIGHTS: "the token is for status alone",
}

_TOKEN_IDS: Final = "token ids, which are what users wrote"
_CONTENT: Final = frozenset({"/blocks", "/events?output="})


def how_to_get_in(refusal: HttpRefusal, path: str, url: str) -> str:
    """Return a sentence that says how to get access.

    Args:
        refusal: why access was refused.
        path: the requested path.
        url: the URL of kvbus on this machine, without a path.
    """
    how = _HOW[refusal].format(url=f"{url}{path}", port=url.rpartition(":")[2])
    return f"{path} shows {_TOKEN_IDS if path in _CONTENT else 'how the bus is'}, and {how}"


class Caller(NamedTuple):
    """A client that may read.

    Attributes:
        name: the client's name in the log.
        content: whether it may read content too.
        token: its line of the tokens file; None for a program on this machine.
    """

    name: str
    content: bool = True
    token: Token | None = None


LOOPBACK: Final = Caller("loopback")


class Access:
    """The access rule for every path that is not open to everybody.

    Args:
        allowed_hosts: names allowed in the Host header, besides the local ones.
        credentials: the valid tokens.
    """

    def __init__(self, allowed_hosts: Iterable[str], credentials: Credentials | None = None) -> None:
        self._allowed = frozenset(host_name(host) for host in allowed_hosts)
        self.credentials = credentials or Credentials()

    def caller(self, request: web.Request, *, content: bool) -> Caller | HttpRefusal:
        """Return the client if it may read, else the reason why not."""
        refusal = self.refusal(request)
        if refusal is None:
            return LOOPBACK
        found = self._principal(request)
        if isinstance(found, Caller) and content and not found.content:
            return HttpRefusal.RIGHTS
        return refusal if found is None else found

    def holds(self, caller: Caller) -> bool:
        """Return whether a client still has access: its token is still valid, or it is local."""
        return caller.token is None or caller.token in self.credentials.tokens

    def _principal(self, request: web.Request) -> Caller | HttpRefusal | None:
        """Return the owner of the request's token, or why the token is invalid; None if it has none."""
        given = request.headers.getall("Authorization", [])
        if not given or not self.credentials.tokens:
            return None
        scheme, _, token = given[0].partition(" ")
        if len(given) > 1 or scheme.lower() != "bearer":
            return HttpRefusal.TOKEN
        found = find(self.credentials.tokens, token.strip())
        return HttpRefusal.TOKEN if found is None else Caller(found.name, found.content, found)

    def refusal(self, request: web.Request) -> HttpRefusal | None:
        """Return why a request does not count as local; None if it does."""
        # Check both ends: a service mesh's proxy sends everybody's requests from 127.0.0.6 to the pod's address.
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
        if not target.startswith("/") and not self._is_local(urlsplit(target).netloc):
            return HttpRefusal.HOST  # GET http://HOST/blocks: check the target's host too
        return None if _is_own_page(request, hosts[0]) else HttpRefusal.CROSS_SITE

    def _is_local(self, authority: str) -> bool:
        name = host_name(authority)
        return name is not None and (is_loopback(name) or name in self._allowed)


def _is_own_page(request: web.Request, host: str) -> bool:
    """Return whether the request does not come from a page of another site."""
    origins = request.headers.getall("Origin", [])
    sites = request.headers.getall("Sec-Fetch-Site", [])
    ours = f"{request.scheme}://{host}".lower()
    return all(origin.lower() == ours for origin in origins) and _OWN_PAGE.issuperset(sites)
