"""Tests that the documentation of the configuration agrees with the models in the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvbus.config import Config, load
from kvbus.config.logs import RedisKeys
from kvbus.config.reference import example, kinds, rows, table
from kvbus.config.yamlfile import parse

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "deploy" / "kvbus.yaml"


def test_the_reference_table_is_in_the_documentation():
    assert table() in (ROOT / "docs" / "CONFIGURATION.md").read_text(), (
        "docs/CONFIGURATION.md is out of date: python -m tests.docs.configuration"
    )


@pytest.mark.parametrize(
    ("args", "printed"), [((), table()), (("discover",), table(kinds())), (("example",), example())]
)
def test_the_reference_command_prints_its_table(args, printed):
    command = [sys.executable, "-m", "kvbus.config.reference", *args]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == printed


def test_the_settings_of_every_kind_of_discovery_are_in_the_documentation():
    documented = (ROOT / "docs" / "CONFIGURATION.md").read_text().splitlines()
    lines = table(kinds()).splitlines()
    assert [line for line in lines if line not in documented] == []
    assert any("`discover.file.path`" in line for line in lines)


def test_every_key_is_documented():
    keys = [key for key, *_ in rows()]
    assert len(keys) == len(set(keys))
    for key, kind, default, _, meaning in rows():
        assert kind, key
        assert default, key
        assert meaning.endswith("."), key


def test_the_yaml_examples_of_the_documentation_are_valid():
    text = (ROOT / "docs" / "CONFIGURATION.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    configs = [Config.model_validate(parse(block, "docs").data).completed() for block in blocks]
    replays = [config.outputs[0].replay_endpoint for config in configs]
    assert replays == ["tcp://*:5658", None, "tcp://*:5658"], "the second one has the engine's own port"


def test_the_example_file_is_up_to_date():
    assert EXAMPLE.read_text() == example(), "python -m tests.docs.configuration"


def test_the_example_file_has_every_key_with_its_default():
    keys = {line.strip(" #").partition(":")[0] for line in example().splitlines()}
    assert {key.rpartition(".")[2] for key, *_ in rows()} <= keys
    assert load(EXAMPLE, env={}, overrides={}) == load(None, env={}, overrides={"sources": [{}], "outputs": [{}]})


def test_commented_sections_of_the_example_file_are_valid(tmp_path):
    """The sections of the example file that are comments are valid after the comment signs are removed."""
    text = re.sub(r"^( *)(\w+): null\n\1# \2:$", r"\1\2:", EXAMPLE.read_text(), flags=re.MULTILINE)
    text = re.sub(r"^( *)#   (?=\w+: \S+$)", r"\1  ", text, flags=re.MULTILINE)
    section = parse(text, "example").data
    assert section["front"]["listen"] == "0.0.0.0:8000"
    assert set(section["outputs"][0]["redis"]) == set(RedisKeys.model_fields)
