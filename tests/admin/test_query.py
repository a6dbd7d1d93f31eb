"""``POST /query`` of a running bus: what it answers, to whom, and what it refuses."""

import asyncio
import base64
import collections
import contextlib
import gzip
import io
import itertools
import json
from array import array

import aiohttp
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvbus.admin import http, query_body, query_index, query_text
from kvbus.admin import query as module
from kvbus.admin.pace import Pace
from kvbus.admin.query_hashes import names_of, some_names
from kvbus.admin.query_text import Texts
from kvbus.core.blocks.prefix_index import PrefixIndex
from kvbus.core.blocks.prefix_labels import packed
from kvbus.core.source import Source
from kvbus.core.stats import ProcessStats
from kvbus.transport.engine.publisher import EnginePublisher
from tests.admin.hashes import plain
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import removed, store
from tests.generators import driven
from tests.system.bus import eventually, running_bus

SIZE = 16
TOKENS = list(range(5 * SIZE))
LARGE = 6280583736533942967
"""An integer that a reader of doubles would change."""


FIRST = (store([LARGE, 2, 3], tokens=TOKENS[: 3 * SIZE]), store([LARGE], medium="CPU", tokens=TOKENS[:SIZE]))


class Asking:
    """A bus, its engine, and questions to it."""

    def __init__(self, bus, engine, session):
        self.bus = bus
        self.engine = engine
        self.session = session
        host, port = bus.daemon.http_address
        self.url = f"http://{host}:{port}/query"
        self.published = 0

    async def say(self, *events):
        self.engine.publish(batch(*events))
        self.published += 1
        await eventually(lambda: self.bus.source.sequencer.next == self.published, "the batch relayed")

    async def post(self, body, **more):
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        async with self.session.post(self.url, data=data, **more) as answer:
            return answer.status, await answer.json()

    async def ask(self, **query):
        status, answer = await self.post(query)
        assert status == 200, answer
        return answer

    @property
    def outcomes(self):
        return dict(self.bus.daemon.process.queries)


