"""Logs at servers with authentication, for tests of the rights of kvbus's user.

The functions change these rights, the password, or the certificates of a server.
"""

from __future__ import annotations

import abc
import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, ClassVar, Final

from kvbus.config import load
from kvbus.core.findings.finding import Finding
from kvbus.parts.log.contract import Log
from kvbus.parts.log.kafka import KafkaLog
from kvbus.parts.log.location import KafkaLocation, NatsLocation, RedisLocation
from kvbus.parts.log.nats import NatsLog
from kvbus.parts.log.record import Stream
from kvbus.parts.log.redis import RedisLog
from kvbus.parts.log.redis_client import names
from kvbus.tools.doctor.outputs import broker
from tests.log.broker import Broker
from tests.log.kinds import Kafka, Nats, Redis
from tests.log.nats_server import NatsServer
from tests.log.redis_server import RedisServer
from tests.log.rights import Acl, Operation, Resource, rights
from tests.security.certificates import Authority, Issued

SECRET: Final = "a-password-that-nobody-sees"
OTHER: Final = "another-password-that-nobody-sees"
DOCUMENTED: Final = (Path(__file__).parents[2] / "docs" / "LOG.md").read_text()
_ONE_LINE: Final = DOCUMENTED.replace("\\\n", "")

MINE, THEIRS, WRONG, OTHER_MODEL = (
    Stream("eu-1", model, f"{worker}/engine", 0).key
    for model, worker in (
        ("meta-llama/Llama-3.1-8B", "worker-a"),
        ("meta-llama/Llama-3.1-8B", "worker-b"),
        ("meta-llama/Llama-3.1-8B", "worker-c"),
        ("meta-llama/Llama-3.1-8B-Instruct", "worker-a"),
    )
)

AnyLocation = KafkaLocation | NatsLocation | RedisLocation


class Door(abc.ABC):
    """A log at a server with authentication, and the user as which kvbus connects.

    Args:
        kind: the log with the rights of an administrator.
        address: address of the server's port with passwords and TLS.
        plain: address of a server without TLS.
        directory: directory of the password file.
    """

    name: ClassVar[str]
    reads_its_pointers: ClassVar = True
    """Whether a server lets a user who may write a stream also read its pointer."""

    def __init__(self, kind: Any, authority: Authority, user: str, address: str, plain: str, directory: Path) -> None:
        self.kind, self.authority, self.user, self.address, self.plain = kind, authority, user, address, plain
        self.password = directory / "password"
        self.write(SECRET)

    def write(self, password: str) -> None:
        """Write another password into kvbus's password file."""
        self.password.write_text(f"{password}\n")
        self.password.chmod(0o600)

    def place(self, server: str | None = None, **keys: Any) -> Any:
        """Return the log's address and configuration keys, for a user who logs in with a password."""
        said = {"tls_ca_file": self.authority.certificate, "username": self.user, "password_file": self.password}
        place: AnyLocation = self.kind.place(server or self.address, **{**said, **keys})
        return place

    def with_certificate(self, issued: Issued) -> AnyLocation:
        """Return the log's address and configuration keys, for a user who logs in with a client certificate."""
        files: Any = {"tls_certificate_file": issued.certificate, "tls_key_file": issued.key}
        return self.place(username=None, password_file=None, **files)

    async def looked(self, place: AnyLocation) -> tuple[list[Finding], str]:
        """Run the checks of `kvbus doctor` for the log, and return its findings and its text."""
        keys = place.keys.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        output = {"type": self.name, "endpoint": f"tcp://{place.servers}", self.name: keys}
        config = load(None, env={}, overrides={"model": "m", "sources": [{}], "outputs": [output]})
        return await broker(config.outputs[0], "outputs[0]", 30.0)

    @abc.abstractmethod
    def log(self, place: AnyLocation) -> Log: ...

    @abc.abstractmethod
    async def open(self) -> None:
        """Create the log, and give kvbus's user all rights for it."""

    @abc.abstractmethod
    async def change(self, password: str) -> None:
        """Change the password of kvbus's user at the server, and close the connections made with the old password."""

    @abc.abstractmethod
    async def forbid(self) -> None:
        """Withdraw the right to write from kvbus's user."""

    @abc.abstractmethod
    async def wants_certificates(self) -> AnyLocation:
        """Let the server require client certificates.

        Return the log's address and configuration keys for a client that has no certificate.
        """

    @abc.abstractmethod
    async def expire(self) -> AnyLocation:
        """Let the server use an expired certificate. Return the log's address and configuration keys at this server."""

    @abc.abstractmethod
    def wrong(self) -> AsyncIterator[tuple[AnyLocation, set[str]]]:
        """Yield wrong addresses and keys, besides those of the other methods, each with the reasons that kvbus may
        report.
        """

    @abc.abstractmethod
    def documented(self, role: str) -> list[Any]:
        """Return the rights that docs/LOG.md gives to a role such as a writer.

        The role needs each of them: if one is missing, it does not work.
        """

    @abc.abstractmethod
    async def grant(self, role: str, given: Iterable[Any]) -> None:
        """Give kvbus's user at the server exactly the rights ``given``.

        ``role`` is the role that needs these rights, such as ``reader``.
        """

    def missing(self, _right: Any) -> str:
        """Return the reason that kvbus reports if the server refuses a user without this right."""
        return "denied"

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Undo what the other methods have changed in the server's settings."""


