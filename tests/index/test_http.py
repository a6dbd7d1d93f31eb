"""Tests for the HTTP port of `kvbus index`: the formats of its answers, its access rules, and its limits."""

from __future__ import annotations

import base64
import json
import re
import socket
from array import array
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvbus.http.credentials import line_of, new_token
from kvbus.index.questions import MAX_BODY_BYTES, MAX_HASHES, MAX_ITEMS, MAX_QUERIES
from tests.doubles.bus import wait_for
from tests.index.programs import Engine, Index, Truth, http, running, tokens_of

LABELS = ("source", "rank", "worker", "medium", "outcome", "version")
TOKEN, STATUS = new_token(), new_token()


class Scene:
    """An engine, and an index that follows the engine's own stream."""

    def __init__(self, index: Index, truth: Truth) -> None:
        self.index = index
        self.truth = truth
        self.chain = max(truth.chains(), key=len)


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Iterator[Scene]:
    directory = tmp_path_factory.mktemp("index")
    engine = Engine(directory, "engine")
    truth = engine.truth()
    file = directory / "tokens"
    file.write_text(f"{line_of('r', TOKEN, content=True)}\n{line_of('s', STATUS, content=False)}\n")
    file.chmod(0o600)
    index = Index(directory, f"pod-a={engine.endpoint},{engine.replay}", "--copies", "--tokens-file", str(file))
    scene = Scene(index, truth)
    blocks = len({(block["hash"], block["medium"]) for block in truth.blocks})
    with running(engine, index):
        wait_for(index.ready, "the index is ready")
        wait_for(lambda: total(scene) == blocks, "the whole workload is known")
        yield scene


def metrics(scene: Scene) -> dict[str, dict[tuple[str, ...], float]]:
    text = http(f"{scene.index.http}/metrics")[1].decode()
    return {
        family.name: {
            tuple(sample.labels[name] for name in LABELS if name in sample.labels): sample.value
            for sample in family.samples
        }
        for family in text_string_to_metric_families(text)
    }


def total(scene: Scene) -> float:
    return sum(metrics(scene).get("kvbus_index_blocks", {}).values())


def test_an_index_answers_each_form_of_a_query_equally(scene):
    tokens, hashes = tokens_of(scene.chain), [block["hash"] for block in scene.chain]
    packed = array("I", tokens).tobytes()
    ((blocks, tiers),) = scene.truth.expected(scene.chain).values()
    whole = {
        "results": [
            {
                "matches": [
                    {
                        "source": "pod-a",
                        "rank": 0,
                        "worker": "pod-a",
                        "blocks": blocks,
                        "tokens": len(tokens),
                        "block_size": len(tokens) // blocks,
                        "tiers": tiers,
                        "state": "live",
                        "partial": False,
                    }
                ]
            }
        ],
        "incomplete": [],
    }
    ask = scene.index.ask
    assert ask(tokens=tokens) == ask(tokens=base64.b64encode(packed).decode()) == whole
    written = [name if isinstance(name, str) else str(name) for name in hashes]
    assert ask(hashes=hashes) == ask(hashes=written) == whole
    for question in ({"tokens": tokens}, {"tokens": packed}):
        body = msgspec.msgpack.encode(question)
        assert scene.index.post(body, Content_Type="application/msgpack") == (200, whole)
    several = ask(queries=[{"tokens": tokens}, {"tokens": tokens, "salt": "s"}, {"tokens": tokens, "lora": "l"}])
    assert several["results"] == [whole["results"][0], {"matches": []}, {"matches": []}]


BAD = {
    b"": "Input data was truncated",
    b"[]": "Expected `object`",
    b"{}": "question 0: either tokens or hashes",
    b'{"tokens": [1], "hashes": [1]}': "question 0: either tokens or hashes",
    b'{"tokens": [-1]}': "Expected `int` >= 0",
    b'{"tokens": [4294967296]}': "Expected `int` <= 4294967295",
    b'{"tokens": [1.5]}': "Expected `int`",
    b'{"tokens": "AAA="}': "packed tokens have four bytes each, and there are 2 bytes",
    b'{"hashes": ["xyz"]}': "hashes[0] is neither an integer of 64 bits nor a byte string in hexadecimal",
    b'{"hashes": [1, "ab"]}': "hashes must be either all integers or all byte strings in hexadecimal",
    b'{"hashes": [1], "lora": "l"}': "leave lora and salt out",
    b'{"token": [1]}': "unknown field `token`",
    b'{"queries": [{"tokens": [1]}], "salt": "s"}': "queries must be the only field",
    b'{"queries": [{"tokens": [1]}, {}]}': "question 1: either tokens or hashes",
}


