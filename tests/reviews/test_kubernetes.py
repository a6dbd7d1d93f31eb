"""Tokens of service accounts, against an HTTPS server with the bodies that the API server's reference documents."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvbus.common.errors import ConfigError
from kvbus.config import load, parts
from kvbus.core.stats import HttpRefusal
from kvbus.parts.reviews import kubernetes
from kvbus.parts.reviews.kubernetes import Outcome, Reviewer
from tests.ports import free_port
from tests.security.certificates import Authority
from tests.security.test_http_principals import REMOTE, Callers, another_machine, callers
from tests.system.bus import eventually

OWN = "the.pods.own"
NAME = "system:serviceaccount:routing:router-a"

__all__ = ["another_machine"]


def jwt(**claims: Any) -> str:
    said = {"aud": ["kvbus"], "exp": time.time() + 3600, "sub": NAME, **claims}
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in ({}, said, {}))


class ApiServer:
    """Plays the API server. ``tokens`` are those that it knows, ``rights`` the paths that everybody may ask for."""

    def __init__(self) -> None:
        self.tokens: dict[str, dict[str, Any]] = {}
        self.rights: set[tuple[str, str]] = set()
        self.aware = True
        """It knows of audiences."""
        self.status = 201
        self.body: str | None = None
        self.held: asyncio.Event | None = None
        """Answers wait for it."""
        self.asked: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.asked.append(asked)
        if self.held is not None:
            await self.held.wait()
        assert request.headers["Authorization"] == f"Bearer {OWN}"
        spec = asked["spec"]
        if self.body is not None or self.status >= 300:
            return web.Response(status=self.status, text=self.body or "{}", headers={"Location": "/elsewhere"})
        if asked["kind"] == "TokenReview":
            assert (asked["apiVersion"], spec["audiences"]) == ("authentication.k8s.io/v1", ["kvbus"])
            user = self.tokens.get(spec["token"])
            status: dict[str, Any] = {"user": {}, "error": "[invalid bearer token, token lookup failed]"}
            if user is not None:
                status = {"authenticated": True, "user": user, **({"audiences": ["kvbus"]} if self.aware else {})}
        else:
            assert (asked["apiVersion"], asked["kind"]) == ("authorization.k8s.io/v1", "SubjectAccessReview")
            assert (spec["user"], spec["groups"]) == (NAME, ["system:serviceaccounts"])
            of = spec["nonResourceAttributes"]
            status = {"allowed": (of["verb"], of["path"]) in self.rights, "reason": "RBAC: …"}
        return web.json_response({**asked, "metadata": {}, "status": status}, status=self.status)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("cluster"))


@pytest.fixture
async def api(authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    issued = authority.issue("kube-apiserver")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.certificate, issued.key)
    server = ApiServer()
    app = web.Application()
    app.router.add_post("/apis/authentication.k8s.io/v1/tokenreviews", server.answer)
    app.router.add_post("/apis/authorization.k8s.io/v1/subjectaccessreviews", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text(f"{OWN}\n")
    (account / "ca.crt").write_bytes(authority.certificate.read_bytes())
    monkeypatch.setattr(kubernetes, "ACCOUNT", account)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(runner.addresses[0][1]))
    yield server
    if server.held is not None:
        server.held.set()
    await runner.cleanup()


USER = {
    "username": NAME,
    "uid": "014fbff9",
    "groups": ["system:serviceaccounts"],
    "extra": {"authentication.kubernetes.io/pod-name": ["router-a-0"]},
}


@pytest.fixture
def token(api: ApiServer) -> str:
    made = jwt()
    api.tokens[made] = USER
    api.rights.add(("get", "/blocks"))
    return made


async def review(reviewer: Reviewer, token: str, method: str = "GET", path: str = "/blocks") -> Outcome:
    return await reviewer.review(token, method, path)


async def let_in(reviewer: Reviewer, token: str, method: str = "GET") -> tuple[str, float]:
    outcome = await review(reviewer, token, method)
    assert not isinstance(outcome, HttpRefusal)
    return outcome


async def test_an_account_with_the_right_may_read_and_is_asked_for_once(api: ApiServer, token: str) -> None:
    reviewer = Reviewer("kvbus", rights=True)
    for method in ("GET", "HEAD", "GET"):
        name, until = await let_in(reviewer, token, method)
        assert name == NAME
        assert 50 < until - time.time() <= 60
    assert [asked["kind"] for asked in api.asked] == ["TokenReview", "SubjectAccessReview"]
    assert api.asked[1]["spec"]["extra"] == USER["extra"]
    assert await review(reviewer, token, "POST", "/blocks") is HttpRefusal.RIGHTS
    assert await review(reviewer, token, "POST", "/blocks") is HttpRefusal.RIGHTS
    assert len(api.asked) == 4  # a refusal is kept too


async def test_without_the_rights_its_token_is_enough(api: ApiServer, token: str) -> None:
    api.rights.clear()
    assert isinstance(await review(Reviewer("kvbus", rights=False), token), tuple)
    assert [asked["kind"] for asked in api.asked] == ["TokenReview"]


async def test_it_holds_no_longer_than_the_token(api: ApiServer) -> None:
    token = jwt(exp=time.time() + 5)
    api.tokens[token] = USER
    _, until = await let_in(Reviewer("kvbus", rights=False), token)
    assert until - time.time() <= 5


async def test_a_review_is_made_again_after_a_while(
    api: ApiServer, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "KEPT", 0.0)
    monkeypatch.setattr(kubernetes, "KEPT_REFUSED", 0.0)
    reviewer = Reviewer("kvbus", rights=True)
    assert isinstance(await review(reviewer, token), tuple)
    api.tokens.clear()
    assert await review(reviewer, token) is HttpRefusal.TOKEN
    api.tokens[token] = USER
    assert isinstance(await review(reviewer, token), tuple)


@pytest.mark.parametrize(
    "odd",
    ids=range(16),  # the tokens have a time in them, and names of tests must not
    argvalues=[
        "",
        "kvbus_abc",
        "a.b",
        "..",
        "a.b.c.d",
        "a.@.c",
        "a.bnVsbA.c",
        f"a.{base64.b64encode(b'[' * 5000).decode()}.c",
        f"a.{base64.b64encode(b'{1:' + b'[' * 5000).decode()}.c",
        "a.\udcff.c",
        jwt(aud="other"),
        jwt(aud=["kvbus2"]),
        jwt(aud="not-kvbus-"),
        jwt(aud=None),
        jwt(exp=1),
        jwt(exp="soon"),
    ],
)
async def test_what_cannot_be_good_is_not_sent_on(api: ApiServer, odd: str) -> None:
    assert await review(Reviewer("kvbus", rights=True), odd) is HttpRefusal.TOKEN
    assert api.asked == []


async def test_a_forged_token_is_refused(api: ApiServer, token: str) -> None:
    assert await review(Reviewer("kvbus", rights=True), jwt(sub="forged")) is HttpRefusal.TOKEN


async def test_an_api_server_that_knows_no_audiences_lets_nobody_in(api: ApiServer, token: str) -> None:
    api.aware = False
    assert await review(Reviewer("kvbus", rights=True), token) is HttpRefusal.TOKEN


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (403, None), (401, None), (500, None), (302, None), (200, "<html>"), (201, "null"), (201, "{}"),
        (201, '{"status": 1}'), (201, '{"status": {"authenticated": "yes", "user": {"username": "a"}}}'),
        (201, "[" * 100_000),
    ],
)  # fmt: skip
async def test_an_answer_that_is_none_lets_nobody_in(
    api: ApiServer, token: str, status: int, body: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    api.status, api.body = status, body
    reviewer = Reviewer("kvbus", rights=True)
    assert await review(reviewer, token) is HttpRefusal.REVIEW
    assert "cannot review a token" in caplog.text
    assert token not in caplog.text
    assert OWN not in caplog.text
    api.status, api.body = 201, None
    assert isinstance(await review(reviewer, token), tuple)  # a failure is not kept


async def test_a_slow_one_is_given_up_and_only_so_many_are_waited_for(
    api: ApiServer, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "TIMEOUT", 30.0)
    api.held = asyncio.Event()
    reviewer = Reviewer("kvbus", rights=True)
    waiting = [asyncio.create_task(review(reviewer, jwt(n=n))) for n in range(kubernetes.MAX_UNDER_WAY)]
    await eventually(lambda: len(api.asked) == kubernetes.MAX_UNDER_WAY, "all asked")
    assert await review(reviewer, token) is HttpRefusal.REVIEW
    assert len(api.asked) == kubernetes.MAX_UNDER_WAY
    api.held.set()
    assert set(await asyncio.gather(*waiting)) == {HttpRefusal.TOKEN}
    monkeypatch.setattr(kubernetes, "TIMEOUT", 0.05)
    api.held = asyncio.Event()
    assert await review(reviewer, token) is HttpRefusal.REVIEW


async def test_what_is_kept_is_bounded(api: ApiServer, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "MAX_KEPT", 2)
    reviewer = Reviewer("kvbus", rights=True)
    for each in (jwt(n=1), token, jwt(n=2), token, jwt(n=3), token):
        await review(reviewer, each)
    assert [asked["spec"].get("token") for asked in api.asked].count(token) == 1
    before = len(api.asked)
    await review(reviewer, jwt(n=1))
    assert len(api.asked) == before + 1


@pytest.fixture
def broken(request: pytest.FixtureRequest, api: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if request.param == "another":
        foreign = Authority(tmp_path, "foreign")
        (tmp_path / "account" / "ca.crt").write_bytes(foreign.certificate.read_bytes())
    elif request.param == "gone":
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(free_port()))
    elif request.param == "no pod":
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    elif request.param == "odd":
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "no host")
    else:
        (tmp_path / "account" / request.param).unlink()


@pytest.mark.parametrize("broken", ["another", "gone", "no pod", "odd", "token", "ca.crt"], indirect=True)
@pytest.mark.usefixtures("broken")
async def test_without_the_api_server_nobody_gets_in(api: ApiServer, token: str) -> None:
    assert await review(Reviewer("kvbus", rights=True), token) is HttpRefusal.REVIEW
    assert api.asked == []


def bearer(token: str) -> str:
    return f"Authorization: Bearer {token}\r\n"


async def test_a_bus_gives_blocks_to_an_account_and_counts_whom_it_refuses(
    api: ApiServer, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"http_token_review": "kvbus"}
    async with callers(tmp_path, **settings) as here:

        async def ask(path: str, token: str) -> int:
            return (await asyncio.to_thread(Callers.ask, here, "GET", path, bearer(token), local=REMOTE)).status

        refused = here.bus.daemon.process.http_refused
        assert await ask("/blocks", token) == 200
        assert await ask("/events?output=routers", token) == 403
        assert await ask("/blocks", jwt(sub="forged")) == 403
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
        assert await ask("/blocks", jwt(n=1)) == 403
        assert refused == {HttpRefusal.RIGHTS: 1, HttpRefusal.TOKEN: 1, HttpRefusal.REVIEW: 1}
        assert await ask("/blocks", token) == 200  # the review is kept


def test_without_the_part_a_configuration_that_asks_for_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"sources": [{"endpoint": "ipc:///e"}], "outputs": [{"endpoint": "ipc:///o"}]}
    with pytest.raises(ConfigError, match="must name an audience"):
        load(None, env={}, overrides={**given, "http_token_review": ""})
    found = parts.installed
    monkeypatch.setattr(parts, "installed", lambda group: [] if group == parts.REVIEWS else found(group))
    with pytest.raises(ConfigError, match=r"http_token_review.*is not installed"):
        load(None, env={}, overrides={**given, "http_token_review": "kvbus"})
