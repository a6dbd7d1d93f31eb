"""``/openapi.json`` names every path that there is and no other, and what it says of answers is so."""

import contextlib
import json
import re

import msgspec

from kvbus.admin.http import AdminServer
from kvbus.admin.openapi import JSON, PATHS, BlockEntry, Problem, document
from kvbus.admin.query import Answer
from kvbus.admin.query_body import Request
from tests.admin.test_query import LARGE, TOKENS, asking
from tests.doubles.payloads import store
from tests.doubles.socket_router import SocketRouter
from tests.system.bus import eventually

ASKED = {"/history": "?source=engine"}
"""What a path cannot do without."""


async def test_it_describes_every_path_and_no_other():
    document.cache_clear()  # it is made here, whichever tests have asked for it before
    async with asking() as here:
        paths = AdminServer(here.bus.daemon).paths()
        served = {(path, method) for path, methods in paths.items() for method in methods if method != "HEAD"}
        async with here.session.get(here.url.replace("/query", "/openapi.json")) as answer:
            described = await answer.json()
    operations = {(path, method.upper()) for path, item in described["paths"].items() for method in item}
    assert operations == served
    names = [operation["operationId"] for item in described["paths"].values() for operation in item.values()]
    assert len(set(names)) == len(names)
    referred = set(re.findall(r'"#/components/schemas/(\w+)"', document().decode()))
    assert referred == set(described["components"]["schemas"])


async def test_every_answer_is_as_it_says():
    async with asking(analytics=True) as here:
        await here.say({"type": "BlockStored"}, store([LARGE + 1], parent=77))  # one is refused
        base = here.url.removesuffix("/query")
        with contextlib.closing(SocketRouter(here.bus.out, here.bus.out_replay)) as router:
            router.subscribe()
            await eventually(lambda: any(each.routers for each in here.bus.daemon.drivers), "the router connected")
            for path in PATHS:
                if path.method == "post" or path.kind == "text/event-stream":
                    continue
                async with here.session.get(base + path.path + ASKED.get(path.path, "")) as answer:
                    assert (answer.status, answer.content_type) == (200, path.kind), path
                    text = await answer.text()
                if path.kind == JSON:
                    found = msgspec.json.decode(text, type=path.answer)
                    assert found, path
                    # a key that it does not name is one too many
                    assert json.loads(msgspec.json.encode(found)) == json.loads(text), path
                if path.answer is BlockEntry:
                    lines = [msgspec.json.decode(line, type=BlockEntry) for line in text.splitlines()]
                    assert LARGE in {line["hash"] for line in lines}


async def test_questions_and_refusals_are_as_it_says():
    async with asking() as here:
        body = msgspec.json.encode(Request(tokens=TOKENS))
        status, answer = await here.post(body)
        assert status == 200
        assert msgspec.convert(answer, Answer).results[0].matches[0].blocks == 3
        (path,) = [path for path in PATHS if path.method == "post"]
        for bad, code in ((b"{}", 400), (b" " * 2**20 + b"{}", 413)):
            status, answer = await here.post(bad)
            assert status == code
            assert status in path.problems
            assert msgspec.convert(answer, Problem)
        async with here.session.get(here.url.replace("/query", "/blocks?nonsense=1")) as answer:
            assert msgspec.json.decode(await answer.text(), type=Problem)


def test_what_shows_content_takes_a_credential_from_elsewhere() -> None:
    described = msgspec.json.decode(document())
    taken = {path: next(iter(each.values())).get("security") for path, each in described["paths"].items()}
    schemes: list[dict[str, list[str]]] = [{}, {"token": []}, {"certificate": []}]
    assert {path: security for path, security in taken.items() if security} == dict.fromkeys(
        ("/events", "/blocks", "/query"), schemes
    )
    assert set(described["components"]["securitySchemes"]) == {"token", "certificate"}
