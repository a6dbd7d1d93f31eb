"""Tests that remove an optional output type from a copy of the source tree: the rest must work as before.

The tests remove each type except ``zmq``, whether it is a module or a folder. They also add the example to the copy as
a folder, and remove it: this proves that the example works and that a defect would be noticed.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.long import sample
from tests.outputs.example.install import install

ROOT = Path(__file__).parents[2]
ENTRY_POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
PARTS = sorted({*ENTRY_POINTS["kvbus.outputs"]} - {"zmq"})

EVERYTHING = """
import importlib, json, pkgutil, kvbus
names = [module.name for module in pkgutil.walk_packages(kvbus.__path__, "kvbus.") if module.name != "kvbus.__main__"]
print(json.dumps([importlib.import_module(name).__file__ for name in names]))
"""


class Tree:
    """A copy of kvbus's source tree, to which the example output type was added."""

    def __init__(self, root):
        self.root = root
        # The copy includes bytecode, because compiling takes most of the time of an import.
        # It leaves out the unfinished files of other processes that compile.
        shutil.copytree(ROOT / "kvbus", root / "kvbus", ignore=shutil.ignore_patterns("*.pyc.*"))
        install(root, "kvbus.parts.outputs.lines")

    def part(self, kind, name):
        """Return the path of an optional part of kvbus, which is a module or a folder."""
        folder = self.root / "kvbus" / "parts" / kind / name
        return folder if folder.exists() else folder.with_suffix(".py")

    def take_out(self, kind, name):
        """Remove an optional part of kvbus from this copy of the source tree. Return the paths of its modules."""
        part = self.part(kind, name)
        files = set(part.rglob("*.py")) if part.is_dir() else {part}
        shutil.rmtree(part) if part.is_dir() else part.unlink()
        return files

    def python(self, *args):
        env = {key: value for key, value in os.environ.items() if not key.startswith("KVBUS_")}
        return subprocess.run(
            [sys.executable, *args],
            cwd=self.root,
            env={**env, "PYTHONPATH": str(self.root)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def modules(self):
        """Import all modules of the copied source tree, and return their paths."""
        done = self.python("-c", EVERYTHING)
        assert done.returncode == 0, done.stderr
        return set(map(Path, json.loads(done.stdout)))

    def check(self, *args):
        return self.python("-m", "kvbus", "check", "-c", str(ROOT / "deploy" / "kvbus.yaml"), *args)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


@pytest.mark.parametrize("part", sample([*PARTS, "lines"], len(PARTS)))
def test_kvbus_works_without_an_optional_part(tree, part):
    before = tree.modules()
    own = tree.take_out("outputs", part)
    assert own
    assert own <= before
    assert tree.modules() == before - own
    done = tree.check()
    assert (done.returncode, [line for line in done.stderr.splitlines() if not line.startswith("access: ")]) == (0, [])
    ends = ("--source", "ipc://engine", "--output", "tcp://127.0.0.1:5657")
    done = tree.python("-m", "kvbus", "check", *ends, "--set", "model=m", "--set", f"outputs[0].type={part}")
    assert (done.returncode, done.stdout) == (78, "")
    assert f"outputs[0].type = '{part}': {part} needs a package that is not installed" in done.stderr


def test_a_module_that_needs_a_removed_part_is_found(tree):
    daemon = tree.root / "kvbus" / "daemon" / "outputs.py"
    daemon.write_text(f"{daemon.read_text()}\n\nimport kvbus.parts.outputs.lines\n")
    tree.take_out("outputs", "lines")
    with pytest.raises(AssertionError, match=r"No module named 'kvbus\.parts\.outputs\.lines'"):
        tree.modules()
