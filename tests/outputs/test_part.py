"""Tests for an output type in a separate distribution, with a simulated engine: it works if and only if it is
installed.
"""

import json
import signal

import msgspec
import pytest

from kvbus.config import parts
from tests.doubles.bus import eventually
from tests.doubles.kvbus_process import Place, engine_at, run_async
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.outputs.example.install import install
from tests.system.test_check import kvbus


@pytest.fixture
def config(tmp_path):
    return ("--source", "ipc://engine", "--output", f"ipc://{tmp_path}/blocks.jsonl", "--set", "outputs[0].type=lines")


@pytest.fixture
def site(tmp_path):
    directory = tmp_path / "site"
    install(directory)
    return directory


def blocks(path):
    """Return the seqs and the hashes of the stored blocks in a file that the example output has written."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    payloads = [msgspec.msgpack.decode(bytes.fromhex(line["payload"])) for line in lines]
    stored = [block for payload in payloads for event in payload[1] for block in event["block_hashes"]]
    return [line["seq"] for line in lines], stored


def test_an_installed_output_type_writes_the_blocks_of_an_engine(tmp_path, site, monkeypatch):
    """The installed output type writes an engine's blocks to a file.

    A second output of this type writes to ``/dev/full``, so it loses all batches. kvbus counts them under a reason that
    only this output type has.
    """
    monkeypatch.setenv("PYTHONPATH", str(site))
    file = tmp_path / "blocks.jsonl"
    outputs = [
        {"name": name, "type": "lines", "endpoint": f"ipc://{path}", "heartbeat": 0}
        for name, path in (("file", file), ("full", "/dev/full"))
    ]
    place = Place(tmp_path, outputs=outputs)
    lost = 'kvbus_output_dropped_batches_total{output="full",reason="write_failed"} 30.0'

    async def main():
        with place.kvbus() as bus:
            await place.ready(bus)
            async with engine_at(place) as engine:
                for n in range(30):
                    engine.publish(batch(store([n])))
                await eventually(lambda: lost in place.get("/metrics")[1], "everything counted that was not written")
            assert blocks(file) == (list(range(30)), list(range(30)))
            bus.process.send_signal(signal.SIGTERM)
            assert await bus.ends() == 0, bus.said

    run_async(main())


def test_an_output_type_that_is_not_installed_is_a_configuration_error(config, site):
    assert kvbus("check", *config, env={"PYTHONPATH": str(site)}).returncode == 0
    for command in ("check", "run"):
        done = kvbus(command, *config)
        assert (done.returncode, done.stdout) == (78, "")
        assert "outputs[0].type = 'lines': must be an installed type: dynamo, kafka, nats, redis, zmq" in done.stderr


@pytest.mark.parametrize("command", ["check", "run"])
def test_an_output_type_without_its_package_is_a_configuration_error(config, site, command):
    (site / "kvbus_lines.py").unlink()
    one_more = ("--output", "ipc://other", "--set", "outputs[1].type=lines")
    done = kvbus(command, *config, *one_more, env={"PYTHONPATH": str(site)})
    assert (done.returncode, done.stdout) == (78, "")
    for number in (0, 1):
        lacking = "lines needs a package that is not installed (No module named 'kvbus_lines')"
        assert f"outputs[{number}].type = 'lines': {lacking}" in done.stderr


@pytest.mark.parametrize("there", [True, False])
def test_kvbus_looks_up_libsodium_without_importing_it(monkeypatch, there):
    asked = []

    def find(name):
        asked.append(name)
        return object() if there else None

    monkeypatch.setattr(parts, "find_spec", find)
    assert parts.has_libsodium() is there
    assert asked == ["nacl"]