@pytest.mark.parametrize("body", BAD)
def test_an_index_refuses_a_malformed_query_with_a_message(scene, body):
    status, answer = scene.index.post(body)
    assert (status, list(answer)) == (400, ["error"])
    assert BAD[body] in answer["error"]


LARGE = {
    "body": b" " * (MAX_BODY_BYTES + 1),
    "questions": json.dumps({"queries": [{"tokens": [1]}] * (MAX_QUERIES + 1)}).encode(),
    "items": json.dumps({"tokens": [1] * (MAX_ITEMS + 1)}).encode(),
    "hashes": json.dumps({"hashes": [1] * (MAX_HASHES + 1)}).encode(),
}


@pytest.mark.parametrize("kind", LARGE)
def test_an_index_refuses_a_query_that_is_too_large(scene, kind):
    before = metrics(scene)["kvbus_index_questions"]["too_large",]
    assert scene.index.post(LARGE[kind])[0] == 413
    assert metrics(scene)["kvbus_index_questions"]["too_large",] == before + 1


def test_an_index_answers_a_query_of_the_maximum_size(scene):
    assert scene.index.ask(tokens=[1] * MAX_ITEMS) == {"results": [{"matches": []}], "incomplete": []}
    assert scene.index.ask(hashes=[1] * MAX_HASHES) == {"results": [{"matches": []}], "incomplete": []}


def test_an_index_refuses_a_compressed_body(scene):
    status, answer = scene.index.post(b"{}", Content_Encoding="gzip")
    assert (status, "send it without one" in answer["error"]) == (400, True)


FORBIDDEN = [
    ({"Host": "evil.example"}, "the Host header has to be localhost"),
    ({"X_Forwarded_For": "10.0.0.1"}, "a proxy forwarded the request"),
    ({"Origin": "http://evil.example"}, "a page of another site sent the request"),
    ({"Sec_Fetch_Site": "cross-site"}, "a page of another site sent the request"),
    ({"Host": "index.example", "Authorization": f"Bearer {new_token()}"}, "the bearer token is unknown"),
    ({"Host": "index.example", "Authorization": "Basic eDp5"}, "the bearer token is unknown"),
    ({"Host": "index.example", "Authorization": f"Bearer {STATUS}"}, "the bearer token has no right to ask"),
]


@pytest.mark.parametrize(("headers", "why"), FORBIDDEN)
def test_an_index_refuses_a_forbidden_client_with_advice(scene, headers, why):
    status, answer = scene.index.post(b'{"tokens": [1]}', **headers)
    assert (status, why in answer["error"]) == (403, True)


def test_a_client_with_a_token_may_query_from_every_address(scene):
    headers = {"Host": "index.example", "X_Forwarded_For": "10.0.0.1", "Authorization": f"Bearer {TOKEN}"}
    assert scene.index.post(b'{"tokens": [1]}', **headers)[0] == 200


def test_an_index_closes_a_connection_without_a_request(scene):
    address = urlsplit(scene.index.http)
    with socket.create_connection((address.hostname, address.port), 60) as client:
        assert client.recv(1) == b""


def test_the_metrics_of_an_index_show_its_blocks_and_workers(scene):
    found = metrics(scene)
    counts: dict[str, int] = {}
    for _, medium in {(block["hash"], (block["medium"] or "GPU").upper()) for block in scene.truth.blocks}:
        counts[medium] = counts.get(medium, 0) + 1
    own = "pod-a", "0", "pod-a"
    assert found["kvbus_index_blocks"] == {(*own, medium): count for medium, count in counts.items()}
    assert found["kvbus_index_live"] == {own: 1.0}
    assert found["kvbus_index_partial"] == {own: 0.0}
    assert found["kvbus_index_workers"] == {(): 1.0}
    before = found["kvbus_index_questions"]["answered",]
    scene.index.ask(tokens=[1])
    assert metrics(scene)["kvbus_index_questions"]["answered",] == before + 1


