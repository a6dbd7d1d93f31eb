"""Who may come in at a broker: SCRAM and certificates, right and wrong, each wrong one by its name."""

import functools
import logging

import pytest

from kvbus.config import load
from kvbus.parts.log.contract import START, UnavailableError
from kvbus.parts.log.kafka import KafkaLog
from kvbus.parts.log.place import Place
from kvbus.tools.doctor.outputs import broker, finding_key
from tests.log.fleet import KEY, fleet
from tests.log.kinds import Kafka, insist
from tests.log.rights import Acl, Operation, Resource, rights
from tests.security.certificates import Authority
from tests.transport.loops import eventually

SECRET = "a-password-that-nobody-sees"
OTHER = "another-password-that-nobody-sees"


def everything(topic):
    return (
        Acl(Operation.READ, Resource.TOPIC, topic, prefixed=True),
        Acl(Operation.WRITE, Resource.TOPIC, topic, prefixed=True),
        Acl(Operation.WRITE, Resource.TRANSACTIONAL_ID, "kvbus.v1.", prefixed=True),
    )


class Door:
    """A log at a broker, as one of its users finds it."""

    def __init__(self, kafka, directory):
        self.broker = kafka
        self.kind = Kafka(kafka)
        self.user = f"user-of-{self.kind.topic}"
        self.directory = directory
        self.password = directory / "password"
        self.authority = kafka.authority
        self.scram, self.mutual, self.expired = (f"127.0.0.1:{port}" for port in kafka.tls_ports)
        self.write(SECRET)

    def write(self, password):
        self.password.write_text(f"{password}\n")
        self.password.chmod(0o600)

    async def open(self):
        await self.kind.make()
        async with rights(self.broker) as may:
            await may.user(self.user, SECRET)
            for principal in (self.user, f"CN={self.user}"):
                await may.allow(principal, *everything(self.kind.topic))

    def by_password(self, **keys) -> Place:
        said = {"tls_ca_file": self.authority.certificate, "username": self.user, "password_file": self.password}
        return self.kind.place(keys.pop("server", self.scram), **{**said, **keys})

    def by_certificate(self, issued, **keys) -> Place:
        files = {"tls_certificate_file": issued.certificate, "tls_key_file": issued.key}
        said = {"tls_ca_file": self.authority.certificate, **files}
        return self.kind.place(keys.pop("server", self.mutual), **{**said, **keys})

    async def refused(self, place):
        """Why somebody is refused who wants to write, to read, or to see what there is."""
        log = KafkaLog(place)
        reasons = set()
        for attempt in (log.claim(KEY), log.pointers(), log.read({KEY: START})):
            with pytest.raises(UnavailableError) as error:
                await attempt
            assert SECRET not in str(error.value)
            reasons.add(error.value.reason)
        assert len(reasons) == 1
        (reason,) = reasons
        findings, _ = await look(place)
        assert [finding.key for finding in findings] == [f"outputs[0].{finding_key('kafka', reason)}"]
        return reason


async def look(place):
    """What doctor finds."""
    keys = place.keys.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    output = {"type": "kafka", "endpoint": f"tcp://{place.servers}", "kafka": keys}
    config = load(None, env={}, overrides={"model": "m", "sources": [{}], "outputs": [output]})
    return await broker(config.outputs[0], "outputs[0]", 30.0)


@pytest.fixture
def door(kafka, tmp_path):
    return Door(kafka, tmp_path)


async def test_right_passwords_and_certificates_write_and_read(door):
    await door.open()
    for place in (door.by_password(), door.by_certificate(door.authority.issue(door.user))):
        log = KafkaLog(place)
        writer = await insist(functools.partial(log.claim, KEY))
        await writer.append([b"one"])
        await writer.close()
        reader = await log.read({KEY: START})
        assert (await reader.take(20.0))[0].data == b"one"
        await reader.close()
        assert await look(place) == ([], f"{place.servers} has both topics, and 1 streams in {door.kind.topic}")


async def test_each_wrong_one_is_refused_by_its_name(door, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    await door.open()
    other = Authority(tmp_path, "other")
    assert await door.refused(door.by_password(username="nobody")) == "authentication_failed"
    door.write(OTHER)
    assert await door.refused(door.by_password()) == "authentication_failed"
    host = door.scram.replace("127.0.0.1", "127.0.0.2")
    assert await door.refused(door.by_password(server=host)) == "certificate_wrong_host"
    assert await door.refused(door.by_password(tls_ca_file=other.certificate)) == "certificate_foreign"
    worker = door.authority.issue(door.user)
    assert await door.refused(door.by_certificate(worker, server=door.expired)) == "certificate_expired"
    for issued in (other.issue(door.user), door.authority.issue("old", days=-1)):
        assert await door.refused(door.by_certificate(issued)) == "client_certificate_refused"
    nothing = {"username": None, "password_file": None}
    assert await door.refused(door.by_password(server=door.mutual, **nothing)) == "client_certificate_refused"
    plain = door.kind.broker.address
    assert await door.refused(door.by_password(server=plain)) in {"tls_failed", "unreachable"}
    door.password.chmod(0o644)
    assert await door.refused(door.by_password()) == "key_file"
    door.write(SECRET)
    missing = door.kind.place(plain, topic="not-there")
    (finding,), _ = await look(missing)
    assert finding.key == "outputs[0].kafka.topic"
    assert "there is no such topic (not-there)" in finding.cause
    assert SECRET not in caplog.text
    assert OTHER not in caplog.text


async def test_who_is_locked_out_while_writing_counts_it_and_comes_back_with_the_new_password(door, caplog):
    await door.open()
    async with fleet(door.kind) as log, rights(door.kind.broker) as may:
        leaf = log.leaf(KafkaLog(door.by_password()), queue_batches=5)
        leaf.store(10)
        await leaf.written()
        reading = await log.reading()
        await reading.holds(leaf)
        await may.user(door.user, OTHER)

        def refused():
            leaf.store(3, gone=2)
            return leaf.stats.refused["authentication_failed"] and leaf.stats.dropped_batches["log_unavailable"]

        await eventually(refused, "the broker to ask again who this is")
        assert leaf.stats.queue_depth <= 5
        assert "authentication failed" in caplog.text
        door.write(OTHER)
        await eventually(lambda: leaf.stats.states_sent["lost"], "a state behind what is missing")
        await reading.holds(leaf)

        before = leaf.stats.states_sent["lost"]
        door.write(SECRET)  # the file first: what is refused is what the connection has
        await may.user(door.user, SECRET)

        def back():
            leaf.store(1)
            return leaf.stats.states_sent["lost"] > before

        await eventually(back, "another state")
        await reading.holds(leaf)
        assert reading.follower.counts["lost"] == 0
    for secret in (SECRET, OTHER):
        assert secret not in caplog.text
        assert secret not in repr(door.by_password())


async def test_who_has_lost_an_acl_while_writing_is_told_which(door):
    await door.open()
    write = everything(door.kind.topic)[1]
    async with fleet(door.kind) as log, rights(door.kind.broker) as may:
        leaf = log.leaf(KafkaLog(door.by_password()))
        leaf.store(10)
        await leaf.written()
        await may.withdraw(door.user, write)

        def denied():
            leaf.store(1)
            return leaf.stats.refused["topic_denied"]

        await eventually(denied, "the broker to refuse")
        await may.allow(door.user, write)
        await (await log.reading()).holds(leaf)
