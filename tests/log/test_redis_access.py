"""Who may come in at Redis: passwords and certificates, right and wrong, each wrong one by its name; ACLs."""

import logging
import re
import shlex
from pathlib import Path

import pytest

from kvbus.config import load
from kvbus.parts.log.contract import START, Pointer, UnavailableError
from kvbus.parts.log.record import Stream
from kvbus.parts.log.redis import RedisLog
from kvbus.parts.log.redis_client import names
from kvbus.tools.doctor.outputs import broker, finding_key
from tests.log.fleet import KEY, fleet
from tests.log.kinds import Redis
from tests.security.certificates import Authority
from tests.transport.loops import eventually

SECRET = "a-password-that-nobody-sees"
OTHER = "another-password-that-nobody-sees"
LOG = Path(__file__).parents[2] / "docs" / "LOG.md"


class Door:
    """A log at a server, as one of its users finds it."""

    def __init__(self, redis, directory):
        self.kind = Redis(redis)
        self.server = redis
        self.user = f"user-of-{self.kind.prefix}"
        self.password = directory / "password"
        self.tls = f"127.0.0.1:{redis.tls_port}"
        self.write(SECRET)

    def write(self, password):
        self.password.write_text(f"{password}\n")
        self.password.chmod(0o600)

    async def told(self, *command):
        """By who may do everything."""
        async with self.server.client() as client:
            return await client.execute_command(*command)

    async def may(self, *rules, password=SECRET):
        await self.told("ACL", "SETUSER", self.user, "reset", "on", f">{password}", *rules)

    def place(self, server=None, **keys):
        by_password = {"username": self.user, "password_file": self.password}
        said = {"tls_ca_file": self.server.authority.certificate, **by_password, **keys}
        return self.kind.place(server or self.tls, **said)

    async def refused(self, place):
        """Why somebody is refused who wants to write, to read, or to see what there is."""
        log = RedisLog(place)
        reasons = set()
        for attempt in (log.claim(KEY), log.pointers(), log.read({KEY: START})):
            with pytest.raises(UnavailableError) as error:
                await attempt
            assert SECRET not in str(error.value)
            reasons.add(error.value.reason)
        (reason,) = reasons
        findings, _ = await looked(place)
        assert [finding.key for finding in findings] == [f"outputs[0].{finding_key('redis', reason)}"]
        return reason


async def looked(place):
    """What doctor finds."""
    keys = place.keys.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    output = {"type": "redis", "endpoint": f"tcp://{place.servers}", "redis": keys}
    config = load(None, env={}, overrides={"model": "m", "sources": [{}], "outputs": [output]})
    return await broker(config.outputs[0], "outputs[0]", 30.0)


@pytest.fixture
async def door(redis, tmp_path):
    door = Door(redis, tmp_path)
    await door.may("~*", "+@all")
    yield door
    expired = {"tls-cert-file": redis.directory / "server.crt", "tls-key-file": redis.directory / "server.key"}
    await door.told("CONFIG", "SET", *(str(each) for pair in expired.items() for each in pair))
    await door.told("CONFIG", "SET", "tls-auth-clients", "optional")


async def test_a_right_password_and_certificate_write_and_read(door, tmp_path):
    issued = door.server.authority.issue(door.user)
    certificate = {"tls_certificate_file": issued.certificate, "tls_key_file": issued.key}
    for place in (door.place(), door.place(username=None, password_file=None, **certificate)):
        log = RedisLog(place)
        writer = await log.claim(KEY)
        await writer.append([b"one"])
        await writer.close()
        reader = await log.read({KEY: START})
        assert (await reader.take(20.0))[0].data == b"one"
        await reader.close()
        assert await looked(place) == ([], f"{place.servers} has 1 streams under {door.kind.prefix}")
        await door.told("CONFIG", "SET", "tls-auth-clients", "yes")


