"""Tests that a kind of discovery can be removed from a copy of the code, or its library from the environment.

The other kinds must work.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long import sample
from tests.outputs.test_taken_out import ENTRY_POINTS, Tree

KINDS = sorted(ENTRY_POINTS["kvbus.discovery"])
SETTINGS = {
    "dns": "{dns: {name: engines, port: 5557}}",
    "file": "{file: {path: /run/engines.yaml}}",
    "grpc": "{grpc: {nodes: ['engine:50051']}}",
    "kafka": "{kafka: {endpoint: 'tcp://kafka:9092'}}",
    "http": "{http: {url: 'http://engine:8000'}}",
    "kubernetes": "{kubernetes: {selector: app=engine}}",
    "nats": "{nats: {endpoint: 'tcp://nats:4222'}}",
    "redis": "{redis: {endpoint: 'tcp://redis:6379'}}",
}
OF_A_LOG = (
    "outputs[0].layout=per_topic",
    "outputs[0].topic=kv@{source}",
    "outputs[0].replay_endpoint=null",
    "outputs[0].numbers=log",
)
OTHERS = dict.fromkeys(("kafka", "nats", "redis"), OF_A_LOG)
"""Settings that a kind of discovery needs in addition. A kind without an entry needs a merged output."""
LIBRARIES = {"dns": "dns", "grpc": "grpc", "kafka": "aiokafka", "nats": "nats", "redis": "redis"}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def discovering(kind: str) -> tuple[str, ...]:
    sources = f"[{{name: workers, discover: {SETTINGS[kind]}}}]"
    keys = (f"sources={sources}", *OTHERS.get(kind, ("outputs[0].layout=merged",)))
    return tuple(word for each in keys for word in ("--set", each))


@pytest.mark.parametrize("kind", sample(KINDS, len(KINDS)))
def test_kvbus_works_without_one_kind_of_discovery(tree: Tree, kind: str) -> None:
    before = tree.modules()
    assert tree.check(*discovering(kind)).returncode == 0
    own = tree.take_out("discovery", kind)
    assert own
    assert own <= before
    assert tree.modules() == before - own
    assert tree.check().returncode == 0
    done = tree.check(*discovering(kind))
    assert (done.returncode, done.stdout) == (78, "")
    assert f"{kind} needs a package that is not installed" in done.stderr


@pytest.mark.parametrize("kind", sorted(LIBRARIES))
def test_only_the_configured_kind_of_discovery_needs_its_library(tree: Tree, kind: str) -> None:
    missing = tree.root / f"{LIBRARIES[kind]}.py"
    missing.write_text(f"raise ImportError(\"No module named '{LIBRARIES[kind]}'\")\n")
    assert tree.check().returncode == 0
    done = tree.check(*discovering(kind))
    assert (done.returncode, done.stdout) == (78, "")
    lacking = f"a package that is not installed (No module named '{LIBRARIES[kind]}'): pip install 'kvbus[{kind}]'"
    assert f"{kind} needs {lacking}" in done.stderr


def test_the_tests_cover_every_kind_of_discovery() -> None:
    assert set(KINDS) == set(SETTINGS)
