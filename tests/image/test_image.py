"""Tests for kvbus's container image: what it contains and needs, its shutdown, and that it relays a capture exactly."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pytest
import uvloop

from kvbus.tools.capture.play import Faults, play
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually
from tests.doubles.kvbus_process import Place
from tests.doubles.socket_routers import RouterOnASet
from tests.image.conftest import IMAGE, SECURE, Podman
from tests.wire.captures import load, matches_truth

ROOT: Final = Path(__file__).parents[2]
USER: Final = "65532"
VERSION: Final = version("kvbus")
OPERATIONS: Final = " ".join((ROOT / "docs" / "OPERATIONS.md").read_text().split())
START_SECONDS: Final = 20.0
"""Maximum seconds from `podman run` until kvbus is ready, on a busy machine. OPERATIONS.md has measured times."""


@pytest.fixture(scope="session")
def config(podman: Podman) -> dict[str, Any]:
    return dict(json.loads(podman("image", "inspect", "--format", "{{json .Config}}", IMAGE).stdout))


def test_each_stage_of_the_image_uses_the_base_image_pinned_by_digest() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON_IMAGE=python:\d+\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}$", dockerfile, re.MULTILINE)
    assert re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE) == ["${PYTHON_IMAGE}"] * 2


def test_the_image_runs_kvbus_as_a_fixed_unprivileged_user(podman: Podman, config: dict[str, Any]) -> None:
    assert config["Entrypoint"] == ["kvbus"]
    assert config["User"] == f"{USER}:{USER}"
    assert config["StopSignal"] == "SIGTERM"
    assert set(config["ExposedPorts"]) == {"5657/tcp", "5658/tcp", "9477/tcp"}
    assert podman.shell("id -u; id -g").split() == [USER, USER]
    told = podman("run", "--rm", *SECURE, "--network", "none", IMAGE, "--version")
    assert told.stdout.strip() == f"kvbus {VERSION}"


def test_the_image_has_its_labels(config: dict[str, Any]) -> None:
    prefix = "org.opencontainers.image."
    labels = {key.removeprefix(prefix): value for key, value in config["Labels"].items() if key.startswith(prefix)}
    assert labels.keys() == {"title", "description", "licenses", "version", "revision"}
    assert labels["title"] == "kvbus"
    assert labels["licenses"] == "Apache-2.0"
    assert labels["version"] == VERSION
    assert re.fullmatch(r"[0-9a-f]{40}|unknown", labels["revision"])


def test_the_image_has_no_compiler_no_cache_and_no_build_files(podman: Podman) -> None:
    """The image contains nothing that only kvbus's build needs. The base image's own files are not checked."""
    assert podman.shell("for tool in gcc cc g++ clang ld make; do command -v $tool; done; true") == ""
    names = r"-name .cache -o -name 'hatchling*' -o -name 'ziglang*' -o -path '/src/*' -o -path '/opt/build*'"
    found = podman.shell(rf"find / -xdev -path /proc -prune -o \( {names} \) -print", "--user", "0")
    assert found == ""
    assert "pip" not in podman.shell("ls /opt/kvbus/lib/python3*/site-packages").split()


def test_the_images_user_cannot_write_files_of_kvbus(podman: Podman) -> None:
    assert podman.shell("find /opt/kvbus /etc/kvbus -writable ! -type l").split() == []
    assert podman.shell("touch /var/lib/kvbus/x 2>/dev/null && echo written; true") == "", "the root is read-only"


def test_the_image_contains_compiled_byte_code(podman: Podman) -> None:
    """The image contains compiled byte code.

    With a read-only root, Python cannot store byte code later, so each start would compile every module.
    """
    code = "import kvbus.daemon.daemon as d; print(d.__cached__)"
    (cached,) = podman.shell(f'python -c "{code}" | xargs ls').split()
    assert cached.endswith(".pyc")


def test_the_images_byte_code_is_unchecked_and_hash_based(podman: Podman) -> None:
    """The image's byte code refers to its source by a hash, not by a date.

    With dates, the byte code would be different in each build. And if the image's files got another date, such as the
    date of a commit, Python would not use the byte code.
    """
    code = "import pathlib; print({path.read_bytes()[4] for path in pathlib.Path('/opt/kvbus').rglob('*.pyc')})"
    assert podman.shell(f'python -c "{code}"').strip() == "{1}", "PEP 552: hash-based, unchecked"


def test_the_image_adds_the_documented_size_to_its_base(podman: Podman) -> None:
    facts = dict(line.split("=", 1) for line in (Path(podman.wrapper).parent / "facts").read_text().splitlines())
    added = int(facts["bytes"]) - int(facts["base_bytes"])
    assert added / 1e6 == pytest.approx(documented(r"adds (\d+) MB to the base image"), rel=0.03)


def test_the_image_adds_the_documented_compressed_size_to_its_base(podman: Podman, tmp_path: Path) -> None:
    """kvbus adds about as many compressed bytes to the base image as OPERATIONS.md says.

    The test adds up the compressed layers, without the layers of the base image.
    """
    podman("save", "--quiet", "--format", "oci-dir", "--output", str(tmp_path / "layout"), IMAGE)
    blobs = tmp_path / "layout" / "blobs" / "sha256"
    index = json.loads((tmp_path / "layout" / "index.json").read_text())
    manifest = json.loads((blobs / index["manifests"][0]["digest"].removeprefix("sha256:")).read_text())
    added = sum(layer["size"] for layer in manifest["layers"][1:])
    assert added / 1e6 == pytest.approx(documented(r"(\d+) MB of them over the wire"), rel=0.05)


def documented(pattern: str) -> float:
    """Return the number in OPERATIONS.md that matches a pattern."""
    (figure,) = re.findall(pattern, OPERATIONS)
    return float(figure)


class Contained(Place):
    """A bus in a container on the host's network, with every protection that the documentation recommends."""

    def run(self, podman: Podman, name: str, *more: str) -> None:
        file = self.directory / "kvbus.yaml"
        file.write_text(json.dumps(self.config))
        mount = f"{file}:/etc/kvbus/kvbus.yaml:ro"
        podman(
            *("run", "--detach", "--name", name, *SECURE, "--network", "host"),
            *("--memory", "256m", "--volume", mount, *more, IMAGE),
        )

    async def up(self, podman: Podman, name: str) -> None:
        def there() -> bool:
            if self.get("/readyz")[0] == 200:
                return True
            running = podman("inspect", "--format", "{{.State.Running}}", name).stdout.strip()
            assert running == "true", podman("logs", name).stderr
            return False

        await eventually(there, "a container that is ready")


