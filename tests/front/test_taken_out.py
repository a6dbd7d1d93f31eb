"""Test that removes the front from a copy of the code: all other parts must work as before."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.outputs.test_taken_out import Tree

FRONT = ("--set", "front={listen: '127.0.0.1:8000', engine: 'http://127.0.0.1:8001'}")

FRONT_GRPC = ("--set", "front_grpc={listen: '127.0.0.1:50051', engine: '127.0.0.1:50052'}")


def test_kvbus_works_without_the_front(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    folder = tree.root / "kvbus" / "parts" / "front"
    assert (folder / "server.py").exists()
    shutil.rmtree(folder)
    assert tree.root / "kvbus" / "daemon" / "front.py" in tree.modules()
    done = tree.check(*FRONT)
    assert (done.returncode, done.stdout) == (78, "")
    assert "http needs a package that is not installed (No module named 'kvbus.parts.front')" in done.stderr
    assert done.stderr.count("\n") == 2


def test_the_http_front_works_without_the_grpc_front(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    (tree.root / "kvbus" / "parts" / "front" / "grpc.py").unlink()
    assert tree.root / "kvbus" / "parts" / "front" / "server.py" in tree.modules()
    assert tree.check(*FRONT).returncode == 0
    done = tree.check(*FRONT_GRPC)
    assert (done.returncode, done.stdout) == (78, "")
    assert "grpc needs a package that is not installed (No module named 'kvbus.parts.front.grpc')" in done.stderr