async def test_each_wrong_one_is_refused_by_its_name(door, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    other = Authority(tmp_path, "other")
    assert await door.refused(door.place(username="nobody")) == "authentication_failed"
    door.write(OTHER)
    assert await door.refused(door.place()) == "authentication_failed"
    door.write(SECRET)
    assert await door.refused(door.place(door.tls.replace("127.0.0.1", "127.0.0.2"))) == "certificate_wrong_host"
    assert await door.refused(door.place(tls_ca_file=other.certificate)) == "certificate_foreign"
    assert await door.refused(door.place(door.server.address)) in {"tls_failed", "unreachable"}
    await door.told("CONFIG", "SET", "tls-auth-clients", "yes")
    assert await door.refused(door.place()) == "client_certificate_refused"
    for issued in (other.issue(door.user), door.server.authority.issue("old", days=-1)):
        keys = {"tls_certificate_file": issued.certificate, "tls_key_file": issued.key}
        assert await door.refused(door.place(**keys)) == "client_certificate_refused"
    directory = door.server.directory
    expired = ("tls-cert-file", directory / "expired.crt", "tls-key-file", directory / "expired.key")
    await door.told("CONFIG", "SET", "tls-auth-clients", "optional", *map(str, expired))
    assert await door.refused(door.place()) == "certificate_expired"
    door.password.chmod(0o644)
    assert await door.refused(door.place()) == "key_file"
    nobody = {"tls_ca_file": None, "username": None, "password_file": None}
    await door.told("ACL", "SETUSER", "default", "off")
    try:
        assert await door.refused(door.place(door.server.address, **nobody)) == "authentication_failed"
    finally:
        door.server.kill()
        door.server.start()
    for secret in (SECRET, OTHER):
        assert secret not in caplog.text


async def test_who_is_locked_out_while_writing_counts_it_and_comes_back_with_the_new_password(door, caplog):
    async with fleet(door.kind) as log:
        leaf = log.leaf(RedisLog(door.place()), queue_batches=5)
        leaf.store(10)
        await leaf.written()
        reading = await log.reading()
        await reading.holds(leaf)
        await door.may("~*", "+@all", password=OTHER)
        await door.told("CLIENT", "KILL", "USER", door.user)

        def refused():
            leaf.store(3, gone=2)
            return leaf.stats.refused["authentication_failed"] and leaf.stats.dropped_batches["log_unavailable"]

        await eventually(refused, "the server to refuse")
        assert leaf.stats.queue_depth <= 5
        assert "authentication failed" in caplog.text
        door.write(OTHER)
        await eventually(lambda: leaf.stats.states_sent["lost"], "a state behind what is missing")
        await reading.holds(leaf)
        assert reading.follower.counts["lost"] == 0
    for secret in (SECRET, OTHER):
        assert secret not in caplog.text
        assert secret not in repr(door.place())


async def test_who_may_not_write_any_more_is_told_so(door):
    async with fleet(door.kind) as log:
        leaf = log.leaf(RedisLog(door.place()))
        leaf.store(10)
        await leaf.written()
        await door.may("~*", "+@all", "-xadd")

        def denied():
            leaf.store(1)
            return leaf.stats.refused["denied"]

        await eventually(denied, "the server to refuse")
        await door.may("~*", "+@all")
        await (await log.reading()).holds(leaf)


def documented(role):
    """The rules of one user, as the documentation has them."""
    text = LOG.read_text().replace("\\\n", "")
    (found,) = re.findall(rf"^ACL SETUSER {role} on >PASSWORD (.*)$", text, re.MULTILINE)
    return shlex.split(found)


MINE = Stream("eu-1", "meta-llama/Llama-3.1-8B", "worker-a/engine", 0).key
THEIRS = Stream("eu-1", "meta-llama/Llama-3.1-8B", "worker-b/engine", 0).key
WRONG = Stream("eu-1", "meta-llama/Llama-3.1-8B", "worker-c/engine", 0).key
OTHER_MODEL = Stream("eu-1", "meta-llama/Llama-3.1-8B-Instruct", "worker-a/engine", 0).key


async def written(log, key):
    writer = await log.claim(key)
    try:
        position = await writer.append([b"record"])
        await writer.point(Pointer(writer.epoch, 0, position))
        assert await writer.keeps(position)
    finally:
        await writer.close()


@pytest.mark.parametrize("role", ["worker-a", "leaves", "reader"])
async def test_documented_rules_are_enough_and_none_of_them_is_too_much(door, role):
    rules = [rule.replace("~kvbus:", f"~{door.kind.prefix}:") for rule in documented(role)]
    log = RedisLog(door.place())

    async def does():
        if role == "worker-a":
            await written(log, MINE)
            assert set(await log.pointers(MINE)) == {MINE}
        elif role == "leaves":
            for key in (MINE, THEIRS):
                await written(log, key)
                assert set(await log.pointers(key)) == {key}
        else:
            assert set(await log.pointers()) == {MINE, THEIRS}
            reader = await log.read({MINE: START, THEIRS: START, WRONG: START})
            try:
                assert {entry.key for entry in await reader.take(20.0)} == {MINE, THEIRS}
            finally:
                await reader.close()

    for key in (MINE, THEIRS):
        await written(door.kind.open(), key)
    await door.may(*rules)
    await does()
    for key in {"worker-a": [THEIRS], "leaves": [OTHER_MODEL]}.get(role, ()):
        with pytest.raises(UnavailableError, match="no ACL allows this"):
            await log.claim(key)
    await door.told("SET", names(door.place(), WRONG)[0], "a word")
    commands = [rule for rule in rules if rule.startswith("+")]
    assert len(commands) > 3
    for one in commands:
        await door.told("SCRIPT", "FLUSH")
        await written(door.kind.open(), MINE)
        await door.told("SCRIPT", "FLUSH")
        await door.may(*(rule for rule in rules if rule != one))
        with pytest.raises(UnavailableError) as error:
            await does()
        assert error.value.reason == "denied", one
