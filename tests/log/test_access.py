"""Tests that kvbus reads and writes each kind of log with a password or a client certificate.

A user without rights is refused, and the error has the reason.
"""

import asyncio
import contextlib
import functools
import logging

import pytest

from kvbus.parts.log.contract import START, Pointer, UnavailableError
from kvbus.tools.doctor.outputs import finding_key
from tests.doubles.bus import PATIENCE, eventually
from tests.log.doors import MINE, OTHER, OTHER_MODEL, SECRET, THEIRS, WRONG, KafkaDoor, NatsDoor, RedisDoor
from tests.log.fleet import KEY, fleet
from tests.log.kinds import insist
from tests.security.certificates import Authority


@pytest.fixture(params=["kafka", "nats", "redis"])
async def door(request, tmp_path):
    made = {"kafka": KafkaDoor, "nats": NatsDoor, "redis": RedisDoor}[request.param]
    async with contextlib.aclosing(made(request.getfixturevalue(request.param), tmp_path)) as door:
        await door.open()
        yield door


async def refused(door, place):
    """Check that the server refuses kvbus, and return the reason that kvbus reports.

    kvbus tries to write, to read and to list the streams. `kvbus doctor` must report the same reason, and no error may
    contain the password.
    """
    log = door.log(place)
    reasons = set()
    for attempt in (log.claim(KEY), log.pointers(), log.read({KEY: START})):
        with pytest.raises(UnavailableError) as error:
            await attempt
        assert SECRET not in str(error.value)
        reasons.add(error.value.reason)
    (reason,) = reasons
    findings, _ = await door.looked(place)
    assert [finding.key for finding in findings] == [f"outputs[0].{finding_key(door.name, reason)}"]
    return reason


async def test_kvbus_writes_and_reads_with_a_valid_password_or_certificate(door):
    places = [
        (door.place(), lambda: asyncio.sleep(0)),
        (door.with_certificate(door.authority.issue(door.user)), door.wants_certificates),
    ]
    for place, before in places:
        await before()
        log = door.log(place)
        writer = await insist(functools.partial(log.claim, KEY))
        await writer.append([b"one"])
        await writer.close()
        reader = await log.read({KEY: START})
        assert (await reader.take(20.0))[0].data == b"one"
        await reader.close()
        findings, said = await door.looked(place)
        assert findings == []
        assert said.startswith(f"{place.servers} has ")
        assert "1 " in said


async def test_each_wrong_password_or_certificate_is_refused_with_its_reason(door, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "other")
    assert await refused(door, door.place(username="nobody")) == "authentication_failed"
    door.write(OTHER)
    assert await refused(door, door.place()) == "authentication_failed"
    door.write(SECRET)
    assert await refused(door, door.place(door.address.replace("127.0.0.1", "127.0.0.2"))) == "certificate_wrong_host"
    assert await refused(door, door.place(tls_ca_file=other.certificate)) == "certificate_foreign"
    assert await refused(door, door.place(door.plain)) in {"tls_failed", "unreachable"}
    door.password.chmod(0o644)
    assert await refused(door, door.place()) == "key_file"
    door.password.chmod(0o600)
    assert await refused(door, await door.wants_certificates()) == "client_certificate_refused"
    for issued in (other.issue(door.user), door.authority.issue("old", days=-1)):
        assert await refused(door, door.with_certificate(issued)) == "client_certificate_refused"
    assert await refused(door, await door.expire()) == "certificate_expired"
    async for place, reasons in door.wrong():
        assert await refused(door, place) in reasons
    for secret in (SECRET, OTHER):
        assert secret not in caplog.text


async def test_a_writer_whose_password_changed_writes_again_with_the_new_password(door, caplog):
    async with fleet(door.kind) as log:
        leaf = log.leaf(door.log(door.place()), queue_batches=5)
        leaf.store(10)
        await leaf.written()
        reading = await log.reading()
        await reading.holds(leaf)
        await door.change(OTHER)

        def refused():
            leaf.store(3, gone=2)
            return leaf.stats.refused["authentication_failed"] and leaf.stats.dropped_batches["log_unavailable"]

        await eventually(refused, "the server to refuse")
        assert leaf.stats.queue_depth <= 5
        assert "authentication failed" in caplog.text
        door.write(OTHER)
        await eventually(lambda: leaf.stats.states_sent["lost"], "a state behind what is missing")
        await reading.holds(leaf)
        door.write(SECRET)
        await door.change(SECRET)
        leaf.store(1)
        await reading.holds(leaf)
        assert reading.follower.counts["lost"] == 0
    for secret in (SECRET, OTHER):
        assert secret not in caplog.text
        assert secret not in repr(door.place())


async def test_a_writer_that_loses_its_right_counts_refusals_and_writes_again_later(door):
    async with fleet(door.kind) as log:
        leaf = log.leaf(door.log(door.place()))
        leaf.store(10)
        await leaf.written()
        await door.forbid()

        def denied():
            leaf.store(1)
            return leaf.stats.refused["denied"] or leaf.stats.refused["topic_denied"]

        await eventually(denied, "the server to refuse")
        await door.open()
        await (await log.reading()).holds(leaf)


async def written(log, key):
    writer = await log.claim(key)
    try:
        position = await writer.append([b"record"])
        await writer.point(Pointer(writer.epoch, 0, position))
        assert await writer.keeps(position)
    finally:
        await writer.close()


async def read(log):
    assert set(await log.pointers()) == {MINE, THEIRS}
    reader = await log.read({MINE: START, THEIRS: START, WRONG: START})
    try:
        ends = await reader.ends()
        taken: set[str] = set()
        async with asyncio.timeout(PATIENCE):
            while taken != {MINE, THEIRS}:  # a read may return the entries of only one stream
                taken |= {entry.key for entry in await reader.take(2.0)}
        await reader.take(0.1)
        assert await reader.reached(MINE) == ends[MINE]
    finally:
        await reader.close()


async def acts(door, role):
    """Do everything for which a role (reader, worker or leaf) needs its rights at the log."""
    log = door.log(door.place())
    if role == "reader":
        await read(log)
    for key in {"worker-a": [MINE], "leaves": [MINE, THEIRS]}.get(role, ()):
        await written(log, key)
        if door.reads_its_pointers:
            assert set(await log.pointers(key)) == {key}


async def comes_to(wanted, attempt):
    """Repeat a call until it succeeds (``wanted`` is None) or is refused for the reason ``wanted``.

    A server applies new rights with a delay.
    """
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


@pytest.mark.parametrize("role", ["worker-a", "leaves", "reader"])
async def test_the_documented_rights_are_sufficient_and_each_is_necessary(door, role):
    for key in (MINE, THEIRS):
        await insist(functools.partial(written, door.kind.open(), key))
    given = door.documented(role)
    assert len(given) > 1
    await door.grant(role, given)
    await comes_to(None, lambda: acts(door, role))
    log = door.log(door.place())
    refusal = "transactional_id_denied" if door.name == "kafka" else "denied"
    others = {"worker-a": THEIRS, "leaves": OTHER_MODEL, "reader": MINE}[role]
    await comes_to(refusal, lambda: log.claim(others))
    if door.name == "kafka" and role == "worker-a":
        await comes_to("topic_denied", lambda: read(log))
    for right in given:
        await written(door.kind.open(), MINE)
        await door.grant(role, [each for each in given if each != right])
        await comes_to(door.missing(right), lambda: acts(door, role))
