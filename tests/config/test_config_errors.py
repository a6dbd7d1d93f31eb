"""Tests for the errors about an invalid key or value.

The golden configurations (tests/golden) also test the complete texts of errors.
"""

from __future__ import annotations

from typing import Any

import pytest
from ruamel.yaml import YAML

from kvbus.common.errors import ExitCode, Problem
from kvbus.config import Config, ConfigError, Limits, OutputConfig, SourceConfig, load

MINIMAL = "sources: [{}]\noutputs: [{}]\n"


def test_a_config_error_lists_every_problem_and_has_its_exit_code():
    error = ConfigError([Problem("a", "is wrong", "'x'", "a: y", "f.yaml line 3"), Problem("b", "is missing")])
    assert str(error).splitlines() == [
        "the configuration has 2 problems:",
        "  a = 'x': is wrong; for example a: y (f.yaml line 3)",
        "  b: is missing",
    ]
    assert error.exit_code == ExitCode.CONFIG == 78


@pytest.mark.parametrize(
    ("key", "value", "wrong"),
    [
        ("model", "5", "must be text"),
        ("worker", "null", "must be text"),
        ("worker", '"a\\nb"', "must be printable text"),
        ("block_size", "-16", "must be auto or a whole number above 0"),
        ("block_size", "true", "must be auto or a whole number above 0"),
        ("block_size", "1.5", "must be auto or a whole number above 0"),
        ("block_size", "null", "must be auto or a whole number above 0"),
        ("duplicates", "drop", "must be one of count, ignore, last"),
        ("groups", "none", "must be one of prefix, all"),
        ("orphans", "keep", "must be one of pass, drop"),
        ("without_media", "CPU", "must be a list of media"),
        (
            "without_media",
            "[gpu]",
            "'GPU' is a medium of the device, or unknown; possible are: CPU, CPU_PINNED, CPU_TIER1, CPU_TIER2, FS, DISK",
        ),
        ("without_media", "[HBM]", "'HBM' is a medium of the device, or unknown; possible are: CPU"),
        ("on_lost", "drop", "must be one of clear, keep"),
        ("source_timeout", "0", "must be above 0"),
        ("source_timeout", ".inf", "must be a finite number"),
        ("source_timeout", ".nan", "must be a"),
        ("source_timeout", "true", "must be a number, not true or false"),
        ("replay_timeout", "soon", "must be a number"),
        ("probe_interval", "-1", "must be at least 0"),
        ("reorder_batches", "0", "must be at least 1"),
        ("reorder_batches", "1.5", "must be a whole number"),
        ("sources", "x", "must be a list"),
        ("sources", "{}", "must be a list"),
        ("sources", "[3]", "must be a mapping of keys"),
        ("outputs", "[null]", "must be a mapping of keys"),
        ("http", "9477", "must be host:port; 9477 is a port without a host: 127.0.0.1:9477 is on this machine"),
        ("http", "true", "must be text"),
        ("http", "localhost", "must be host:port; the port is missing"),
        ("http", "'::1:9477'", "an IPv6 address needs brackets: [::1]:9477"),
        ("http", "localhost:70000", "the port must be between 0 and 65535"),
        ("http_allowed_hosts", "kvbus.internal", "must be a list of host names or addresses"),
        ("http_allowed_hosts", "[5]", "must be a list of host names or addresses"),
        ("http_allowed_hosts", "['*']", "'*' is not a host name or address"),
        ("http_allowed_hosts", "['*.internal']", "is not a host name or address"),
        ("http_allowed_hosts", "['kvbus.internal:9477']", "no scheme, port or wildcard"),
        ("http_allowed_hosts", "['[::1]:9477']", "no scheme, port or wildcard"),
        ("http_allowed_hosts", "['http://kvbus.internal']", "no scheme, port or wildcard"),
        ("http_allowed_hosts", "['fd00::7']", "IPv6 in brackets"),
        ("http_allowed_hosts", "['']", "'' is not a host name or address"),
        ("http_allowed_hosts", "['.']", "'.' is not a host name or address"),
        ("state_dir", "5", "must be auto, a path or null"),
        ("state_dir", "''", "must be auto, a path or null"),
        ("sources[0].api", "127.0.0.1:8000", "must be http://host:port"),
        ("sources[0].api", "http://", "must be http://host:port"),
        ("sources[0].api", "ftp://10.0.0.1", "must be http://host:port"),
        ("sources[0].api", "http://10.0.0.1:99999", "must be http://host:port"),
        ("sources[0].api", "http://[10.0.0.1", "must be http://host:port"),
        ("sources[0].api", "http://user:secret@10.0.0.1", "must be http://host:port"),
        ("sources[0].api", "http://10.0.0.1:8000?model=x", "must be http://host:port"),
        ("sources[0].api", "8000", "must be text"),
        ("log_level", "loud", "must be one of debug, info, warning, error"),
        ("log_format", "xml", "must be one of auto, json, text"),
        ("limits", "5", "must be a mapping of keys"),
        ("limits.max_frames", "4", "must be at least 5"),
        ("limits.max_frame_bytes", "10", "must be at least 1024"),
        ("limits.max_frame_bytes", "3 GiB", "must be at most 2.14748e+09"),
        ("limits.max_frame_bytes", "a lot", "must be a whole number of bytes, or a size such as 64MiB"),
        ("outputs[0].journal_bytes", "-1MiB", "must be a whole number of bytes, or a size such as 64MiB"),
        ("outputs[0].journal_bytes", "true", "must be a number, not true or false"),
        ("limits.max_events", "0", "must be at least 1"),
        ("limits.max_blocks", "lots", "must be a whole number"),
        ("sources[0].name", "a/b", "letters, digits, dots, dashes or underscores"),
        ("sources[0].name", "''", "letters, digits, dots, dashes or underscores"),
        ("sources[0].endpoint", "127.0.0.1:5557", "must be tcp://host:port or ipc://path; write tcp://127.0.0.1:5557"),
        ("sources[0].endpoint", "'tcp://::1:5557'", "an IPv6 address needs brackets: tcp://[::1]:5557"),
        ("sources[0].endpoint", "'fe80::1:5557'", "an IPv6 address needs brackets: tcp://[fe80::1]:5557"),
        ("sources[0].endpoint", "5557", "must be text"),
        ("sources[0].endpoint", "'5557'", "5557 is a port without a host: tcp://127.0.0.1:5557 is on this machine"),
        ("sources[0].endpoint", "tcp://127.0.0.1:0", "the port must be between 1 and 65535"),
        ("sources[0].endpoint", "null", "must be text"),
        ("sources[0].replay_endpoint", "udp://127.0.0.1:1", "must be tcp://host:port or ipc://path"),
        ("sources[0].bind", "maybe", "must be true or false"),
        ("sources[0].data_parallel_size", "0", "must be at least 1"),
        ("sources[0].data_parallel_size", "true", "must be a number, not true or false"),
        ("sources[0].topic", "null", "must be text"),
        ("outputs[0].endpoint", "tcp://*:0", "the port must be between 1 and 65535"),
        ("outputs[0].endpoint", "tcp://*:*", "must be tcp://host:port or ipc://path"),
        ("outputs[0].snapshot_endpoint", "tcp://*", "must be tcp://host:port or ipc://path"),
        (
            "outputs[0].profile",
            "trt",
            "must be one of vllm, dynamo, dynamo-plane, llm-d, llm-d-sglang, aibrix, sglang, vllm-router, smg, kthena, mooncake",
        ),
        ("outputs[0].topic", "'{pod}'", "{pod} is not a placeholder"),
        ("outputs[0].heartbeat", "-1", "must be at least 0"),
        ("outputs[0].replay_framing", "5", "must be one of auto, 3, 4"),
        ("outputs[0].send_hwm", "0", "must be at least 1"),
    ],
)
def test_a_bad_value_is_reported_with_its_key(key, value, wrong):
    flat: dict[str, Any] = {"sources": [{}], "outputs": [{}]}
    overrides = {**flat, key: YAML(typ="safe", pure=True).load(value)}
    with pytest.raises(ConfigError) as caught:
        load(None, env={}, overrides=overrides)
    (problem,) = caught.value.problems
    assert problem.key in {key, f"{key}[0]"}
    assert wrong in problem.wrong
    assert problem.value is not None


