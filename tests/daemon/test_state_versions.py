"""A state directory over an upgrade and back: read or refused with a sentence, and no seq goes back either way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kvbus.daemon import state_file
from kvbus.daemon.seq_reservation import SeqReservations
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.payloads import payload, store
from tests.system.bus import Bus, eventually, running_bus

BEFORE = Path(__file__).parent / "data" / "state-009"
"""What version 009 left when it was killed: three live blocks, 29 numbers used and 4,096 reserved."""

USED = 29


def settings(directory: Path) -> dict[str, Any]:
    """The same bus each time, by its names and addresses."""
    here = {"endpoint": f"ipc://{directory}/out", "replay_endpoint": f"ipc://{directory}/out-replay"}
    return {"state_dir": str(directory / "state"), "output": here}


def next_seq(bus: Bus) -> int:
    return bus.daemon.relay.outputs[0].streams[0].next_seq


async def relayed(bus: Bus, count: int) -> int:
    """An engine that begins anew publishes so many batches; the number that follows."""
    async with EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine:
        for block in range(count):
            engine.publish(payload(store([block + 1])))
        await eventually(lambda: bus.caught_up(count - 1), "every batch relayed")
    return next_seq(bus)


async def test_the_state_of_the_version_before_is_refused_and_no_seq_goes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "state"
    shutil.copytree(BEFORE, directory)
    # a file of reservations is named after the user and the stream
    reservations = SeqReservations(tmp_path / "names")
    reservations.add(0, 0, f"routers {settings(tmp_path)['output']['endpoint']}")
    reservations.release()
    (name,) = [path.name for path in (tmp_path / "names").glob("kvbus-*.seq")]
    (recorded,) = directory.glob("kvbus-*.seq")
    recorded.rename(directory / name)
    async with running_bus(**settings(tmp_path)) as bus:
        (said,) = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
        assert "state-1.dump is of version 009, and this kvbus reads version 013" in said
        assert "beginning empty" in said
        assert bus.daemon.process.state_refused == 2
        assert sorted(path.name.partition(".refused-")[0] for path in directory.glob("*.refused-*")) == [
            "state-1.dump",
            "state-1.log",
        ]
        assert not bus.daemon.restored
        first = next_seq(bus)
        assert first > USED
        assert await relayed(bus, 3) == first + 3
    async with running_bus(**settings(tmp_path)) as bus:
        assert bus.daemon.restored
        assert bus.daemon.process.state_refused == 0
        assert next_seq(bus) == first + 3


async def test_an_upgrade_and_the_way_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each version finds what the other one wrote: it says so, counts it, and goes on from a higher number."""
    used = 0
    for version, other in ((b"013", None), (b"014", b"013"), (b"013", b"014")):
        monkeypatch.setattr(state_file, "MAGIC", b"kvbus-state-%s\n" % version)
        caplog.clear()
        async with running_bus(**settings(tmp_path)) as bus:
            said = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
            expected = (
                f"is of version {other.decode()}, and this kvbus reads version {version.decode()}" if other else ""
            )
            assert len(said) == bool(other)
            assert all(expected in text for text in said)
            assert bool(bus.daemon.process.state_refused) == bool(other)
            assert next_seq(bus) >= used
            used = await relayed(bus, 5)
        async with running_bus(**settings(tmp_path)) as bus:
            assert bus.daemon.restored
            assert next_seq(bus) == used
            used = next_seq(bus)
