"""Tests for ``tail``, ``dump`` and ``record`` at an output that requires CURVE."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.common.errors import ConfigError
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually, running_bus
from tests.doubles.kvbus_process import Program
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.security.keys import Keyring


async def test_tail_dump_and_record_read_an_output_with_keys(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    with_keys = ("--curve-secret-key", str(keys.router.secret_file), "--curve-server-key", str(keys.bus.public_file))
    capture = tmp_path / "stream.jsonl"
    async with (
        running_bus(output={"on_subscribe": "nothing", **keys.output}) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await engine.wait_for_subscriber(60)
        engine.publish(batch(store([1])))
        await eventually(lambda: bus.caught_up(0), "the first batch")
        with (
            Program(tmp_path, "dump", "--replay-endpoint", bus.out_replay, "--json", *with_keys, name="dump") as dump,
            Program(tmp_path, "tail", bus.out, "--json", "--count", "1", *with_keys, name="tail") as tail,
            Program(tmp_path, "record", bus.out, str(capture), "--count", "1", *with_keys, name="record") as record,
        ):
            assert await dump.ends() == 0, dump.said
            assert [json.loads(line)["hash"] for line in dump.printed.splitlines()] == [1]
            stats = bus.daemon.outputs.stats[0]
            await eventually(lambda: stats.subscribers == 2, "both subscribed")
            engine.publish(batch(store([2])))
            assert await tail.ends() == 0, tail.said
            assert await record.ends() == 0, record.said
            assert '"kind":"batch"' in tail.printed
            assert len(capture.read_text().splitlines()) >= 1
        stranger = ("--curve-secret-key", str(keys.stranger.secret_file), *with_keys[2:])
        with Program(
            tmp_path, "dump", "--replay-endpoint", bus.out_replay, "--timeout", "1", *stranger, name="stranger"
        ) as refused:
            assert await refused.ends() == 69, refused.said


@pytest.mark.parametrize(
    "command", [["tail", "ipc:///x"], ["dump", "--replay-endpoint", "ipc:///x"], ["record", "ipc:///x", "-"]]
)
def test_a_command_refuses_a_secret_key_without_the_server_key(tmp_path: Path, command: list[str]) -> None:
    keys = Keyring(tmp_path)
    done = CliRunner().invoke(main, [*command, "--curve-secret-key", str(keys.router.secret_file)])
    assert done.exit_code == 2
    assert "CURVE needs both" in done.output


def test_tail_refuses_keys_for_a_bound_socket(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    both = ["--curve-secret-key", str(keys.router.secret_file), "--curve-server-key", str(keys.bus.public_file)]
    done = CliRunner().invoke(main, ["tail", "ipc:///x", "--bind", *both])
    assert done.exit_code == 2
    assert "leave out --bind" in done.output


def test_dump_refuses_a_secret_key_that_other_users_can_read(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    keys.router.secret_file.chmod(0o644)
    both = ["--curve-secret-key", str(keys.router.secret_file), "--curve-server-key", str(keys.bus.public_file)]
    with Program(tmp_path, "dump", "--replay-endpoint", "ipc:///x", *both) as dump:
        assert dump.ended() == ConfigError.exit_code
    assert "--curve-secret-key" in dump.said
    assert "other users can read it (mode 0644)" in dump.said
