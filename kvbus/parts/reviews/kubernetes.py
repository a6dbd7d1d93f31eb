"""Service accounts' tokens, reviewed by the Kubernetes API server.

TokenReview says whose a token is, and SubjectAccessReview whether that account may ask for the path, a nonResourceURL
of a ClusterRole, as metrics endpoints of controllers do it. Answers are kept for a bounded time. Strangers cost the API
server little: a token goes there only if it says of itself that it is for our audience and has not expired, and a few
reviews may be under way at once.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import os
import ssl
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from kvbus.core.stats import HttpRefusal

log = logging.getLogger("kvbus.reviews.kubernetes")

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod has its own token, and the API server's authority."""

TIMEOUT: Final = 3.0
"""Seconds for all reviews of a request."""

KEPT: Final = 60.0
"""Seconds for which somebody who may read is not reviewed again, and after which an answer under way ends."""

KEPT_REFUSED: Final = 10.0
"""Seconds for which a refusal is."""

MAX_KEPT: Final = 1024
"""Reviews that are kept. The one that was used least lately makes room."""

MAX_UNDER_WAY: Final = 8
"""Reviews at once. One more is refused."""

_TOKENS: Final = "authentication.k8s.io/v1", "TokenReview", "tokenreviews"
_RIGHTS: Final = "authorization.k8s.io/v1", "SubjectAccessReview", "subjectaccessreviews"

T = TypeVar("T", bound=msgspec.Struct)

Outcome = tuple[str, float] | HttpRefusal
"""The account's name and the time of day until which that holds, or why there is none."""


class _Claims(msgspec.Struct):
    """What a token says of itself, which nobody has checked yet."""

    aud: str | list[str]
    exp: float


class _User(msgspec.Struct):
    username: str = ""
    uid: str = ""
    groups: list[str] = []
    extra: dict[str, list[str]] = {}


class _TokenStatus(msgspec.Struct):
    authenticated: bool = False
    user: _User = msgspec.field(default_factory=_User)
    audiences: list[str] = []


class _TokenReview(msgspec.Struct):
    status: _TokenStatus


class _RightStatus(msgspec.Struct):
    allowed: bool = False
    denied: bool = False


class _AccessReview(msgspec.Struct):
    status: _RightStatus


class Reviewer:
    """Asks the API server of the cluster that it runs in.

    Args:
        audience: what tokens have to be for.
        rights: whether an account also needs the right to the path.
    """

    def __init__(self, audience: str, *, rights: bool) -> None:
        self._audience = audience
        self._rights = rights
        self._kept: OrderedDict[tuple[bytes, str, str], tuple[Outcome, float]] = OrderedDict()
        self._under_way = 0

    async def review(self, token: str, method: str, path: str) -> Outcome:
        """Say whose a token is."""
        claims = _claims(token)
        if claims is None or self._audience not in claims.aud or claims.exp <= time.time():
            return HttpRefusal.TOKEN
        verb = "get" if method == "HEAD" else method.lower()
        key = hashlib.sha256(token.encode()).digest(), verb, path
        outcome, until = self._kept.get(key, (HttpRefusal.REVIEW, 0.0))
        if time.monotonic() < until:
            self._kept.move_to_end(key)
            return outcome
        if self._under_way >= MAX_UNDER_WAY:
            return HttpRefusal.REVIEW
        self._under_way += 1
        try:
            async with asyncio.timeout(TIMEOUT):
                found = await self._ask(token, verb, path)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            log.warning("the Kubernetes API cannot review a token: %s", _why(error))
            return HttpRefusal.REVIEW
        finally:
            self._under_way -= 1
        kept = KEPT_REFUSED
        if isinstance(found, HttpRefusal):  # which is a text, too
            outcome = found
        else:
            outcome, kept = (found.username, min(time.time() + KEPT, claims.exp)), KEPT
        self._kept[key] = outcome, time.monotonic() + kept
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return outcome

    async def _ask(self, token: str, verb: str, path: str) -> _User | HttpRefusal:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ValueError("KUBERNETES_SERVICE_HOST is not set, so this is no pod")
        # read each time, for both are replaced while the pod runs
        own = (ACCOUNT / "token").read_text(encoding="ascii").strip()
        connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=ACCOUNT / "ca.crt"))
        api = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        async with aiohttp.ClientSession(api, connector=connector, headers={"Authorization": f"Bearer {own}"}) as api_:
            spec: dict[str, Any] = {"token": token, "audiences": [self._audience]}
            status = (await _post(api_, *_TOKENS, spec, _TokenReview)).status
            user = status.user
            # an API server that knows no audiences leaves them out, and would let in a token for another service
            if not status.authenticated or not user.username or self._audience not in status.audiences:
                return HttpRefusal.TOKEN
            if self._rights:
                who = {"user": user.username, "uid": user.uid, "groups": user.groups, "extra": user.extra}
                spec = {**who, "nonResourceAttributes": {"path": path, "verb": verb}}
                right = (await _post(api_, *_RIGHTS, spec, _AccessReview)).status
                if right.denied or not right.allowed:
                    return HttpRefusal.RIGHTS
            return user


async def _post(api: aiohttp.ClientSession, group: str, kind: str, name: str, spec: dict[str, Any], of: type[T]) -> T:
    body = {"apiVersion": group, "kind": kind, "spec": spec}
    async with api.post(f"/apis/{group}/{name}", json=body, allow_redirects=False) as response:
        if response.status not in {200, 201}:
            raise ValueError(f"it answers a {kind} with status {response.status}")
        return msgspec.json.decode(await response.read(), type=of)


def _claims(token: str) -> _Claims | None:
    parts = token.split(".")
    if len(parts) != 3 or not all(parts):
        return None
    try:
        claims = msgspec.json.decode(base64.b64decode(parts[1] + "==", altchars=b"-_"), type=_Claims)
    except (ValueError, RecursionError):
        return None
    claims.aud = [claims.aud] if isinstance(claims.aud, str) else claims.aud
    return claims


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT:g} s"
    if isinstance(error, msgspec.ValidationError | msgspec.DecodeError):
        return "its answer is none"  # the text would quote it
    return str(error) or type(error).__name__
