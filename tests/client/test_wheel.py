"""Tests for the wheels of kvbus and of the client, installed in fresh environments.

`make client-wheel` builds both wheels and names their directory in TEST_WHEELS. The environments are made without a
network, from the packages of this environment.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from kvbus.transport.engine.publisher import EnginePublisher
from tests.client.blocks import batch, stored, tokens
from tests.doubles.bus import eventually, running_bus
from tools.client_wheel import REQUIRES, ROOT, configuration, files

HERE = Path(sysconfig.get_path("purelib"))
WHEELS = os.environ.get("TEST_WHEELS")
built = pytest.mark.skipif(not WHEELS, reason="TEST_WHEELS names no directory of wheels: make client-wheel")


def run(python, *words, path=None, ok=True):
    """Run Python and return its output. The process can import from this source tree only the directories of `path`."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    if path:
        env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    ran = subprocess.run([python, *words], env=env, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode == 0) is ok, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


@pytest.fixture
def requirements(tmp_path):
    """Return a directory with the client's dependencies and no other package."""
    folder = tmp_path / "requirements"
    folder.mkdir()
    for pattern in ("msgspec*", "zmq", "pyzmq*"):
        for path in HERE.glob(pattern):
            (folder / path.name).symlink_to(path)
    return folder


def test_the_client_wheel_has_no_module_of_the_daemon():
    assert {re.split(r"[/.]", path)[1] for path in files(ROOT)} == {
        *("__init__", "client", "common", "core", "py", "transport")
    }
    assert "kvbus/core/relay.py" not in files(ROOT)
    assert "kvbus/common/logs.py" not in files(ROOT)


def test_the_client_wheel_is_a_library_with_the_version_of_kvbus():
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    project = configuration(ROOT)["project"]
    assert project["name"] == "kvbus-client"
    assert [re.split(r"[^\w-]", each)[0] for each in project["dependencies"]] == list(REQUIRES)
    assert set(project["dependencies"]) <= set(whole["dependencies"])
    assert {key: project[key] for key in ("version", "license", "requires-python")} == {
        key: whole[key] for key in ("version", "license", "requires-python")
    }
    assert not {"scripts", "entry-points", "optional-dependencies"} & project.keys()


def test_the_client_can_be_imported_with_only_its_files_and_requirements(tmp_path, requirements):
    for name in files(ROOT):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "tree" / name)
    names = "import kvbus.client as c; print(c.__file__, [getattr(c, name) for name in c.__all__])"
    said = run(sys.executable, "-S", "-Pc", names, path=[tmp_path / "tree", requirements])
    assert str(tmp_path / "tree" / "kvbus" / "client") in said


class Environment:
    """A fresh virtual environment in which a test installs wheels."""

    def __init__(self, folder: Path, packages: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        self.kvbus = str(folder / "bin" / "kvbus")
        self.site = next(folder.glob("lib/python*/site-packages"))
        (self.site / "packages.pth").write_text(f"{packages}\n")

    def pip(self, *words: object) -> None:
        run(sys.executable, "-m", "pip", "--python", str(self.python), *map(str, words))

    def install(self, *names: str) -> None:
        for name in names:
            wheel = next(Path(WHEELS or "").absolute().glob(f"{name}-*-py3-none-any.whl"))
            self.pip("install", "--force-reinstall", "--no-deps", "--no-index", wheel)

    def commands(self) -> set[str]:
        return {path.name for path in self.python.parent.iterdir()}

    def says(self, *words: str, ok: bool = True) -> str:
        return run(self.python, "-P", *words, ok=ok)


IMPORT = "import kvbus.client; print(kvbus.client.__file__)"


@built
async def test_the_installed_client_wheel_alone_follows_a_bus(tmp_path, requirements):
    environment = Environment(tmp_path / "alone", requirements)
    environment.install("kvbus_client")
    example = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "CLIENT.md").read_text(), re.DOTALL)[0]
    async with (
        running_bus() as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        engine.publish(batch(stored(1, 2)))
        await eventually(lambda: bus.caught_up(0), "the batch relayed")
        asked = f"print(*route({{'pod': ({bus.out!r}, {bus.out_replay!r})}}, [{tokens(1, 2, 3)}]))"
        said = await asyncio.to_thread(environment.says, "-c", f"{example}\n{asked}")
    assert said == "pod live \npod\n"
    assert str(environment.site) in environment.says("-c", IMPORT)
    assert "No module named 'kvbus.daemon'" in environment.says("-c", "import kvbus.daemon", ok=False)
    assert "kvbus" not in environment.commands()


@built
@pytest.mark.parametrize("names", [("kvbus", "kvbus_client"), ("kvbus_client", "kvbus")], ids=" then ".join)
def test_client_and_kvbus_can_be_installed_together_and_uninstalled(tmp_path, names):
    environment = Environment(tmp_path / "both", HERE)
    environment.install(*names)
    assert str(environment.site) in environment.says("-c", IMPORT)
    assert environment.says("-m", "kvbus", "--version").startswith("kvbus ")
    if names[0] == "kvbus":
        environment.pip("uninstall", "--yes", "kvbus-client")
        assert "--force-reinstall --no-deps" in environment.says(environment.kvbus, ok=False)
        environment.install("kvbus")
        assert environment.says(environment.kvbus, "--version").startswith("kvbus ")


@built
def test_importing_two_different_versions_is_refused(tmp_path, requirements):
    environment = Environment(tmp_path / "mixed", requirements)
    environment.install("kvbus_client", "kvbus")
    mine = next(environment.site.glob("kvbus_client-*.dist-info"))
    mine.rename(mine.with_name("kvbus_client-99.0.0.dist-info"))
    assert "uninstall both, install one" in environment.says("-c", IMPORT, ok=False)