@contextlib.asynccontextmanager
async def asking(*events, **settings):
    async with (
        running_bus(worker="pod-a", **settings) as bus,
        aiohttp.ClientSession() as session,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await eventually(lambda: bus.source.state == "live", "the bus in sync with its engine")
        await engine.wait_for_subscriber(60)
        here = Asking(bus, engine, session)
        await here.say(*(events or FIRST))
        yield here


BEST = {
    "source": "engine",
    "rank": 0,
    "worker": "pod-a",
    "blocks": 3,
    "tokens": 3 * SIZE,
    "block_size": SIZE,
    "tiers": {"CPU": 1, "GPU": 3},
    "state": "live",
    "partial": False,
}


async def test_who_holds_the_longest_prefix_by_tokens_and_by_hashes():
    async with asking() as here:
        whole = {"results": [{"matches": [BEST]}], "incomplete": []}
        assert await here.ask(tokens=TOKENS) == whole
        for hashes in ([LARGE, 2, 3, 4], [str(LARGE), "2", "0x3"], [str(LARGE), 2, "3"]):
            assert await here.ask(hashes=hashes) == whole
        packed = array("I", TOKENS).tobytes()
        assert await here.ask(tokens=base64.b64encode(packed).decode()) == whole
        for tokens in (TOKENS, packed):
            body = msgspec.msgpack.encode({"tokens": tokens})
            assert await here.post(body, headers={"Content-Type": "application/msgpack"}) == (200, whole)
        assert await here.ask(tokens=TOKENS[1:]) == {"results": [{"matches": []}], "incomplete": []}
        # what comes later is in the next answer
        await here.say(store([4], parent=3, tokens=TOKENS[3 * SIZE : 4 * SIZE]))
        (result,) = (await here.ask(tokens=TOKENS))["results"]
        assert [match["blocks"] for match in result["matches"]] == [4]
        many = await here.ask(queries=[{"tokens": TOKENS}, {"hashes": ["77"]}, {"tokens": TOKENS, "salt": "s"}])
        assert [[match["blocks"] for match in result["matches"]] for result in many["results"]] == [[4], [], []]
        assert here.outcomes == {"answered": 10}


async def test_a_source_with_names_of_its_own_is_asked_in_a_turn_of_its_own(monkeypatch):
    """A hundred of them take longer than the stream may wait."""
    turns = []

    class Watched(Pace):
        async def _turn(self, asking):
            await super()._turn(asking)
            turns.append(asking)

    monkeypatch.setattr(http, "Pace", Watched)
    async with asking(*FIRST, store([77], tokens=TOKENS[:SIZE])) as here:
        whole = {"results": [{"matches": [BEST]}], "incomplete": []}
        assert await here.ask(hashes=[LARGE, 2, 3]) == whole
        assert await here.ask(hashes=[LARGE, 2, 3, 77, 78]) == {
            "results": [{"matches": [BEST | {"blocks": 4, "tokens": 4 * SIZE, "tiers": {"CPU": 1, "GPU": 4}}]}],
            "incomplete": [],
        }
        least = []
        for seconds in (60.0, 0.0):
            monkeypatch.setattr(module, "SLICE", seconds)
            turns.clear()
            assert await here.ask(hashes=[LARGE, 2, 3]) == whole
            least.append(len(turns))
        assert least[1] == least[0] + 1


async def test_byte_hashes_are_hexadecimal_and_adapters_have_their_own_blocks():
    names = [bytes([n]) * 32 for n in (0x11, 0xAB)]
    event = store(names, tokens=TOKENS[: 2 * SIZE], lora_name="a", extra_keys=[["a", "s"], ["a"]])
    async with asking(event) as here:
        for query in ({"hashes": [name.hex() for name in names]}, {"tokens": TOKENS, "lora": "a", "salt": "s"}):
            (result,) = (await here.ask(**query))["results"]
            assert [match["blocks"] for match in result["matches"]] == [2], query
        (result,) = (await here.ask(tokens=TOKENS))["results"]
        assert not result["matches"]


async def test_sources_that_may_hold_more_are_named():
    async with asking(source_timeout=60) as here:
        await here.ask(tokens=TOKENS)
        here.engine.close()
        await eventually(lambda: here.bus.source.state != "live", "the engine gone")
        answer = await here.ask(tokens=TOKENS)
        ((match,),) = [result["matches"] for result in answer["results"]]
        assert match["state"] != "live"
        assert answer["incomplete"] == [{name: match[name] for name in ("source", "rank", "state", "partial")}]


@pytest.mark.parametrize("query", [{"tokens": TOKENS}, {"hashes": [LARGE]}, {"tokens": [7] * SIZE}])
async def test_a_source_that_heals_behind_a_look_at_its_blocks_is_still_named(monkeypatch, query):
    """What was found is of the moment before, when the source may have held more."""
    partial = True

    def heal():
        nonlocal partial
        partial = False

    def looked(real):
        def call(*args, **more):
            asyncio.get_running_loop().call_soon(heal)
            return real(*args, **more)

        return call

    async with asking() as here:
        await here.ask(tokens=TOKENS)
        monkeypatch.setattr(Source, "partial", property(lambda _: partial))
        monkeypatch.setattr(PrefixIndex, "matches", looked(PrefixIndex.matches))
        monkeypatch.setattr(PrefixIndex, "named", looked(PrefixIndex.named))
        answer = await here.ask(**query)
        assert answer["incomplete"] == [{"source": "engine", "rank": 0, "state": "live", "partial": True}]
        assert all(match["partial"] for match in answer["results"][0]["matches"])
        assert not partial
        assert not (await here.ask(**query))["incomplete"]


BAD = {
    b"": "Input data was truncated",
    b"[]": "Expected `object`",
    b"\xff": "malformed",
    b"{}": "either tokens or hashes",
    b'{"tokens": [1], "hashes": ["1"]}': "either tokens or hashes",
    b'{"tokens": null}': "either tokens or hashes",
    b'{"token": [1]}': "unknown field `token`",
    b'{"tokens": [1.5]}': "Expected `int`",
    b'{"tokens": ["1"]}': "Expected `int`",
    b'{"tokens": [-1]}': "Expected `int` >= 0",
    b'{"tokens": [4294967296]}': "Expected `int` <= 4294967295",
    b'{"tokens": [1e400]}': "Number out of range",
    b'{"tokens": "AAE="}': "packed tokens are four bytes each, and there are 2",
    b'{"tokens": "?"}': "Invalid base64",
    b'{"tokens": 7}': "Expected `bytes | array | null`",
    b'{"tokens": [1], "lora": []}': "Expected `int | str | null`",
    b'{"tokens": [1], "salt": 7}': "Expected `str | null`",
    b'{"hashes": [18446744073709551616]}': "64 bits",
    b'{"hashes": ["1", "xyz"]}': "hashes[1] is neither",
    b'{"hashes": ["ABC"]}': "hashes[0] is neither",
    b'{"hashes": [""]}': "hashes[0] is neither",
    b'{"hashes": [" 1"]}': "hashes[0] is neither",
    b'{"hashes": ["1_0"]}': "hashes[0] is neither",
    b'{"hashes": ["-9223372036854775809"]}': "hashes[0] is neither",
    b'{"hashes": ["aa", -5]}': "all integers, or all byte strings",
    b'{"hashes": ["1"], "salt": "s"}': "leave lora and salt out",
    b'{"queries": [{"tokens": [1]}], "tokens": [1]}': "queries stands alone",
    b'{"queries": [{"tokens": [1]}, {}]}': "question 1: either tokens or hashes",
    b'{"queries": [{"queries": []}]}': "unknown field `queries`",
    b'{"queries": [7]}': "Expected `object`",
    b'{"tokens": ' + b"[" * 5000: "Expected `int`",
}


async def test_bad_bodies_are_refused_with_a_sentence_and_the_next_one_is_answered():
    async with asking() as here:
        await here.ask(tokens=TOKENS)
        for body, text in BAD.items():
            status, answer = await here.post(body)
            assert (status, *answer) == (400, "error"), body
            assert text in answer["error"], body
        assert here.outcomes == {"answered": 1, "invalid": len(BAD)}
        assert (await here.ask(queries=[]))["results"] == []
        assert (await here.ask(tokens=[]))["results"] == [{"matches": []}]
        assert (await here.ask(hashes=[]))["results"] == [{"matches": []}]
        cut = json.dumps({"tokens": TOKENS, "salt": "é"}).encode()
        for end in range(0, len(cut), 7):
            assert (await here.post(cut[:end]))[0] == 400


def keeping():
    """A reader that keeps what it reads."""
    texts = Texts(ProcessStats())
    texts.keep()
    return texts


def taken_out(body, texts):
    """What is made of a body in turns, and how many turns it was besides the last one."""
    found, turns = driven(texts.in_pieces(body, query_body.MAX_QUERIES))
    return *found, turns


ODD = st.sampled_from(
    """1 22 , , [ ] { } " \\ -1 null "tokens" : "tokens":[7,8] ]},{"tokens":[ "salt":"x" "\\u0074okens":[1] 4294967296 é "12" "abcd" "-7" "hashes" ],"hashes":[ 18446744073709551616""".encode().split()
)


def questions(body, lists=()):
    """What a body asks, or the status with which it is refused."""
    try:
        asked, _ = query_body.read(body, lists)
        readings = [
            plain(driven(names_of(query.hashes or []))[0] if names is None else names) for query, names in asked
        ]
    except query_body.RefusedError as refused:
        return refused.status
    except ValueError as error:  # a hash that is none
        return str(error)
    for query, _ in asked:
        query.tokens = packed(query.tokens) if isinstance(query.tokens, list) else query.tokens
    return [
        (query.tokens, query.hashes is None or names, query.lora, query.salt)
        for (query, _), names in zip(asked, readings, strict=True)
    ]


@given(st.lists(ODD, max_size=12).map(b"".join), st.integers(1, 4))
@example(b"1,", 1)
@example(b"1,,2", 1)
@example(b'1,2],"\\u0074okens":[0', 1)
@example(b'1,2],"tokens":[3', 1)
@example(b'1,2],"salt":"\\"tokens\\":[3', 1)
@example(b'1,2],"salt":"tokens', 1)
@example(b'1,2],"hashes":[3', 1)
@example(b'12,"34"],"salt":"\\"hashes\\":[3', 1)
@example(b'"1,2","3"', 1)
@example(b'"12","34",56', 1)
@example(b'"12","abcd"', 1)
@example(b'"abcd","5"', 1)
@example(b'"a]b"', 1)
def test_a_body_read_in_pieces_asks_what_it_asks_read_whole(odd, size):
    texts = keeping()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_text, "PIECE", size)
        patch.setattr(query_text, "KEPT", 2000)
        bodies = [b'{"%b":[' % name + odd for name in (b"tokens", b"hashes")]
        bodies += [b'{"%b":[%b]}' % (name, odd) for name in (b"tokens", b"hashes")]
        for body in (odd, *bodies, *[b'{"queries":[%b,{"tokens":[1]}]}' % each for each in bodies]):
            for _ in range(2):
                short, lists, _ = taken_out(body, texts)
                assert questions(short, lists) == questions(body)


