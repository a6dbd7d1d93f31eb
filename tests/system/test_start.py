"""Tests for difficult starts: names that do not resolve yet, a silent name server, and an old libzmq."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from kvbus.common.errors import UnsupportedError
from kvbus.transport import sockets
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually
from tests.doubles.kvbus_process import Place, Program, engine_at, run_async
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store


def own_mounts() -> bool:
    """Return whether a process of this user may mount its own files over those in /etc, as the tests need."""
    if shutil.which("unshare") is None:
        return False
    try:
        done = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False, timeout=60)
    except OSError:
        return False
    return done.returncode == 0


class InItsOwnEtc(Program):
    """A ``kvbus`` process for which a test's file replaces a file in /etc."""

    def __init__(self, directory: Path, file: str, instead: Path, *args: str) -> None:
        super().__init__(directory, *args)
        self._mount = f"mount --bind {instead} {file}"

    @property
    def command(self) -> list[str]:
        return ["unshare", "-m", "sh", "-c", f'{self._mount} && exec "$@"', "sh", *super().command]


needs_mounts = pytest.mark.skipif(not own_mounts(), reason="needs unshare -m (root) to have an /etc/hosts of its own")


@needs_mounts
def test_kvbus_connects_when_the_name_of_its_engine_resolves_later(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(tmp_path)
        names = tmp_path / "hosts"
        names.write_text("127.0.0.1 localhost\n")
        port, replay_port = (where.rpartition(":")[2] for where in (place.engine, place.engine_replay))
        source = {
            "endpoint": f"tcp://engine-0.kv.test:{port}",
            "replay_endpoint": f"tcp://engine-0.kv.test:{replay_port}",
        }
        place.config["sources"] = [source]
        place.write()
        with InItsOwnEtc(tmp_path, "/etc/hosts", names, "run", "-c", str(tmp_path / "kvbus.yaml")) as bus:
            await place.ready(bus)
            async with EnginePublisher(place.engine, place.engine_replay, bind=True) as engine:
                assert place.sources()[0]["state"] == "connecting"
                with names.open("a") as file:
                    file.write("127.0.0.1 engine-0.kv.test\n")
                await engine.wait_for_subscriber(60)
                engine.publish(batch(store([1])))
                await eventually(lambda: place.sources()[0]["last_seq"] == 0, "the batch")
            bus.process.terminate()
            assert await bus.ends() == 0, bus.said

    run_async(main())


@needs_mounts
def test_a_silent_name_server_does_not_delay_other_engines(tmp_path: Path) -> None:
    """Each look-up of an engine's name takes two and a half minutes.

    During this time kvbus relays another engine, which is configured by its IP address.
    """

    async def main() -> None:
        place = Place(tmp_path)
        silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        silent.setblocking(False)
        silent.bind(("127.77.0.1", 53))
        with silent:
            resolver = tmp_path / "resolv.conf"
            resolver.write_text("nameserver 127.77.0.1\noptions timeout:30 attempts:5\n")
            place.config["sources"] = [
                {"name": "named", "endpoint": "tcp://nobody.kv.test:5557"},
                {"name": "engine", **place.config["sources"][0]},
            ]
            place.config["outputs"][0]["layout"] = "merged"
            place.write()
            with InItsOwnEtc(tmp_path, "/etc/resolv.conf", resolver, "run", "-c", str(tmp_path / "kvbus.yaml")) as bus:
                await place.ready(bus)
                asked: list[bytes] = []

                def was_asked() -> bool:
                    try:
                        asked.append(silent.recv(512))
                    except BlockingIOError:
                        return bool(asked)
                    return True

                await eventually(was_asked, "a question to the name server")
                async with asyncio.timeout(60), engine_at(place) as engine:
                    for n in range(20):
                        engine.publish(batch(store([n + 1])))
                    await eventually(lambda: place.sources()[1]["last_seq"] == 19, "relayed meanwhile")
                bus.process.kill()

    run_async(main())


def test_an_old_libzmq_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: (4, 3, 4))
    monkeypatch.setattr(zmq, "zmq_version", lambda: "4.3.4")
    with pytest.raises(UnsupportedError, match=r"libzmq 4\.3\.4 is too old: 4\.3\.5 or newer") as caught:
        sockets.check_library()
    assert caught.value.exit_code == 78


def test_kvbus_ends_with_one_line_if_libzmq_is_too_old(tmp_path: Path) -> None:
    """With a libzmq that is too old, kvbus prints one line and ends.

    The exit code tells a supervisor not to restart it.
    """
    code = (
        "import zmq; zmq.zmq_version_info = lambda: (4, 3, 4)\n"
        "from kvbus.cli import main; main(['run', '--source', 'ipc:///e', '--output', 'ipc:///o', '--http', 'null'])"
    )
    env = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "STATE_DIRECTORY": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 78
    assert "is too old" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("endpoint", "bind", "thread"),
    [
        ("tcp://engine-0.kv:5557", False, 2),
        ("tcp://localhost:5557", False, 2),
        ("tcp://10.0.0.7:5557", False, 1),
        ("tcp://[::1]:5557", False, 1),
        ("tcp://127.0.0.1:*", True, 1),
        ("ipc:///tmp/kvbus-test-thread", False, 1),
    ],
)
def test_host_names_are_resolved_in_the_second_io_thread(endpoint: str, bind: bool, thread: int) -> None:
    context = sockets.Context(sockets.IO_THREADS)
    sub = sockets.make_socket(context, zmq.SUB)
    try:
        sockets.attach_or_refuse(sub, endpoint, bind=bind)
        assert sub.getsockopt(zmq.AFFINITY) == thread
    finally:
        sub.close(0)
        context.term()
