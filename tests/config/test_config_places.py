"""Tests for the order in which kvbus looks for a setting.

The command line comes first, then environment variables, the configuration file, and the defaults.
"""

from __future__ import annotations

import pytest

from kvbus.config import ConfigError, load

MINIMAL = "sources: [{}]\noutputs: [{}]\n"


def test_defaults_equal_the_documented_defaults(read):
    config = read(MINIMAL)
    effective = config.to_dict()
    assert effective.pop("worker")
    assert effective == {
        "model": None,
        "block_size": "auto",
        "duplicates": "count",
        "without_media": [],
        "expiring_media": [],
        "expire_after": 3600.0,
        "groups": "prefix",
        "orphans": "pass",
        "on_lost": "clear",
        "source_timeout": 30.0,
        "discovery_grace": 10.0,
        "replay_timeout": 2.0,
        "probe_interval": 1.0,
        "reorder_batches": 20_000,
        "interpose": None,
        "front": None,
        "front_grpc": None,
        "sources": [
            {
                "name": "engine",
                "discover": None,
                "endpoint": "tcp://127.0.0.1:5557",
                "replay_endpoint": "tcp://127.0.0.1:5558",
                "snapshot_endpoint": None,
                "api": None,
                "bind": False,
                "data_parallel_size": 1,
                "topic": "",
                "clears": "auto",
                "slot": None,
                "curve_secret_key_file": None,
                "curve_server_key_file": None,
                "curve_client_keys": None,
            }
        ],
        "outputs": [
            {
                "name": "routers",
                "type": "zmq",
                "endpoint": "tcp://*:5657",
                "replay_endpoint": "tcp://*:5658",
                "snapshot_endpoint": None,
                "bind": True,
                "interpose": False,
                "layout": "per_source",
                "numbers": "own",
                "profile": "vllm",
                "token_ids": "keep",
                "topic": None,
                "heartbeat": 1.0,
                "replay_framing": "auto",
                "journal_batches": 10_000,
                "journal_bytes": 2 * 1024 * 1024,
                "queue_batches": 10_000,
                "send_hwm": 10_000,
                "send_bytes": 16_777_216,
                "on_subscribe": "state",
                "curve_secret_key_file": None,
                "curve_client_keys": None,
                "curve_server_key_file": None,
                "dynamo": None,
                "kafka": None,
                "nats": None,
                "redis": None,
            }
        ],
        "http": "127.0.0.1:9477",
        "http_allowed_hosts": [],
        "http_open": "status",
        "http_tokens_file": None,
        "http_tls_certificate_file": None,
        "http_tls_key_file": None,
        "state_dir": "auto",
        "state_sync": "none",
        "shutdown_timeout": 5.0,
        "reload": "auto",
        "key_reload_interval": 10.0,
        "log_level": "info",
        "log_format": "auto",
        "limits": {
            "max_frame_bytes": 67_108_864,
            "max_frames": 16,
            "max_events": 65_536,
            "max_sources": 1024,
            "max_blocks": 20_000_000,
            "max_index_bytes": 4_294_967_296,
            "max_groups": 64,
            "max_owners": 64,
            "max_held_bytes": 268_435_456,
            "max_request_bytes": 65_536,
            "max_unsent_bytes": 67_108_864,
            "max_views": 64,
            "max_replay_sessions": 64,
        },
    }


@pytest.mark.parametrize(
    ("env", "flags", "expected"),
    [
        ({}, {}, "file"),
        ({"KVBUS_MODEL": "env"}, {}, "env"),
        ({"KVBUS_MODEL": "env"}, {"model": "flag"}, "flag"),
        ({}, {"model": "flag"}, "flag"),
    ],
)
def test_flags_override_variables_and_variables_override_the_file(read, env, flags, expected):
    assert read("model: file\n" + MINIMAL, env=env, flags=flags).model == expected


def test_a_configuration_may_consist_of_variables_only(read):
    env = {"KVBUS_SOURCES__0__ENDPOINT": "tcp://10.0.0.1:5557", "KVBUS_OUTPUTS__0__ENDPOINT": "ipc:///run/kv"}
    config = read(env=env)
    assert config.sources[0].endpoint == "tcp://10.0.0.1:5557"
    assert config.outputs[0].endpoint == "ipc:///run/kv"


