"""Tokens of service accounts at kvbus's HTTP port, reviewed by a real API server with the rights that the chart gives."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from ruamel.yaml import YAML

from kvbus.core.stats import HttpRefusal
from kvbus.parts.reviews import kubernetes
from kvbus.parts.reviews.kubernetes import Reviewer
from tests.chart.charts import ROOT
from tests.cluster.accounts import account_of
from tests.cluster.api import Api, Object
from tests.cluster.control_plane import ControlPlane
from tests.security.test_http_principals import REMOTE, Callers, another_machine, callers
from tests.system.bus import eventually

__all__ = ["another_machine"]

RIGHTS: Final = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding"}


def reader() -> Object:
    """The ClusterRole that docs/KUBERNETES.md says a reader needs."""
    text = (ROOT / "docs" / "KUBERNETES.md").read_text()
    (block,) = (each for each in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "nonResourceURLs" in each)
    return dict(YAML(typ="safe", pure=True).load(block))


class Routers:
    """A namespace with accounts of routers, and kvbus's own in another one."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.bus = api.namespace()
        self.account = account_of(api, self.bus, {"kvbus": {"http": {"tokenReview": "kvbus"}}})
        self.namespace = api.namespace()
        api.apply(reader())
        self.role("reads")
        for name in ("reads", "none"):
            account = {"apiVersion": "v1", "kind": "ServiceAccount"}
            api.create({**account, "metadata": {"name": name, "namespace": self.namespace}})

    def role(self, account: str) -> None:
        subject = {"kind": "ServiceAccount", "name": account, "namespace": self.namespace}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": reader()["metadata"]["name"]}
        metadata = {"name": f"{self.namespace}-{account}"}
        self.api.create({**RIGHTS, "metadata": metadata, "roleRef": role, "subjects": [subject]})

    def token(self, account: str, *audiences: str, bound: Object | None = None) -> str:
        return self.api.token_of(self.namespace, account, bound, audiences=list(audiences or ("kvbus",)))

    def bound(self) -> Object:
        """What a token can be bound to."""
        metadata = {"name": "bound", "namespace": self.namespace}
        return self.api.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata})


@pytest.fixture
def routers(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Routers]:
    """kvbus has its account's files, and no review is kept."""
    made = Routers(api)
    assert api.ca_file is not None
    (tmp_path / "ca.crt").write_bytes(api.ca_file.read_bytes())
    (tmp_path / "token").write_text(api.token_of(made.bus, made.account))
    monkeypatch.setattr(kubernetes, "ACCOUNT", tmp_path)
    monkeypatch.setattr(kubernetes, "KEPT", 0.0)
    monkeypatch.setattr(kubernetes, "KEPT_REFUSED", 0.0)
    at(api, monkeypatch)
    yield made
    api.delete(reader())


def at(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the API server of the pod."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", api.url.rpartition(":")[2])


async def review(token: str, path: str = "/blocks", method: str = "GET", *, rights: bool = True) -> Any:
    """The account's name, or why there is none."""
    outcome = await Reviewer("kvbus", rights=rights).review(token, method, path)
    return outcome if isinstance(outcome, HttpRefusal) else outcome[0]


async def becomes(wanted: Any, token: str) -> None:
    """Wait: rights and the ends of tokens reach an API server's caches after a moment."""
    said: list[Any] = []

    async def ask() -> None:
        while True:
            said.append(await review(token))
            await asyncio.sleep(0.1)

    asking = asyncio.create_task(ask())
    try:
        await eventually(lambda: asking.done() or said[-1:] == [wanted], f"{wanted}")
    finally:
        asking.cancel()
        await asyncio.wait([asking])


async def test_whoever_has_the_role_in_the_docs_may_read_that_and_nothing_else(routers: Routers) -> None:
    token = routers.token("reads")
    name = f"system:serviceaccount:{routers.namespace}:reads"
    await becomes(name, token)
    assert await review(token, "/events") == name
    assert await review(token, "/history") is HttpRefusal.RIGHTS
    nobody = routers.token("none")
    assert await review(nobody) is HttpRefusal.RIGHTS
    assert await review(nobody, rights=False) == f"system:serviceaccount:{routers.namespace}:none"
    await asyncio.to_thread(routers.role, "none")
    await becomes(f"system:serviceaccount:{routers.namespace}:none", nobody)


async def test_a_token_for_somebody_else_a_forged_one_and_one_that_has_ended_are_none(
    routers: Routers, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = routers.bound()
    token = routers.token("reads", bound=secret)
    await becomes(f"system:serviceaccount:{routers.namespace}:reads", token)
    good = SimpleNamespace(aud=["kvbus"], exp=2.0**40)
    head, claims, signature = token.split(".")
    other = routers.token("none").split(".")
    assert await review(f"{head}.{claims}.{other[2]}") is HttpRefusal.TOKEN
    assert await review(f"{head}.{other[1]}.{signature}") is HttpRefusal.TOKEN
    for audience in ("other", "https://kubernetes.default.svc"):
        stranger = routers.token("reads", audience)
        assert await review(stranger) is HttpRefusal.TOKEN
        with monkeypatch.context() as unchecked:  # the server is asked, and says the same
            unchecked.setattr(kubernetes, "_claims", lambda _token: good)
            assert await review(stranger) is HttpRefusal.TOKEN
    await asyncio.to_thread(routers.api.delete, secret)
    await becomes(HttpRefusal.TOKEN, token)


async def test_without_the_charts_binding_kvbus_may_have_nobody_reviewed(
    routers: Routers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "token").write_text(routers.api.token_of(routers.bus, "default"))
    assert await review(routers.token("reads")) is HttpRefusal.REVIEW
    assert "it answers a TokenReview with status 403" in caplog.text


async def test_an_api_server_that_is_away_lets_nobody_in(
    routers: Routers, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    mortal = plane.api_server()
    at(mortal.api, monkeypatch)
    token = routers.token("reads")
    name = f"system:serviceaccount:{routers.namespace}:reads"
    await becomes(name, token)
    mortal.kill()
    assert await review(token) is HttpRefusal.REVIEW
    await asyncio.to_thread(mortal.start)
    await becomes(name, token)


async def test_a_bus_gives_blocks_to_an_account_and_counts_whom_it_refuses(routers: Routers, tmp_path: Path) -> None:
    reads, none = routers.token("reads"), routers.token("none")
    await becomes(f"system:serviceaccount:{routers.namespace}:reads", reads)
    settings: dict[str, Any] = {"http_token_review": "kvbus"}
    async with callers(tmp_path, **settings) as here:

        async def ask(method: str, path: str, token: str) -> int:
            header = f"Authorization: Bearer {token}\r\n"
            return (await asyncio.to_thread(Callers.ask, here, method, path, header, local=REMOTE)).status

        assert await ask("GET", "/blocks", reads) == 200
        assert await ask("GET", "/blocks", none) == 403
        assert await ask("GET", "/blocks", routers.token("reads", "other")) == 403
        assert here.bus.daemon.process.http_refused == {HttpRefusal.RIGHTS: 1, HttpRefusal.TOKEN: 1}