def prompt_of(ids):
    return json.dumps({"tokens": ids, "salt": "s"}).encode()


def test_a_long_list_is_read_in_turns_and_no_more_lists_than_questions():
    ids = list(range(100_000, 132_768))
    body = prompt_of(ids)
    short, lists, turns = taken_out(body, Texts(ProcessStats()))
    assert (short, lists) == (b'{"tokens": [0], "salt": "s"}', [packed(ids)])
    assert turns == len(body) // query_text.PIECE // query_text.TURN
    hashes = json.dumps({"hashes": [str(each) for each in range(10**18, 10**18 + 2048)]}).encode()
    assert taken_out(hashes, keeping())[2] == -(-len(hashes) // (query_text.PIECE // 4)) // query_text.TURN
    many = json.dumps({"queries": [{"tokens": []}] * (query_body.MAX_QUERIES + 1)}).encode()
    assert taken_out(many, keeping()) == (many, [], query_body.MAX_QUERIES // query_text.TURN)


def test_what_was_asked_before_is_not_read_again(monkeypatch):
    ids = list(range(100_000, 132_768))
    texts = keeping()
    read = []

    def counted(some):
        read.append(len(some))
        return packed(some)

    monkeypatch.setattr(query_text, "packed", counted)
    assert taken_out(prompt_of(ids), texts)[1] == [packed(ids)]
    assert sum(read) == len(ids)
    pieces, last = len(read), read[-1]
    read.clear()
    for asked in (ids, ids + [7] * 9):  # the same, and a longer one: its end alone is new
        assert taken_out(prompt_of(asked), texts)[1] == [packed(asked)]
    assert read == [last + 9]
    texts.forget()
    for _ in range(2):  # it is not told to keep anything now
        read.clear()
        taken_out(prompt_of(ids), texts)
        assert len(read) == pieces


def test_hashes_that_were_asked_before_are_not_read_again(monkeypatch):
    """By name and piece, whether they are integers, decimal texts or in hexadecimal; a few of the last are new."""
    read = []

    def counted(some):
        read.append(len(some))
        return some_names(some)

    monkeypatch.setattr(query_text, "some_names", counted)
    for of in (int, str, "{:032x}".format):
        texts, hashes = keeping(), [of(10**15 + each) for each in range(2000)]
        found = []
        for asked in (hashes, hashes, [*hashes, of(7)]):
            read.clear()
            (names,) = taken_out(json.dumps({"hashes": asked}).encode(), texts)[1]
            assert plain(names) == plain(driven(names_of(asked))[0])
            found.append(sum(read))
        assert found[:2] == [2000, 0]
        assert 0 < found[2] < 500


def test_hashes_and_token_ids_with_the_same_text_are_told_apart():
    texts, same = keeping(), [7] * 9000
    for _ in range(2):
        short, lists, _ = taken_out(json.dumps({"queries": [{"hashes": same}, {"tokens": same}]}).encode(), texts)
        assert short == b'{"queries": [{"hashes": [0]}, {"tokens": [1]}]}'
        assert [each if isinstance(each, bytes) else plain(each) for each in lists] == [[same], packed(same)]


def test_an_empty_list_that_was_asked_before_is_not_the_end_of_another_one(monkeypatch):
    monkeypatch.setattr(query_text, "PIECE", 1)
    texts = keeping()
    for empty in (b"", b"  "):
        assert taken_out(b'{"tokens":[%b]}' % empty, texts)[1] == [b""]
        for odd in (b"1,%b", b"%b,1", b"1,%b,1"):
            body = b'{"tokens":[%b]}' % (odd % empty)
            assert taken_out(body, texts)[:2] == (body, [])
            assert questions(body) == 400


def test_a_text_with_both_ends_of_another_one_is_read_for_itself_and_kept_instead():
    stats = ProcessStats()
    texts = Texts(stats)
    texts.keep()
    sizes = set()
    for middle in (1000, 2000, 1000, 1000):
        ids = [7] * 100 + [middle] + [7] * 100
        assert taken_out(prompt_of(ids), texts)[1] == [packed(ids)]
        sizes.add(stats.query_text_bytes)
    assert len(sizes) == 1


def test_what_has_not_been_asked_for_longest_is_forgotten_where_it_is_too_much(monkeypatch):
    stats = ProcessStats()
    texts = Texts(stats)
    texts.keep()
    prompts = [prompt_of([number] * 24_000) for number in range(3)]
    assert taken_out(prompts[0], texts)[1]
    one = stats.query_text_bytes
    monkeypatch.setattr(query_text, "KEPT", 2 * one)
    read = []

    def counted(some):
        read.append(some[0])
        return packed(some)

    monkeypatch.setattr(query_text, "packed", counted)
    for which in (1, 0, 2, 0, 1):
        taken_out(prompts[which], texts)
        assert stats.query_text_bytes <= 2 * one
    assert set(read[:3]) == {1}
    assert list(dict.fromkeys(read)) == [1, 2]  # the first one was asked for between the others
    assert read.count(1) == 2 * read.count(2)
    texts.forget()
    assert stats.query_text_bytes == 0


@pytest.mark.parametrize(
    ("limit", "body"),
    [
        ("MAX_BODY", b'{"tokens": [' + b" " * 2**20 + b"]}"),
        ("MAX_QUERIES", {"queries": [{"tokens": []}] * 257}),
        ("MAX_HASHES", {"hashes": [1] * 16_385}),
        ("MAX_ITEMS", {"queries": [{"tokens": [1] * 60_000}] * 2 + [{"hashes": [1] * 15_000}]}),
    ],
)
async def test_what_asks_too_much_at_once_is_refused(limit, body):
    async with asking() as here:
        status, answer = await here.post(body)
        assert status == 413
        assert str(getattr(query_body, limit)) in answer["error"]
        assert here.outcomes == {"too_large": 1}


async def test_a_body_that_does_not_come_is_given_up(monkeypatch):
    monkeypatch.setattr(module, "CONNECTION_TIMEOUT", 0.05)

    async def forever():
        for _ in itertools.count():
            yield b" "
            await asyncio.sleep(0.01)

    async with asking() as here:
        async with here.session.post(here.url, data=forever()) as answer:
            assert answer.status == 408
            assert "0.05 s" in (await answer.json())["error"]
        assert here.outcomes == {"slow": 1}


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br"])
async def test_a_compressed_body_is_refused_good_or_bad(coding, caplog):
    async with asking() as here:
        for body in (gzip.compress(json.dumps({"tokens": TOKENS}).encode()), b"no such stream" * 100):
            status, answer = await here.post(body, headers={"Content-Encoding": coding}, compress=False)
            assert (status, answer["error"]) == (400, "the body has a Content-Encoding; send it as it is")
        assert here.outcomes == {"invalid": 2}
    assert "Traceback" not in caplog.text


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_counted_and_no_error_of_the_server(caplog):
    async with asking() as here:
        _, writer = await asyncio.open_connection(*here.bus.daemon.http_address)
        writer.write(b"POST /query HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n{")
        await eventually(lambda: here.bus.daemon.process.http_connections == 1, "the connection is there")
        await here.ask(tokens=TOKENS)  # by now it waits for the rest
        writer.transport.abort()
        await eventually(lambda: here.outcomes == {"answered": 1, "gone": 1}, "the request that broke off is counted")
        await here.ask(tokens=TOKENS)
    assert "Traceback" not in caplog.text


async def test_while_the_tree_is_built_it_says_how_much_is_left(monkeypatch):
    monkeypatch.setattr(module, "BUILD_TIMEOUT", 0.05)
    monkeypatch.setattr(query_index, "SLICE", 0)
    monkeypatch.setattr(query_index, "slices", lambda *_: itertools.repeat([]))
    async with asking() as here:
        async with here.session.post(here.url, json={"tokens": TOKENS}) as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
            assert "1 sources are left" in (await answer.json())["error"]
        assert here.outcomes == {"building": 1}


async def test_a_hundred_who_ask_at_once_are_answered_or_sent_away_and_the_stream_goes_on():
    async with asking() as here:
        await here.ask(tokens=TOKENS)
        done = asyncio.Event()

        async def ask():
            statuses = []
            async with aiohttp.ClientSession() as session:
                while not done.is_set():
                    async with session.post(here.url, json={"queries": [{"tokens": TOKENS}] * 50}) as answer:
                        statuses.append(answer.status)
            return statuses

        asked = [asyncio.create_task(ask()) for _ in range(100)]
        for n in range(100, 130):
            await here.say(store([n]))
        done.set()
        statuses = set(itertools.chain.from_iterable(await asyncio.gather(*asked)))
        assert statuses == {200, 429}
        await eventually(lambda: here.bus.daemon.process.http_connections <= 1, "connections closed")
        (result,) = (await here.ask(tokens=TOKENS))["results"]
        assert result["matches"] == [BEST]


async def test_however_many_ask_each_turn_of_the_loop_has_one_piece_of_their_work(monkeypatch):
    work: collections.Counter[int] = collections.Counter()
    turn = 0

    def counted(real, share):
        def call(*args, **more):
            work[turn] += share
            return real(*args, **more)

        return call

    def look():
        nonlocal turn
        turn += 1
        timer[0] = asyncio.get_running_loop().call_soon(look)

    monkeypatch.setattr(query_text, "packed", counted(packed, 1))
    monkeypatch.setattr(PrefixIndex, "matches", counted(PrefixIndex.matches, query_text.TURN))
    ids = range(100_000, 128_000)
    bodies = [json.dumps({"tokens": [*TOKENS, number, *ids[number:]]}).encode() for number in range(100)]
    assert len(bodies[0]) > 3 * query_text.PIECE * query_text.TURN
    few = aiohttp.TCPConnector(limit=50)
    async with asking() as here, aiohttp.ClientSession(connector=few) as here.session:
        await here.ask(tokens=TOKENS)
        work.clear()
        timer = [asyncio.get_running_loop().call_soon(look)]
        asked = [asyncio.create_task(here.post(body)) for body in bodies]
        await eventually(lambda: here.bus.daemon.process.queries["busy"], "more who ask than may wait")
        for n in range(100, 105):
            await here.say(store([n]))
        for path in ("livez", "readyz", "metrics"):
            async with aiohttp.ClientSession() as session, session.get(here.url.replace("query", path)) as answer:
                assert answer.status == 200
        answers = await asyncio.gather(*asked)
        timer[0].cancel()
        assert {status for status, _ in answers} == {200, 429}
        for status, answer in answers:
            assert status == 429 or answer["results"] == [{"matches": [BEST]}]
        assert max(work.values()) == query_text.TURN
        assert work.total() >= 16 * 4 * query_text.TURN


async def test_other_sites_and_proxies_may_not_ask():
    async with asking() as here:
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"X-Forwarded-For": "1.2.3.4"}):
            status, answer = await here.post({"tokens": TOKENS}, headers=headers)
            assert status == 403
            assert answer["error"].startswith("/query shows which prompts are cached")
        async with here.session.get(here.url) as answer:
            assert answer.status == 405
        assert here.outcomes == {}


