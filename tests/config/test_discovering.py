"""``sources[].discover``: its kinds, their settings, and what cannot stand beside it."""

from __future__ import annotations

import json

import pytest

from kvbus.config import Config, parts

FILE = "{file: {path: /run/engines.yaml}}"


def text(discover: str = FILE, output: str = "{layout: merged}", more: str = "") -> str:
    return f"sources: [{{name: workers, discover: {discover}{more}}}]\noutputs: [{output}]\n"


def test_the_settings_of_a_kind_are_filled_in_and_read_back(read):
    config = read(text())
    assert config.sources[0].discover == {"file": {"path": "/run/engines.yaml", "interval": 1.0}}
    assert config.streams() == []
    assert read(config.to_yaml()) == config
    assert Config.model_validate(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    "given", [{"env": {"KVBUS_SOURCES__0__DISCOVER": FILE}}, {"flags": {"sources[0].discover": FILE}}]
)
def test_variables_and_flags_hold_the_whole_mapping(read, given):
    config = read(None, **given, outputs=[{"layout": "merged"}])
    assert config.sources[0].discover == {"file": {"path": "/run/engines.yaml", "interval": 1.0}}


@pytest.mark.parametrize(
    ("discover", "wrong"),
    [
        ("{}", "must be a mapping of one kind, of those that are installed ("),
        ("file", "must be a mapping of one kind"),
        ("{file: {path: /a}, dns: {name: b}}", "must be a mapping of one kind"),
        ("{carrier_pigeon: {}}", "must be a mapping of one kind"),
        ("{file: }", "file.path: must be given"),
        ("{file: {path: /a, interval: 0}}", "file.interval = 0: must be above 0"),
        ("{file: {path: /a, intervall: 1}}", "file.intervall = 1: unknown key"),
    ],
)
def test_a_bad_one_is_refused(problems, discover, wrong):
    found = problems(text(discover))
    assert set(found) == {"sources[0].discover"}
    assert wrong in found["sources[0].discover"]
    assert "for example discover: {file: {path:" in found["sources[0].discover"]


def test_a_kind_without_what_it_needs_is_an_error(problems, monkeypatch):
    def missing(_group: str, name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(parts, "load", missing)
    wrong = "file needs a package that is not installed (No module named 'file'): pip install 'kvbus[file]'"
    assert wrong in problems(text())["sources[0].discover"]


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (", endpoint: 'tcp://a:1'", "endpoint"),
        (", replay_endpoint: 'tcp://a:1'", "replay_endpoint"),
        (", snapshot_endpoint: 'tcp://a:1'", "snapshot_endpoint"),
        (", bind: true", "bind"),
        (", api: 'http://a:1'", "api"),
        (", slot: 3", "slot"),
    ],
)
def test_what_only_one_engine_can_have_is_refused(problems, more, key):
    assert "discover finds it out for each engine" in problems(text(more=more))[f"sources[0].{key}"]


def test_ports_of_their_own_are_refused_where_engines_are_found(problems):
    found = problems(text(output="{layout: per_source}, {endpoint: 'tcp://*:7000', layout: merged, name: b}"))
    assert set(found) == {"outputs[0].layout"}
    assert "would move as they come and go; for example layout: merged" in found["outputs[0].layout"]


def test_slots_are_refused_where_engines_are_found(problems):
    sources = f"sources: [{{discover: {FILE}}}, {{name: b, endpoint: 'tcp://a:1', slot: 2}}]"
    found = problems(f"{sources}\noutputs: [{{layout: merged}}]")
    assert "sources[0].discover gives out slots as engines come" in found["sources[1].slot"]


@pytest.mark.parametrize("name", ["source", "rank"])
def test_one_topic_for_all_engines_names_none_of_them(problems, name):
    found = problems(text(output=f"{{layout: merged, topic: 'kv@{{{name}}}'}}"))
    assert f"one topic for all engines that are found cannot have {{{name}}}" in found["outputs[0].topic"]
