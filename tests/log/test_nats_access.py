"""Who may come in at NATS: passwords and certificates, right and wrong, each wrong one by its name; permissions."""

import asyncio
import json
import logging
import re
from pathlib import Path

import pytest

from kvbus.config import load
from kvbus.parts.log.contract import START, Pointer, UnavailableError
from kvbus.parts.log.nats import NatsLog
from kvbus.parts.log.nats_client import Link
from kvbus.parts.log.record import Stream
from kvbus.tools.doctor.outputs import broker, finding_key
from tests.log import nats_server
from tests.log.fleet import KEY, fleet
from tests.log.kinds import Nats
from tests.log.server import sockets
from tests.security.certificates import Authority
from tests.transport.loops import PATIENCE, eventually

SECRET = "a-password-that-nobody-sees"
OTHER = "another-password-that-nobody-sees"
LOG = Path(__file__).parents[2] / "docs" / "LOG.md"


class Locked(nats_server.NatsServer):
    """One with TLS, for users with passwords and clients with certificates."""

    def __init__(self, directory):
        self.authority = Authority(directory)
        for name, days in (("server", 1), ("expired", -1)):
            self.authority.issue(name, days=days)
        self._user, self._secret = "worker", SECRET
        super().__init__(directory)
        self.lock()

    def lock(self, *, user="worker", password=SECRET, permissions="", certificate="server", verify=False):
        files = f'cert_file: "{self.directory}/{certificate}.crt", key_file: "{self.directory}/{certificate}.key"'
        authority = f'ca_file: "{self.directory}/authority.crt", verify: {str(verify).lower()}'
        one = f'{{ user: "{user}", password: "{password}" {permissions} }}'
        self.configure(
            f"tls {{ {files}, {authority} }}\n"
            f'authorization {{ users: [ {one}, {{ user: "root", password: "{SECRET}" }} ] }}\n'
        )


class Door(Nats):
    """A log at such a server, as one of its users finds it."""

    server: Locked

    def __init__(self, server, directory):
        super().__init__(server)
        self.stream = "kvbus"
        self.password = directory / "password"
        self._root = directory / "root"
        self.write(self.password, SECRET)
        self.write(self._root, SECRET)

    @staticmethod
    def write(path, password):
        path.write_text(f"{password}\n")
        path.chmod(0o600)

    def place(self, server, **keys):
        """As who may do everything, unless something else is said."""
        said = {"tls_ca_file": self.server.authority.certificate, "username": "root", "password_file": self._root}
        return super().place(server, **{**said, **keys})

    def mine(self, server=None, **keys):
        said = {"username": "worker", "password_file": self.password}
        return self.place(server or self.server.address, **{**said, **keys})

    async def refused(self, place):
        """Why somebody is refused who wants to write, to read, or to see what there is."""
        log = NatsLog(place)
        reasons = set()
        for attempt in (log.claim(KEY), log.pointers(), log.read({KEY: START})):
            with pytest.raises(UnavailableError) as error:
                await attempt
            assert SECRET not in str(error.value)
            reasons.add(error.value.reason)
        (reason,) = reasons
        findings, _ = await looked(place)
        assert [finding.key for finding in findings] == [f"outputs[0].{finding_key('nats', reason)}"]
        return reason


async def looked(place):
    """What doctor finds."""
    keys = place.keys.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    output = {"type": "nats", "endpoint": f"tcp://{place.servers}", "nats": keys}
    config = load(None, env={}, overrides={"model": "m", "sources": [{}], "outputs": [output]})
    return await broker(config.outputs[0], "outputs[0]", 30.0)


@pytest.fixture
def door(nats, tmp_path):
    server = Locked(tmp_path)
    server.start()
    try:
        yield Door(server, tmp_path)
    finally:
        server.kill()


async def test_nothing_of_a_connection_is_open_when_it_is_closed(door):
    """The socket below TLS is closed, too: TLS says farewell first, and waits for the server's."""
    before = sockets()
    link = Link(door.mine())
    await link.client()
    assert sockets() > before
    await link.close()
    await eventually(lambda: sockets() <= before, "its socket to be closed")


async def test_a_connection_that_is_closed_before_it_has_a_socket_is_not_open_afterwards(nats, monkeypatch):
    loop, asked, go_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    look_up = loop.getaddrinfo

    async def slow(*arguments, **keys):
        asked.set()
        await go_on.wait()
        return await look_up(*arguments, **keys)

    monkeypatch.setattr(loop, "getaddrinfo", slow)
    link = Link(Nats(nats).place(nats.address.replace("127.0.0.1", "localhost")))
    connecting = asyncio.create_task(link.client())
    await asked.wait()
    before = sockets()
    await link.close()
    go_on.set()
    with pytest.raises(UnavailableError):
        await connecting
    await eventually(lambda: sockets() <= before, "its socket to be closed")