@pytest.mark.parametrize("capture", ["vllm033_map_int", "vllm033_restart", "sglang0523_hicache"])
def test_a_router_is_exact_after_a_capture_through_the_container(
    podman: Podman, name: str, tmp_path: Path, capture: str
) -> None:
    async def through() -> None:
        place = Contained(tmp_path)
        began = time.monotonic()
        place.run(podman, name)
        await place.up(podman, name)
        assert time.monotonic() - began < START_SECONDS
        (used,) = re.findall(r"^process_cpu_seconds_total (\S+)", place.get("/metrics")[1], re.MULTILINE)
        assert float(used) < 3 * documented(r"used ([\d.]+) s of CPU"), "a busy machine may take longer for the same"
        router = RouterOnASet(place.out, place.out_replay)
        try:
            router.subscribe()
            await place.subscribed()
            messages = load(capture)
            async with EnginePublisher(place.engine, place.engine_replay, bind=True) as engine:
                await eventually(lambda: place.sources()[0]["state"] == "live", "the bus in sync")
                faults = Faults(drop=0.03, duplicate=0.03, swap=0.03, seed=1)
                await play(engine, lambda: messages, rate=2000, subscribers=1, faults=faults)

                def relayed() -> bool:
                    (source,) = place.sources()
                    return source["last_seq"] == messages[-1].seq and source["state"] == "live"

                await eventually(relayed, "every batch relayed")
                last = sent(place)
                while router.next <= last:
                    await router.follow()
                    await asyncio.sleep(0.005)
            assert matches_truth(capture, router.view) is None
            assert router.view.violations == []
        finally:
            router.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(through())


def sent(place: Place) -> int:
    """Return the newest seq that kvbus has sent on its output, as its metrics show."""
    (value,) = re.findall(
        r'^kvbus_output_sequence\{output="routers",stream="0"\} (\S+)', place.get("/metrics")[1], re.MULTILINE
    )
    return int(float(value))


def test_the_container_shuts_down_at_once_with_exit_code_0(podman: Podman, name: str, tmp_path: Path) -> None:
    place = Contained(tmp_path)
    place.run(podman, name)
    with asyncio.Runner() as runner:
        runner.run(place.up(podman, name))
    began = time.monotonic()
    podman("stop", "--time", "30", name)
    assert time.monotonic() - began < 20
    assert podman("inspect", "--format", "{{.State.ExitCode}}", name).stdout.strip() == "0"
    assert "SIGTERM: shutting down" in podman("logs", name).stderr


EARLY: Final = """
import os, signal, time
from kvbus.cli import main

@main.command("early")
def early():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(300)

main(["early"])
"""
"""A program that gets SIGTERM while kvbus starts, before a subcommand has installed its own signal handlers."""


def test_sigterm_ends_the_container_at_once_during_its_start(podman: Podman, name: str) -> None:
    """SIGTERM ends the container's first process immediately, also while kvbus starts.

    The kernel's default actions do not apply to this process: without a handler it ignores SIGTERM.
    """
    began = time.monotonic()
    options = ("--name", name, *SECURE, "--network", "none", "--entrypoint", "python")
    done = podman("run", *options, IMAGE, "-c", EARLY, check=False, limit=60)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert time.monotonic() - began < 60


def test_a_wrong_configuration_ends_the_container_with_78(podman: Podman, name: str, tmp_path: Path) -> None:
    place = Contained(tmp_path, block_size="many")
    place.run(podman, name)
    assert podman("wait", name).stdout.strip() == "78"
    assert "block_size" in podman("logs", name).stderr


@pytest.mark.parametrize("state_dir", ["/var/lib/kvbus", "auto"])
def test_a_second_container_continues_with_the_state_of_the_first(
    podman: Podman, name: str, tmp_path: Path, state_dir: str
) -> None:
    """A second container continues with the state of the first.

    The state is in a directory on a volume. kvbus gets the directory's path, or finds it with `state_dir: auto`.
    """
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    place = Contained(tmp_path, state_dir=state_dir)
    volume = ("--volume", f"{state}:/var/lib/kvbus:U")

    async def started() -> str:
        place.run(podman, name, *volume)
        await place.up(podman, name)
        await eventually(lambda: any(state.rglob("state.db")), "a state")
        return podman("logs", name).stderr

    with asyncio.Runner() as runner:
        assert "there is no state in" in runner.run(started())
        podman("rm", "--force", "--time", "10", name)
        assert "state read: " in runner.run(started())
    assert "kvbus_state_refused_total 0.0" in place.get("/metrics")[1]
    assert "kvbus_state_writing 1.0" in place.get("/metrics")[1]