def test_the_openapi_description_lists_every_path_of_the_index(scene):
    described = json.loads(http(f"{scene.index.http}/openapi.json")[1])
    for path, methods in described["paths"].items():
        if "get" in methods:
            assert http(f"{scene.index.http}{path}")[0] == 200, path
    referred = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described)))
    assert referred == set(described["components"]["schemas"])
    assert "/query" in described["paths"]


def test_an_index_refuses_unknown_paths_and_methods_in_json(scene):
    status, body = http(f"{scene.index.http}/blocks")
    assert (status, json.loads(body)) == (404, {"error": "GET /blocks: not found"})
    status, body = http(f"{scene.index.http}/query")
    assert (status, json.loads(body)) == (405, {"error": "GET /query: method not allowed"})


def test_a_client_that_disconnects_in_its_body_does_not_disturb_the_index(scene):
    address = urlsplit(scene.index.http)
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(b"POST /query HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
    assert scene.index.matches(tokens=tokens_of(scene.chain))


CHUNKED = b"Transfer-Encoding: chunked\r\n"
BODIES = {
    "chunk size": CHUNKED + b"\r\nzz\r\nhello\r\n0\r\n\r\n",
    "chunk end": CHUNKED + b"\r\n5\r\nhelloXX\r\n0\r\n\r\n",
    "two lengths": CHUNKED + b"Content-Length: 5\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "deflate": b"Content-Encoding: deflate\r\nContent-Length: 5\r\n\r\nhello",
    "gzip": b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello",
    "br": b"Content-Encoding: br\r\nContent-Length: 5\r\n\r\nhello",
    "cut off": b"Content-Length: 50\r\n\r\nhello",
    "cut off in a chunk": CHUNKED + b"\r\n50\r\nhello",
}


@pytest.mark.parametrize("host", ["localhost", "evil.example"])
@pytest.mark.parametrize("path", ["/query", "/metrics", "/nowhere"])
@pytest.mark.parametrize("kind", BODIES)
def test_a_malformed_body_gets_a_sentence_and_no_traceback_in_the_log(scene, kind, path, host):
    """This also holds if the client has no right to ask."""
    address = urlsplit(scene.index.http)
    with socket.create_connection((address.hostname, address.port)) as client:
        client.settimeout(60)
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n".encode() + BODIES[kind])
        if kind.startswith("cut off"):
            client.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    head, _, text = answer.partition(b"\r\n\r\n")
    if not kind.startswith("cut off"):
        assert head.split()[1] in {b"400", b"403", b"404", b"405"}, answer
        assert text.strip()
    assert scene.index.matches(tokens=tokens_of(scene.chain))
    assert "Traceback" not in scene.index.log.read_text()


def test_an_index_refuses_a_seventeenth_concurrent_request(scene):
    """While sixteen requests wait for the rest of their bodies, the index refuses a seventeenth request.

    When the bodies have come, it answers the sixteen requests.
    """
    address = urlsplit(scene.index.http)
    waiting = []
    try:
        for _ in range(16):
            client = socket.create_connection((address.hostname, address.port))
            client.sendall(
                b"POST /query HTTP/1.1\r\nHost: localhost\r\nContent-Length: 13\r\nExpect: 100-continue\r\n\r\n"
            )
            assert client.recv(100).startswith(b"HTTP/1.1 100")
            waiting.append(client)
        wait_for(lambda: scene.index.post(b'{"tokens": [1]}')[0] == 429, "the seventeenth refused")
        for client in waiting:
            client.sendall(b'{"tokens":[]}')
            assert client.recv(100).startswith(b"HTTP/1.1 200")
    finally:
        for client in waiting:
            client.close()
    wait_for(lambda: scene.index.post(b'{"tokens": [1]}')[0] == 200, "there is room again")
