"""The ACLs that the documentation names are enough, and with one of them less nothing goes."""

import asyncio
import contextlib
import re
from pathlib import Path

import pytest

from kvbus.parts.log.contract import START, Pointer, UnavailableError
from kvbus.parts.log.kafka import KafkaLog
from kvbus.parts.log.record import Stream
from tests.log.kinds import Kafka
from tests.log.rights import Acl, Operation, Resource, rights
from tests.transport.loops import PATIENCE

LOG = Path(__file__).parents[2] / "docs" / "LOG.md"
KEY = Stream("eu-1", "meta-llama/Llama-3.1-8B", "worker-a/engine", 0).key
OTHERS = Stream("eu-1", "meta-llama/Llama-3.1-8B", "worker-b/engine", 0).key
OTHER_MODEL = Stream("eu-1", "meta-llama/Llama-3.1-8B-Instruct", "worker-a/engine", 0).key


def documented(role: str) -> list[Acl]:
    """What the commands for a principal say."""
    found = []
    for line in LOG.read_text().replace("\\\n", "").splitlines():
        command = f"kafka-acls.sh --add --allow-principal User:{role} "
        if line.startswith(command):
            said = dict(re.findall(r"--(\S+) (\S+)", line.removeprefix(command)))
            assert set(said) <= {"operation", "topic", "transactional-id", "resource-pattern-type"}
            kind = Resource.TOPIC if "topic" in said else Resource.TRANSACTIONAL_ID
            name = said.get("topic") or said["transactional-id"]
            prefixed = said.get("resource-pattern-type") == "prefixed"
            found.append(Acl(Operation[said["operation"].upper()], kind, name, prefixed))
    return found


class Party:
    """A topic, and one who comes there with a password."""

    def __init__(self, kafka, directory):
        self.kind = Kafka(kafka)
        self.user = f"{self.kind.topic}-party"
        password = directory / "password"
        password.write_text("secret")
        password.chmod(0o600)
        keys = {"tls_ca_file": kafka.authority.certificate, "username": self.user, "password_file": password}
        self.place = self.kind.place(f"127.0.0.1:{kafka.tls_ports[0]}", **keys)
        self.log = KafkaLog(self.place)

    def acls(self, role: str) -> list[Acl]:
        """Those of the documentation, for this test's topic."""
        return [
            acl._replace(name=self.kind.topic + acl.name.removeprefix("kvbus"))
            if acl.resource is Resource.TOPIC
            else acl
            for acl in documented(role)
        ]

    async def write(self, key=KEY):
        writer = await self.log.claim(key)
        try:
            position = await writer.append([b"record"])
            await writer.point(Pointer(writer.epoch, 0, position))
            assert await writer.keeps(position)
        finally:
            await writer.close()

    async def write_two(self):
        for key in (KEY, OTHERS):
            await self.write(key)

    async def read(self):
        await self.log.pointers()
        reader = await self.log.read({KEY: START})
        try:
            await reader.take(0.2)
        finally:
            await reader.close()


async def comes_to(wanted, attempt):
    """It goes, or it is refused for this reason, once the broker knows the ACLs."""
    reason: str | None = "not tried"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            while reason != wanted:
                try:
                    await attempt()
                except UnavailableError as error:
                    reason = error.reason
                else:
                    reason = None
    assert reason == wanted


@pytest.fixture
def party(kafka, tmp_path):
    return Party(kafka, tmp_path)


@pytest.mark.parametrize(("role", "count"), [("worker-a", 4), ("leaves", 4), ("reader", 2)])
async def test_each_needs_each_of_its_acls_and_no_other(party, role, count):
    await party.kind.make()
    acls = party.acls(role)
    assert len(acls) == count
    attempt = {"worker-a": party.write, "leaves": party.write_two, "reader": party.read}[role]
    async with rights(party.kind.broker) as may:
        await may.user(party.user, "secret")
        await may.allow(party.user, *acls)
        await comes_to(None, attempt)
        for acl in acls:
            await may.withdraw(party.user, acl)
            missing = "topic_denied" if acl.resource is Resource.TOPIC else "transactional_id_denied"
            await comes_to(missing, attempt)
            await may.allow(party.user, acl)
        await comes_to(None, attempt)
        if role == "worker-a":
            await comes_to("transactional_id_denied", lambda: party.write(OTHERS))
            await comes_to("topic_denied", party.read)
        if role == "leaves":
            await comes_to("transactional_id_denied", lambda: party.write(OTHER_MODEL))
        if role == "reader":
            await comes_to("transactional_id_denied", party.write)