async def test_analytics_of_every_source_beside_questions_or_alone():
    async with asking(analytics=True) as here:
        await here.say(removed([3]))
        await here.say(store([3], 2, tokens=TOKENS[2 * SIZE : 3 * SIZE]))
        alone = await here.ask(analytics=True)
        assert (alone["results"], alone["incomplete"]) == ([], [])
        (source,) = alone["analytics"]
        blocks = source.pop("blocks")
        assert source == {"source": "engine", "rank": 0, "worker": "pod-a", "state": "live", "partial": False}
        base = here.url.removesuffix("/query")
        async with here.session.get(f"{base}/sources") as answer:
            (shown,) = await answer.json()
        fading = {"stored_per_second", "removed_per_second", "churn"}
        assert {name: value for name, value in blocks.items() if name not in fading} == {
            name: value for name, value in shown["analytics"].items() if name not in fading
        }
        assert (blocks["live"], blocks["stored"], blocks["removed"], blocks["stored_again"]) == (3, 4, 1, 1)
        both = await here.ask(tokens=TOKENS, analytics=True)
        assert [match["blocks"] for match in both["results"][0]["matches"]] == [3]
        assert both["analytics"][0]["blocks"]["live"] == 3
        many = await here.ask(queries=[{"tokens": TOKENS}, {"hashes": [2]}], analytics=True)
        assert (len(many["results"]), len(many["analytics"])) == (2, 1)
        assert "analytics" not in await here.ask(tokens=TOKENS, analytics=False)
        assert (await here.post({"queries": [{"analytics": True}]}))[0] == 400
        assert (await here.post({"analytics": 1}))[0] == 400
        assert (await here.post({"analytics": False}))[0] == 400


async def test_analytics_that_are_off_are_said_to_be():
    async with asking() as here:
        refused = 400, {"error": "analytics are off; the configuration has to say analytics: true"}
        for body in ({"analytics": True}, {"tokens": TOKENS, "analytics": True}):
            assert await here.post(body) == refused
        assert here.outcomes == {"invalid": 2}
