"""Tests for ``sources[].discover``: its kinds, their settings, and the keys that it excludes."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest

from kvbus.common.errors import ConfigError
from kvbus.config import Config, load, parts
from kvbus.core.wire.profiles import PROFILES

FILE = "{file: {path: /run/engines.yaml}}"

ROOT = Path(__file__).parents[2]


def text(discover: str = FILE, output: str = "{layout: merged}", more: str = "") -> str:
    return f"sources: [{{name: workers, discover: {discover}{more}}}]\noutputs: [{output}]\n"


def test_the_settings_of_a_discovery_get_defaults_and_can_be_read_back(read):
    config = read(text())
    assert config.sources[0].discover == {"file": {"path": "/run/engines.yaml", "interval": 1.0}}
    assert config.streams() == []
    assert read(config.to_yaml()) == config
    assert Config.model_validate(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    "given", [{"env": {"KVBUS_SOURCES__0__DISCOVER": FILE}}, {"flags": {"sources[0].discover": FILE}}]
)
def test_discover_can_be_set_by_a_variable_or_a_flag(read, given):
    config = read(None, **given, outputs=[{"layout": "merged"}])
    assert config.sources[0].discover == {"file": {"path": "/run/engines.yaml", "interval": 1.0}}


def test_a_discovery_without_its_package_is_an_error(problems, monkeypatch):
    def missing(_group: str, name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(parts, "load", missing)
    wrong = "file needs a package that is not installed (No module named 'file'): pip install 'kvbus[file]'"
    assert wrong in problems(text())["sources[0].discover"]


def test_the_page_about_logs_names_the_profiles_that_an_aggregator_may_have():
    """An aggregator sends the records of a log unchanged, which the routers of some profiles cannot read."""
    accepted = set()
    for profile in PROFILES:
        over = {
            "model": "m",
            "sources": [{"discover": {"redis": {"endpoint": "tcp://127.0.0.1:6379", "token_ids": "keep"}}}],
            "outputs": [{"layout": "per_topic", "topic": "kv@{source}@{model}", "profile": profile}],
        }
        with contextlib.suppress(ConfigError):
            load(None, env={}, overrides=over)
            accepted.add(profile)
    text = " ".join((ROOT / "docs" / "LOG.md").read_text().split())
    named = text.partition("with a profile other than ")[2].partition(", or with keys")[0]
    assert set(re.findall(r"`([\w-]+)`", named)) == accepted