def test_only_the_default_endpoint_has_the_default_replay_endpoint(read):
    config = read("sources: [{endpoint: 'ipc:///run/kv'}]\noutputs: [{endpoint: 'ipc:///run/out'}]")
    assert config.sources[0].replay_endpoint is None
    assert config.outputs[0].replay_endpoint is None


def test_variables_change_elements_of_lists_in_the_file(read):
    text = "sources: [{name: a, topic: x}, {name: b, endpoint: 'ipc:///b'}]\noutputs: [{layout: merged}]"
    env = {
        "KVBUS_SOURCES__1__TOPIC": "t",
        "KVBUS_SOURCES__2__NAME": "c",
        "KVBUS_SOURCES__2__ENDPOINT": "ipc:///c",
        "KVBUS_LIMITS__MAX_FRAMES": "8",
    }
    config = read(text, env=env)
    assert [(s.name, s.topic) for s in config.sources] == [("a", "x"), ("b", "t"), ("c", "")]
    assert config.limits.max_frames == 8


def test_variables_of_more_than_ten_elements_are_ordered_by_number(read):
    env = {f"KVBUS_SOURCES__{i}__NAME": f"s{i}" for i in range(12)}
    env |= {f"KVBUS_SOURCES__{i}__ENDPOINT": f"ipc:///s{i}" for i in range(12)}
    config = read("outputs: [{layout: merged}]", env=env)
    assert [s.name for s in config.sources] == [f"s{i}" for i in range(12)]


def test_variables_may_set_a_list_as_json_and_then_its_elements(read):
    env = {"KVBUS_SOURCES__0__TOPIC": "t", "KVBUS_SOURCES": '[{"endpoint": "ipc:///json"}]'}
    source = read("sources: [{}, {}]\noutputs: [{}]", env=env).sources
    assert [(s.endpoint, s.topic) for s in source] == [("ipc:///json", "t")]


def test_a_list_of_values_can_be_set_completely_or_by_element(read):
    text = "http_allowed_hosts: [a.internal, b.internal]\n" + MINIMAL
    assert read(text).http_allowed_hosts == ("a.internal", "b.internal")
    env = {"KVBUS_HTTP_ALLOWED_HOSTS__1": "c.internal", "KVBUS_HTTP_ALLOWED_HOSTS__2": "[::2]"}
    assert read(text, env=env).http_allowed_hosts == ("a.internal", "c.internal", "[::2]")
    env["KVBUS_HTTP_ALLOWED_HOSTS"] = '["d.internal", "e.internal"]'
    assert read(text, env=env).http_allowed_hosts == ("d.internal", "c.internal", "[::2]")
    flags = {"http_allowed_hosts": "[f.internal]", "http_allowed_hosts[1]": "g.internal"}
    assert read(text, env=env, flags=flags).http_allowed_hosts == ("f.internal", "g.internal")


def test_a_variable_sets_a_key_in_a_section_of_an_element(read):
    text = (
        "model: m\nsources: [{}]\noutputs: [{name: log, type: kafka, endpoint: 'tcp://kafka:9092', kafka: {topic: a}}]"
    )
    assert read(text, env={"KVBUS_OUTPUTS__0__KAFKA__TOPIC": "b"}).outputs[0].kafka.topic == "b"


def test_a_section_in_a_stronger_layer_replaces_the_section_of_the_file(read):
    text = MINIMAL + "limits: {max_frames: 8, max_events: 9}"
    limits = read(text, env={"KVBUS_LIMITS": "{max_events: 7}"}, flags={"limits.max_groups": "3"}).limits
    assert (limits.max_frames, limits.max_events, limits.max_groups) == (16, 7, 3)


def test_variables_are_converted_to_null_and_other_types(read):
    env = {
        "KVBUS_HTTP": "null",
        "KVBUS_SOURCES__0__BIND": "true",
        "KVBUS_BLOCK_SIZE": "64",
        "KVBUS_OUTPUTS__0__REPLAY_FRAMING": "3",
        "KVBUS_SOURCE_TIMEOUT": "1.5",
        "KVBUS_LOG_LEVEL": "DEBUG",
    }
    config = read(MINIMAL, env=env)
    assert config.http is None
    assert config.sources[0].bind is True
    assert config.block_size == 64
    assert config.outputs[0].framing == "3"
    assert config.source_timeout == 1.5
    assert config.log_level == "debug"


