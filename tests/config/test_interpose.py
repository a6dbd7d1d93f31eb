"""Tests for the configuration key ``interpose`` in its short and long form, and for the settings that follow from
it.
"""

from __future__ import annotations

from kvbus.config import load
from tests.config.test_config_docs import ROOT

OUTPUT = "{endpoint: 'tcp://127.0.0.1:5557', interpose: true}"


def test_interpose_is_short_for_a_source_and_an_output(read):
    short = read(
        "interpose: {name: e, endpoint: 'tcp://*:5557', data_parallel_size: 2, profile: dynamo,"
        " engine_replay_endpoint: 'tcp://127.0.0.1:5658', replay_endpoint: 'tcp://*:5560'}"
    )
    long = read(
        "sources: [{name: e, endpoint: 'tcp://*:5557', bind: true, data_parallel_size: 2,"
        " replay_endpoint: 'tcp://127.0.0.1:5658'}]\n"
        "outputs: [{name: interposed, endpoint: 'tcp://*:5557', interpose: true, profile: dynamo,"
        " replay_endpoint: 'tcp://*:5560'}]"
    )
    assert short.to_dict() == long.to_dict()
    assert read(short.to_yaml()) == long
    assert [stream.interposed for stream in short.streams()] == [True, True]


def test_interpose_without_keys_has_the_default_port_and_no_replay(read):
    config = read("interpose: {}")
    (source,), (output,) = config.sources, config.outputs
    assert source.endpoint == output.endpoint == "tcp://127.0.0.1:5557"
    assert (source.replay_endpoint, output.replay_endpoint) == (None, None)
    assert (source.name, output.name) == ("engine", "interposed")


def test_the_example_of_interpose_is_valid():
    config = load(ROOT / "deploy" / "interpose.yaml", env={}, overrides={})
    assert [stream.interposed for stream in config.streams()] == [True]
    assert config.sources[0].replay_endpoint != config.outputs[0].replay_endpoint


def test_interpose_can_be_set_by_variables_beside_other_outputs():
    env = {"KVBUS_INTERPOSE__ENDPOINT": "tcp://127.0.0.1:6000", "KVBUS_OUTPUTS__0__ENDPOINT": "tcp://*:7000"}
    config = load(None, env=env, overrides={"interpose.data_parallel_size": 3})
    assert [stream.endpoint for stream in config.streams()] == [f"tcp://127.0.0.1:{6000 + rank}" for rank in range(3)]
    assert [output.interpose for output in config.outputs] == [False, True]


def test_interposed_engines_use_the_ports_of_their_slots(read):
    sources = ["{name: a, bind: true}", "{name: b, bind: true, slot: 10, endpoint: 'tcp://127.0.0.1:5567'}"]
    config = read(f"sources: [{', '.join(sources)}]\noutputs: [{OUTPUT}]")
    endpoints = [config.outputs[0].stream_endpoints(stream.index).endpoint for stream in config.streams()]
    assert [stream.endpoint for stream in config.streams()] == endpoints


def test_a_problem_of_interpose_names_the_keys_of_the_short_form(read):
    config = read("interpose: {endpoint: 'tcp://*:7557'}")
    said = "sources[0].replay_endpoint, sources[0].bind and outputs[0].replay_endpoint; not sources[10]"
    assert config.as_written(said) == (
        "interpose.engine_replay_endpoint, interpose.endpoint and interpose.replay_endpoint; not sources[10]"
    )