class KafkaDoor(Door):
    """A broker with one port for SCRAM, one for client certificates, and one with an expired server certificate."""

    name = "kafka"
    reads_its_pointers = False
    kind: Kafka

    def __init__(self, server: Broker, directory: Path) -> None:
        kind, self._server = Kafka(server), server
        scram, self._mutual, self._expired = (f"127.0.0.1:{port}" for port in server.tls_ports)
        super().__init__(kind, server.authority, f"user-of-{kind.topic}", scram, server.address, directory)
        topic, streams = kind.topic, Resource.TRANSACTIONAL_ID
        self._write = Acl(Operation.WRITE, Resource.TOPIC, topic, prefixed=True)
        everything = {Acl(Operation.READ, Resource.TOPIC, topic, prefixed=True), self._write}
        self._everything = everything | {Acl(Operation.WRITE, streams, "kvbus.v1.", prefixed=True)}
        self._given: set[Acl] = set()

    def log(self, place: AnyLocation) -> Log:
        assert isinstance(place, KafkaLocation)
        return KafkaLog(place)

    def with_certificate(self, issued: Issued, server: str | None = None) -> AnyLocation:
        files = {"tls_certificate_file": issued.certificate, "tls_key_file": issued.key}
        return self.place(server or self._mutual, username=None, password_file=None, **files)

    async def open(self) -> None:
        await self.kind.make()
        await self.change(SECRET)
        await self.grant("", self._everything)
        async with rights(self._server) as may:
            await may.allow(f"CN={self.user}", *self._everything)

    async def change(self, password: str) -> None:
        async with rights(self._server) as may:
            await may.user(self.user, password)

    async def forbid(self) -> None:
        await self.grant("", self._given - {self._write})

    async def wants_certificates(self) -> AnyLocation:
        return self.place(self._mutual, username=None, password_file=None)

    async def expire(self) -> AnyLocation:
        return self.with_certificate(self.authority.issue(self.user), self._expired)

    async def wrong(self) -> AsyncIterator[tuple[AnyLocation, set[str]]]:
        yield self.kind.place(self.plain, topic="not-there"), {"topic_missing"}

    def documented(self, role: str) -> list[Acl]:
        """Return the ACLs that the commands in docs/LOG.md add for a role, with the topic of this test."""
        command, found = f"kafka-acls.sh --add --allow-principal User:{role} ", []
        for line in _ONE_LINE.splitlines():
            if line.startswith(command):
                said = dict(re.findall(r"--(\S+) (\S+)", line.removeprefix(command)))
                assert set(said) <= {"operation", "topic", "transactional-id", "resource-pattern-type"}
                kind = Resource.TOPIC if "topic" in said else Resource.TRANSACTIONAL_ID
                topic = self.kind.topic + said.get("topic", "kvbus").removeprefix("kvbus")
                prefixed = said.get("resource-pattern-type") == "prefixed"
                name = said.get("transactional-id", topic)
                found.append(Acl(Operation[said["operation"].upper()], kind, name, prefixed))
        return found

    async def grant(self, role: str, given: Iterable[Acl]) -> None:
        wanted = set(given)
        async with rights(self._server) as may:
            await may.withdraw(self.user, *(self._given - wanted))
            await may.allow(self.user, *(wanted - self._given))
        self._given = wanted

    def missing(self, right: Acl) -> str:
        return "topic_denied" if right.resource is Resource.TOPIC else "transactional_id_denied"

    async def aclose(self) -> None:
        """Do nothing: the user and its rights may stay on the server, because no other test uses this user."""


