"""Access to token ids, which are prompts, and to what tells of them: for programs on this machine (or in this pod).

A port-forward arrives on loopback, so it works too. A request's headers prove nothing, with one exception: a browser
states truly which host name it asks for, and which site's page asks. So kvbus can refuse a page of another site, and a
name that somebody has pointed to loopback (DNS rebinding).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from aiohttp import web

from kvbus.config.endpoints import host_name, is_loopback
from kvbus.core.stats import HttpRefusal

_FORWARDING: Final = frozenset({"forwarded", "via", "x-real-ip"})
_OWN_PAGE: Final = frozenset({"same-origin", "none"})
"""Sec-Fetch-Site of our own page, and of an address that a user typed."""

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
}

_TOKEN_IDS: Final = "token ids, which are what users wrote"
_SHOWN: Final = {"/query": "which prompts are cached, which tells of what users wrote"}


def how_to_get_in(refusal: HttpRefusal, path: str, port: int) -> str:
    """Return a sentence that says how to get access."""
    how = _HOW[refusal].format(url=f"http://127.0.0.1:{port}{path}", port=port)
    return f"{path} shows {_SHOWN.get(path, _TOKEN_IDS)}, and {how}"


class Access:
    """The rule for every path whose answer has token ids.

    Args:
        allowed_hosts: names allowed in the Host header, besides the local ones.
    """

    def __init__(self, allowed_hosts: Iterable[str]) -> None:
        self._allowed = frozenset(host_name(host) for host in allowed_hosts)

    def refusal(self, request: web.Request) -> HttpRefusal | None:
        """Return why to refuse a request; None for a request that may read."""
        # Check both ends: a service mesh's proxy sends everybody's requests from 127.0.0.6 to the pod's address.
        ends = (request.get_extra_info("peername"), request.get_extra_info("sockname"))
        if not all(end and is_loopback(end[0]) for end in ends):
            return HttpRefusal.PEER
        names = {name.lower() for name in request.headers}
        if names & _FORWARDING or any(name.startswith("x-forwarded-") for name in names):
            return HttpRefusal.FORWARDED
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1 or not self._is_local(hosts[0]):
            return HttpRefusal.HOST
        if not request.raw_path.startswith("/") and not self._is_local(request.url.raw_authority):
            return HttpRefusal.HOST  # GET http://HOST/blocks: check the target's host too
        origins = request.headers.getall("Origin", [])
        sites = request.headers.getall("Sec-Fetch-Site", [])
        ours = f"http://{hosts[0]}".lower()
        if not all(origin.lower() == ours for origin in origins) or not _OWN_PAGE.issuperset(sites):
            return HttpRefusal.CROSS_SITE
        return None

    def _is_local(self, authority: str) -> bool:
        name = host_name(authority)
        return name is not None and (is_loopback(name) or name in self._allowed)