def test_variables_of_a_kubernetes_service_named_kvbus_are_ignored(read):
    env = {
        "KVBUS_SERVICE_HOST": "10.0.0.7",
        "KVBUS_SERVICE_PORT": "5657",
        "KVBUS_SERVICE_PORT_REPLAY": "5658",
        "KVBUS_PORT": "tcp://10.0.0.7:5657",
        "KVBUS_PORT_5657_TCP": "tcp://10.0.0.7:5657",
        "KVBUS_PORT_5657_TCP_ADDR": "10.0.0.7",
        "KVBUS_METRICS_SERVICE_HOST": "10.0.0.8",
        "KVBUS_CONFIG": "/etc/kvbus.yaml",
        "OTHER_THING": "x",
    }
    assert read(MINIMAL, env=env) == read(MINIMAL)


def test_the_keys_of_an_added_element_may_have_any_order(read):
    flags = {"outputs[1].name": "more", "outputs[1].endpoint": "tcp://*:5757"}
    assert [output.name for output in read(MINIMAL, flags=flags).outputs] == ["routers", "more"]
    env = {"KVBUS_SOURCES__1__BIND": "true", "KVBUS_SOURCES__1__ENDPOINT": "ipc:///b", "KVBUS_SOURCES__1__NAME": "b"}
    assert [source.bind for source in read(MINIMAL, env=env, flags={"outputs[0].layout": "merged"}).sources] == [
        False,
        True,
    ]


def test_overrides_are_applied_in_order_and_replace_lists(read):
    flags = {
        "sources": [{"endpoint": "tcp://10.0.0.9:5557"}],
        "sources[0].topic": "kv@",
        "outputs.0.layout": "merged",
        "http": "null",
    }
    config = read("sources: [{name: a}, {name: b, endpoint: 'ipc:///b'}]\noutputs: [{}]", flags=flags)
    assert [(s.name, s.endpoint, s.topic) for s in config.sources] == [("engine", "tcp://10.0.0.9:5557", "kv@")]
    assert config.outputs[0].layout == "merged"
    assert config.http is None


def test_loading_does_not_change_the_data_of_the_overrides():
    sources = [{"endpoint": "ipc:///a"}]
    overrides = {"sources": sources, "outputs": [{}], "sources[0].topic": "t"}
    load(None, env={}, overrides=overrides)
    assert sources == [{"endpoint": "ipc:///a"}]


def test_a_variable_changes_only_one_use_of_a_yaml_alias(read):
    text = "sources: [&a {name: a, bind: true, endpoint: 'ipc:///a'}, *a]\noutputs: [{layout: merged}]"
    env = {"KVBUS_SOURCES__1__NAME": "b", "KVBUS_SOURCES__1__ENDPOINT": "ipc:///b"}
    assert [(s.name, s.endpoint, s.bind) for s in read(text, env=env).sources] == [
        ("a", "ipc:///a", True),
        ("b", "ipc:///b", True),
    ]


def test_a_value_in_place_of_a_section_is_reported(problems):
    found = problems("sources: x\nlimits: 5\noutputs: [{}]", env={"KVBUS_SOURCES__0__NAME": "a"})
    assert "must be a list" in found["sources"]
    assert "must be a mapping of keys" in found["limits"]


def test_an_unreadable_or_malformed_file_is_reported(tmp_path):
    def refused(content: bytes) -> str:
        path = tmp_path / "bad.yaml"
        path.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load(path, env={}, overrides={})
        (problem,) = caught.value.problems
        return str(problem)

    assert "must be a mapping of keys, not a list" in refused(b"- a\n")
    assert "must be a mapping of keys, not a single value" in refused(b"hello\n")
    assert "is empty" in refused(b"# nothing\n")
    assert "line 2: is not YAML" in refused(b"model: x\n\tworker: y\n")
    assert "is not YAML" in refused(b"model: !!python/object/apply:os.getcwd []\n")
    assert "is not YAML" in refused(b"a: " + b"[" * 5000)
    assert "is not UTF-8" in refused(b"model: \xff\n")
    assert "larger than" in refused(b"#" * (4 * 1024 * 1024 + 1))
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read: No such file"):
        load(tmp_path / "missing.yaml", env={}, overrides={})
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path, env={}, overrides={})


def test_nested_yaml_aliases_do_not_make_loading_slow(problems):
    text = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
    assert "a59" in problems(text)