async def test_a_right_password_and_certificate_write_and_read(door):
    await door.make()
    issued = door.server.authority.issue("client")
    certificate = {"tls_certificate_file": issued.certificate, "tls_key_file": issued.key}
    for verify in (False, True):
        door.server.lock(verify=verify)
        place = door.mine(**(certificate if verify else {}))
        log = NatsLog(place)
        writer = await log.claim(KEY)
        await writer.append([b"one"])
        await writer.close()
        reader = await log.read({KEY: START})
        assert (await reader.take(20.0))[0].data == b"one"
        await reader.close()
        stream = door.stream
        assert await looked(place) == ([], f"{place.servers} has both streams, and 1 of kvbus's in {stream}")


async def test_each_wrong_one_is_refused_by_its_name(door, nats, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    await door.make()
    directory = tmp_path / "other"
    directory.mkdir()
    other = Authority(directory, "other")
    assert await door.refused(door.mine(username="nobody")) == "authentication_failed"
    door.write(door.password, OTHER)
    assert await door.refused(door.mine()) == "authentication_failed"
    door.write(door.password, SECRET)
    elsewhere = door.server.address.replace("127.0.0.1", "127.0.0.2")
    assert await door.refused(door.mine(elsewhere)) == "certificate_wrong_host"
    assert await door.refused(door.mine(tls_ca_file=other.certificate)) == "certificate_foreign"
    assert await door.refused(door.mine(nats.address)) == "tls_failed"
    nobody = {"username": None, "password_file": None, "tls_ca_file": None}
    assert await door.refused(door.mine(**nobody)) in {"tls_failed", "certificate_foreign"}
    missing = door.mine(stream="not-there")
    assert await door.refused(missing) == "stream_missing"
    door.password.chmod(0o644)
    assert await door.refused(door.mine()) == "key_file"
    door.password.chmod(0o600)
    door.server.lock(certificate="expired")

    async def expired():
        return await door.refused(door.mine()) == "certificate_expired"

    assert await expired()
    door.server.lock(verify=True)
    assert await door.refused(door.mine()) == "client_certificate_refused"
    for issued in (other.issue("client"), door.server.authority.issue("old", days=-1)):
        keys = {"tls_certificate_file": issued.certificate, "tls_key_file": issued.key}
        assert await door.refused(door.mine(**keys)) == "client_certificate_refused"
    for secret in (SECRET, OTHER):
        assert secret not in caplog.text


async def test_who_is_locked_out_while_writing_counts_it_and_comes_back_with_the_new_password(door, caplog):
    async with fleet(door) as log:
        leaf = log.leaf(NatsLog(door.mine()), queue_batches=5)
        leaf.store(10)
        await leaf.written()
        reading = await log.reading()
        await reading.holds(leaf)
        door.server.lock(password=OTHER)  # the server ends the connections of who has another one

        def refused():
            leaf.store(3, gone=2)
            return leaf.stats.refused["authentication_failed"] and leaf.stats.dropped_batches["log_unavailable"]

        await eventually(refused, "the server to refuse")
        assert leaf.stats.queue_depth <= 5
        assert "authentication failed" in caplog.text
        door.write(door.password, OTHER)
        await eventually(lambda: leaf.stats.states_sent["lost"], "a state behind what is missing")
        await reading.holds(leaf)
        assert reading.follower.counts["lost"] == 0
    for secret in (SECRET, OTHER):
        assert secret not in caplog.text
        assert secret not in repr(door.mine())


def documented(role):
    """What one user may publish and subscribe to, as the documentation has it."""
    (found,) = re.findall(rf"user: {role}, password: PASSWORD, permissions: (\{{.*?\n\}})", LOG.read_text(), re.DOTALL)
    return {name: re.findall(r'"([^"]+)"', said) for name, said in re.findall(r"(\w+): \[(.*?)\]", found, re.DOTALL)}


MINE = Stream("eu-1", "meta-llama/Llama-3.1-8B", "worker-a/engine", 0).key
THEIRS = Stream("eu-1", "meta-llama/Llama-3.1-8B", "worker-b/engine", 0).key
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
async def test_documented_permissions_are_enough_and_none_of_them_is_too_much(door, role):
    await door.make()
    names = documented(role)
    log = NatsLog(door.mine())

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
            reader = await log.read({MINE: START, THEIRS: START})
            try:
                ends = await reader.ends()
                taken: set[str] = set()
                async with asyncio.timeout(PATIENCE):
                    while taken != {MINE, THEIRS}:  # each may come for itself
                        taken |= {entry.key for entry in await reader.take(2.0)}
                await reader.take(0.1)
                assert await reader.reached(MINE) == ends[MINE]
            finally:
                await reader.close()

    def may(publish, subscribe):
        door.server.lock(
            permissions=f", permissions: {{ publish: {json.dumps(publish)}, subscribe: {json.dumps(subscribe)} }}"
        )

    for key in (MINE, THEIRS):
        await written(door.open(), key)
    may(names["publish"], names["subscribe"])
    await does()
    for key in {"worker-a": [THEIRS], "leaves": [OTHER_MODEL]}.get(role, ()):
        with pytest.raises(UnavailableError, match="no permission allows this"):
            await log.claim(key)
    assert len(names["publish"]) > 2
    for one in names["publish"]:
        await written(door.open(), MINE)
        may([name for name in names["publish"] if name != one], names["subscribe"])
        with pytest.raises(UnavailableError) as error:
            await does()
        assert error.value.reason == "denied", one