@pytest.mark.parametrize(
    ("text", "size"),
    [("65536", 65536), ("64KiB", 65536), ("64Ki", 65536), ("1.5 mib", 1572864), ("2MB", 2_000_000), ("1G", 10**9)],
)
def test_a_size_may_be_text_with_a_unit(text, size):
    config = load(None, env={}, overrides={"sources": [{}], "outputs": [{}], "outputs[0].journal_bytes": text})
    assert config.outputs[0].journal_bytes == size


@pytest.mark.parametrize("model", [Config, SourceConfig, OutputConfig, Limits])
def test_the_example_of_each_key_is_valid(model):
    for name, field in model.model_fields.items():
        (example,) = field.examples
        assert name in model.model_validate({name: example}).model_fields_set


@pytest.mark.parametrize(
    ("text", "key", "suggestion"),
    [
        ("sorces: []\n" + MINIMAL, "sorces", "sources"),
        ("endpoint: x\n" + MINIMAL, "endpoint", "sources[0].endpoint"),
        ("max_frames: 8\n" + MINIMAL, "max_frames", "limits.max_frames"),
        ("sources: [{layout: merged}]\noutputs: [{}]", "sources[0].layout", "outputs[0].layout"),
        ("sources: [{block_size: 16}]\noutputs: [{}]", "sources[0].block_size", "block_size"),
        ("sources: [{}]\noutputs: [{}, {name: b, Layout: x}]", "outputs[1].Layout", "outputs[1].layout"),
    ],
)
def test_the_error_for_an_unknown_key_suggests_the_known_key(problems, text, key, suggestion):
    assert f"did you mean {suggestion}?" in problems(text)[key]