class LockedNats(NatsServer):
    """A NATS server with TLS, for users with passwords and clients with certificates."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory)
        for name, days in (("server", 1), ("expired", -1)):
            self.authority.issue(name, days=days)
        super().__init__(directory)
        self.lock()

    def lock(
        self, *, password: str = SECRET, permissions: str = "", certificate: str = "server", verify: bool = False
    ) -> None:
        files = f'cert_file: "{self.directory}/{certificate}.crt", key_file: "{self.directory}/{certificate}.key"'
        authority = f'ca_file: "{self.directory}/authority.crt", verify: {str(verify).lower()}'
        one = f'{{ user: "worker", password: "{password}" {permissions} }}'
        self.configure(
            f"tls {{ {files}, {authority} }}\n"
            f'authorization {{ users: [ {one}, {{ user: "root", password: "{SECRET}" }} ] }}\n'
        )


class NatsForRoot(Nats):
    """The log at a NATS server with passwords, for a client with the rights of an administrator."""

    def __init__(self, server: LockedNats, directory: Path) -> None:
        super().__init__(server)
        self.stream = "kvbus"
        password = directory / "root"
        password.write_text(SECRET)
        password.chmod(0o600)
        self._root = {
            "tls_ca_file": server.authority.certificate,
            "username": "root",
            "password_file": password,
        }

    def place(self, server: str, **keys: object) -> NatsLocation:
        return super().place(server, **{**self._root, **keys})


class NatsDoor(Door):
    name = "nats"
    kind: NatsForRoot

    def __init__(self, plain: NatsServer, directory: Path) -> None:
        self.server = LockedNats(directory)
        self.server.start()
        kind = NatsForRoot(self.server, directory)
        super().__init__(kind, self.server.authority, "worker", self.server.address, plain.address, directory)

    def log(self, place: AnyLocation) -> Log:
        assert isinstance(place, NatsLocation)
        return NatsLog(place)

    def with_certificate(self, issued: Issued) -> AnyLocation:
        """Return the log's address and keys for a user with a client certificate.

        The server requires a password in addition.
        """
        return self.place(tls_certificate_file=issued.certificate, tls_key_file=issued.key)

    async def open(self) -> None:
        self.server.lock()
        await self.kind.make()

    async def change(self, password: str) -> None:
        self.server.lock(password=password)

    async def forbid(self) -> None:
        self.server.lock(permissions=f', permissions: {{ publish: {{ deny: "{self.kind.stream}.>" }} }}')

    async def wants_certificates(self) -> AnyLocation:
        self.server.lock(verify=True)
        return self.place()

    async def expire(self) -> AnyLocation:
        self.server.lock(certificate="expired")
        return self.place()

    async def wrong(self) -> AsyncIterator[tuple[AnyLocation, set[str]]]:
        self.server.lock()
        nobody = {"username": None, "password_file": None, "tls_ca_file": None}
        yield self.place(**nobody), {"tls_failed", "certificate_foreign"}
        yield self.place(stream="not-there"), {"stream_missing"}

    def _permissions(self, role: str) -> dict[str, list[str]]:
        """Return the NATS subjects to which docs/LOG.md lets a role publish and subscribe."""
        (found,) = re.findall(rf"user: {role}, password: PASSWORD, permissions: (\{{.*?\n\}})", DOCUMENTED, re.DOTALL)
        lists = re.findall(r"(\w+): \[(.*?)\]", found, re.DOTALL)
        return {name: re.findall(r'"([^"]+)"', said) for name, said in lists}

    def documented(self, role: str) -> list[str]:
        return self._permissions(role)["publish"]

    async def grant(self, role: str, given: Iterable[str]) -> None:
        publish, subscribe = json.dumps([*given]), json.dumps(self._permissions(role)["subscribe"])
        self.server.lock(permissions=f", permissions: {{ publish: {publish}, subscribe: {subscribe} }}")

    async def aclose(self) -> None:
        await asyncio.to_thread(self.server.kill)


class RedisDoor(Door):
    name = "redis"
    kind: Redis

    def __init__(self, server: RedisServer, directory: Path) -> None:
        self.server = server
        kind, tls = Redis(server), f"127.0.0.1:{server.tls_port}"
        super().__init__(kind, server.authority, f"user-of-{kind.prefix}", tls, server.address, directory)

    def log(self, place: AnyLocation) -> Log:
        assert isinstance(place, RedisLocation)
        return RedisLog(place)

    async def told(self, *command: str) -> Any:
        """Run a command as an administrator, and return the server's answer."""
        async with self.server.client() as client:
            return await client.execute_command(*command)

    async def _may(self, *rules: str, password: str = SECRET) -> None:
        await self.told("ACL", "SETUSER", self.user, "reset", "on", f">{password}", *rules)

    async def open(self) -> None:
        await self._may("~*", "+@all")

    async def change(self, password: str) -> None:
        await self._may("~*", "+@all", password=password)
        await self.told("CLIENT", "KILL", "USER", self.user)

    async def forbid(self) -> None:
        await self._may("~*", "+@all", "-xadd")

    async def _tls(self, certificate: str, clients: str) -> None:
        files = (self.server.directory / f"{certificate}.{end}" for end in ("crt", "key"))
        keys = zip(("tls-cert-file", "tls-key-file"), map(str, files), strict=True)
        await self.told("CONFIG", "SET", *(word for pair in keys for word in pair), "tls-auth-clients", clients)

    async def wants_certificates(self) -> AnyLocation:
        await self._tls("server", "yes")
        return self.place()

    async def expire(self) -> AnyLocation:
        await self._tls("expired", "optional")
        return self.place()

    async def wrong(self) -> AsyncIterator[tuple[AnyLocation, set[str]]]:
        nobody = {"tls_ca_file": None, "username": None, "password_file": None}
        await self.told("ACL", "SETUSER", "default", "off")
        try:
            yield self.place(self.plain, **nobody), {"authentication_failed"}
        finally:
            self.server.kill()
            self.server.start()

    def _rules(self, role: str) -> list[str]:
        """Return the ACL rules that docs/LOG.md gives to a role, with this test's prefix."""
        (found,) = re.findall(rf"^ACL SETUSER {role} on >PASSWORD (.*)$", _ONE_LINE, re.MULTILINE)
        return [rule.replace("~kvbus:", f"~{self.kind.prefix}:") for rule in shlex.split(found)]

    def documented(self, role: str) -> list[str]:
        return [rule for rule in self._rules(role) if rule.startswith("+")]

    async def grant(self, role: str, given: Iterable[str]) -> None:
        await self.told("SET", names(self.kind.place(self.plain), WRONG)[0], "not a stream")
        await self.told("SCRIPT", "FLUSH")
        await self._may(*(rule for rule in self._rules(role) if not rule.startswith("+")), *given)

    async def aclose(self) -> None:
        await self._tls("server", "optional")
