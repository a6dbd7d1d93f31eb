"""Tests for the error about a removed configuration key, command or option.

The error names the replacement. kvbus prints it together with all other errors.
"""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.cli.program import Program, Subcommand
from kvbus.common import removed
from kvbus.config import ConfigError, load, paths


@pytest.fixture
def gone_key(monkeypatch):
    monkeypatch.setattr(removed, "KEYS", {"old": "use new", "sources.old": "use sources[].new"})


def _problems(path, text: str, **given) -> dict[str, str]:
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(path, env=given.get("env", {}), overrides=given.get("overrides", {}))
    return {problem.key: str(problem) for problem in refused.value.problems}


@pytest.mark.usefixtures("gone_key")
def test_a_removed_key_is_reported_with_all_other_mistakes(tmp_path):
    text = "old: true\nmodle: m\nsources: [{name: a}, {name: b, endpoint: 'ipc:///b', old: 1}]\noutputs: [{layout: merged}]\n"
    found = _problems(tmp_path / "kvbus.yaml", text, env={"KVBUS_OLD": "true"}, overrides={"sources[0].old": "1"})
    assert found == {
        "old": f"old = true: gone: use new ({tmp_path / 'kvbus.yaml'} line 1)",
        "modle": found["modle"],
        "sources[1].old": f"sources[1].old = 1: gone: use sources[].new ({tmp_path / 'kvbus.yaml'} line 3)",
        "KVBUS_OLD": "KVBUS_OLD = 'true': gone: use new (environment)",
        "sources[0].old": "sources[0].old = '1': gone: use sources[].new (command line)",
    }
    assert "did you mean model?" in found["modle"]


def test_an_existing_key_is_never_reported_as_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(removed, "KEYS", {"model": "use nothing"})
    path = tmp_path / "kvbus.yaml"
    path.write_text("model: m\nsources: [{}]\noutputs: [{}]\n")
    assert load(path, env={"KVBUS_MODEL": "n"}, overrides={}).model == "n"


def test_the_error_for_a_removed_command_or_option_names_its_replacement(monkeypatch):
    monkeypatch.setattr(removed, "COMMANDS", {"old": "use go", "go --old": "use --new", "old --new": "use nothing"})
    group = Program("kvbus", subcommands=[Subcommand("absent", "Not there.")])
    group.add_command(click.Command("go", params=[click.Option(["--new"])]))
    for words, said in (
        (["old", "x", "--yes"], "Error: old: gone: use go\n"),
        (["go", "--old"], "Error: --old: gone: use --new\n"),
        (["go", "--nwe"], "Error: No such option '--nwe'. Did you mean '--new'?\n"),
    ):
        done = CliRunner().invoke(group, words)
        assert (done.exit_code, done.stderr.endswith(said)) == (2, True), done.stderr


@pytest.mark.parametrize("key", [key for key in removed.KEYS if not paths.is_known(paths.parse(key))])
def test_the_error_for_each_removed_key_names_its_replacement(key, tmp_path):
    found = _problems(tmp_path / "kvbus.yaml", f"{key}: x\nsources: [{{}}]\noutputs: [{{}}]\n")
    assert removed.gone(removed.KEYS[key]) in found[key]


def test_the_error_for_a_removed_discovery_setting_names_its_replacement(tmp_path):
    text = "sources: [{discover: {kubernetes: {selector: app=engine, resource: pods}}}]\noutputs: [{}]\n"
    found = _problems(tmp_path / "kvbus.yaml", text)
    assert removed.gone(removed.KEYS["kubernetes.resource"]) in found["sources[0].discover"]


@pytest.mark.parametrize("words", removed.COMMANDS)
def test_the_error_for_each_removed_command_names_its_replacement(words):
    done = CliRunner().invoke(main, words.split())
    assert done.exit_code == 2
    assert removed.gone(removed.COMMANDS[words]) in done.stderr
