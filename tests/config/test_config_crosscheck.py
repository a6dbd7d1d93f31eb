"""Keys that are good on their own and contradict each other."""

from __future__ import annotations

import pytest

from kvbus.config import ConfigError, parts
from kvbus.core.wire.profiles import PROFILES

ENGINE = "{endpoint: 'tcp://10.0.0.1:5557'}"


def _text(sources: str, outputs: str, more: str = "") -> str:
    return f"sources: {sources}\noutputs: {outputs}\n{more}"


def test_at_least_one_source_and_output(problems):
    found = problems("model: x")
    assert set(found) == {"sources", "outputs"}
    assert "at least one is needed; for example sources: [{endpoint:" in found["sources"]
    assert set(problems("sources: []\noutputs: [{}]")) == {"sources"}


def test_duplicate_names(problems):
    found = problems(
        _text("[{endpoint: 'ipc:///a'}, {endpoint: 'ipc:///b'}]", "[{layout: merged}, {endpoint: 'ipc:///c'}]")
    )
    assert "the same name as sources[0].name; for example name: engine-1" in found["sources[1].name"]
    assert "the same name as outputs[0].name" in found["outputs[1].name"]


@pytest.mark.parametrize(
    ("sources", "outputs", "more", "key", "other"),
    [
        # ranks of one source: the publisher of rank 1 is the replay of rank 0
        ("[{data_parallel_size: 2}]", "[{layout: merged}]", "", "sources[0].replay_endpoint", "sources[0].endpoint"),
        # ranks of two sources
        (
            "[{name: a, endpoint: 'tcp://10.0.0.1:7000', data_parallel_size: 3}, {name: b, endpoint: 'tcp://10.0.0.1:7002'}]",
            "[{layout: merged}]",
            "",
            "sources[1].endpoint",
            "sources[0].endpoint",
        ),
        # streams of one output
        (
            "[{name: a, endpoint: 'ipc:///a'}, {name: b, endpoint: 'ipc:///b'}]",
            "[{}]",
            "",
            "outputs[0].replay_endpoint",
            "outputs[0].endpoint",
        ),
        # snapshot against replay
        (
            f"[{ENGINE}]",
            "[{endpoint: 'tcp://*:7000', replay_endpoint: 'tcp://*:7001', snapshot_endpoint: 'tcp://*:7001'}]",
            "",
            "outputs[0].snapshot_endpoint",
            "outputs[0].replay_endpoint",
        ),
        # two outputs, a wildcard against one interface
        (
            f"[{ENGINE}]",
            "[{endpoint: 'tcp://127.0.0.1:7000'}, {name: b, endpoint: 'tcp://*:7000'}]",
            "",
            "outputs[1].endpoint",
            "outputs[0].endpoint",
        ),
        # HTTP
        (f"[{ENGINE}]", "[{endpoint: 'tcp://*:9477'}]", "", "http", "outputs[0].endpoint"),
        (
            f"[{ENGINE}]",
            "[{endpoint: 'tcp://127.0.0.1:9000'}]",
            "http: localhost:9000",
            "http",
            "outputs[0].endpoint",
        ),
        # a source that kvbus binds
        (
            "[{endpoint: 'tcp://*:7000', bind: true}]",
            "[{endpoint: 'tcp://*:7000'}]",
            "",
            "outputs[0].endpoint",
            "sources[0].endpoint",
        ),
        # the engine's own port on this machine
        ("[{}]", "[{endpoint: 'tcp://*:5557'}]", "", "outputs[0].endpoint", "sources[0].endpoint"),
        # local sockets, with the suffix of rank 1
        (
            "[{name: a, endpoint: 'ipc:///kv', data_parallel_size: 2}, {name: b, endpoint: 'ipc:///kv-1'}]",
            "[{layout: merged}]",
            "",
            "sources[1].endpoint",
            "sources[0].endpoint",
        ),
    ],
)
def test_two_at_one_address(problems, sources, outputs, more, key, other):
    found = problems(_text(sources, outputs, more))
    assert set(found) == {key}
    assert f"is taken by {other}" in found[key]


@pytest.mark.parametrize(
    ("sources", "outputs"),
    [
        ("[{data_parallel_size: 2, endpoint: 'tcp://127.0.0.1:5557', replay_endpoint: 'tcp://127.0.0.1:5559'}]",
         "[{endpoint: 'tcp://*:5657', replay_endpoint: 'tcp://*:5659'}]"),
        # the same port at different hosts
        ("[{name: a, endpoint: 'tcp://10.0.0.1:5557'}, {name: b, endpoint: 'tcp://10.0.0.2:5557'}]",
         "[{layout: merged}]"),
        # kvbus takes the port that the engine has on another machine
        ("[{endpoint: 'tcp://10.0.0.1:5557'}]", "[{endpoint: 'tcp://*:5557'}]"),
        # different interfaces
        ("[{}]", "[{endpoint: 'tcp://127.0.0.2:5557'}]"),
        # dialling out claims nothing here
        ("[{}]", "[{endpoint: 'tcp://127.0.0.1:9477', bind: false}]"),
        ("[{endpoint: 'ipc:///kv-{rank}', data_parallel_size: 2}]", "[{layout: merged}]"),
    ],
)  # fmt: skip
def test_no_contradiction(read, sources, outputs):
    assert read(_text(sources, outputs)).sources


def test_one_problem_for_each_pair_of_keys(read):
    with pytest.raises(ConfigError) as caught:
        read(_text("[{data_parallel_size: 64}]", "[{layout: merged}]"))
    assert [problem.key for problem in caught.value.problems] == ["sources[0].replay_endpoint"]


def test_ports_past_the_last_one(problems):
    found = problems(
        _text("[{endpoint: 'tcp://10.0.0.1:65530', data_parallel_size: 8}]", "[{endpoint: 'tcp://*:65535'}]")
    )
    assert "rank 7 would be at port 65537" in found["sources[0].endpoint"]
    assert "stream 7 would be at port" in found["outputs[0].endpoint"]


@pytest.mark.parametrize(
    ("sources", "outputs", "key"),
    [
        ("[{endpoint: 'tcp://*:5557'}]", "[{}]", "sources[0].endpoint"),
        ("[{endpoint: 'tcp://0.0.0.0:5557', bind: true, replay_endpoint: 'tcp://*:6558'}]", "[{}]",
         "sources[0].replay_endpoint"),
        ("[{}]", "[{endpoint: 'tcp://*:7557', bind: false}]", "outputs[0].endpoint"),
    ],
)  # fmt: skip
def test_a_wildcard_cannot_be_connected_to(problems, sources, outputs, key):
    found = problems(_text(sources, outputs))
    assert set(found) == {key}
    assert "it must name a host" in found[key]


def test_a_topic_needs_the_model(problems, read):
    text = _text("[{}]", "[{topic: 'kv@{model}'}]")
    assert "outputs[0].topic uses {model}" in problems(text)["model"]
    assert read("model: m\n" + text).model == "m"


def test_a_topic_with_an_empty_model_is_one_without_it(problems):
    """As a variable is in Kubernetes that is filled in from an annotation nobody set."""
    found = problems(_text("[{}]", "[{profile: llm-d, topic: 'kv@{worker}@{model}'}]"), env={"KVBUS_MODEL": ""})
    assert set(found) == {"model"}
    assert (
        "model = '': outputs[0].topic uses {model}; for example model: Qwen/Qwen3-32B (KVBUS_MODEL)" in found["model"]
    )


@pytest.mark.parametrize(
    "topic",
    ["kv@{model}", "kv@{worker}@{model}@x", "kv", "@{worker}@{model}", "", "kv@@{model}", "x@{worker}@{model}"],
)
def test_llm_d_topics_have_three_parts(problems, topic):
    text = _text("[{}]", f"[{{profile: llm-d, topic: '{topic}'}}]", "model: m\nworker: w")
    assert "exactly three parts" in problems(text)["outputs[0].topic"]


@pytest.mark.parametrize("prefix", ["", "kv@", "kv@pod", "kv@pod@", "kv@pod@m@x", "engine@pod@m"])
def test_llm_d_is_not_given_topics_that_only_the_engine_knows(problems, prefix):
    """A router that listens to ``kv@`` would hear nothing of an engine whose topic is empty, vLLM's default."""
    sources = f"[{{name: a, topic: 'kv@pod@m'}}, {{name: b, endpoint: 'ipc:///b', topic: '{prefix}'}}]"
    found = problems(_text(sources, "[{layout: merged}, {name: x, endpoint: 'ipc:///x', profile: llm-d}]"))
    assert set(found) == {"outputs[1].topic"}
    line = found["outputs[1].topic"]
    assert line.startswith("outputs[1].topic = null: profile llm-d needs exactly three parts, kv@POD@MODEL;")
    assert f"sources[1].topic is {prefix!r}" in line
    assert line.endswith('; for example topic: "kv@{worker}@{model}"')


def test_llm_d_may_have_the_sources_topics_where_they_are_told_in_full(read):
    sources = "[{name: a, topic: 'kv@pod-a@m'}, {name: b, endpoint: 'ipc:///b', topic: 'kv@pod-b@m'}]"
    assert read(_text(sources, "[{layout: merged, profile: llm-d}]")).outputs[0].topic is None


def test_only_llm_d_asks_for_a_topic(read):
    for profile in set(PROFILES) - {"llm-d", "llm-d-sglang"}:
        assert read(_text("[{}]", f"[{{profile: {profile}}}]")).outputs[0].topic is None


def test_the_vllm_router_takes_nothing_under_a_topic(problems, read):
    found = problems(_text("[{}]", "[{profile: vllm-router, topic: 'kv@{worker}@m'}]"))["outputs[0].topic"]
    assert "profile vllm-router takes batches without a topic alone; for example topic: null" in found
    assert read(_text("[{}]", "[{profile: vllm-router, topic: ''}]")).outputs[0].topic == ""


def test_what_is_wrong_with_a_source_is_said_once(problems):
    found = problems(_text("[{topic: 5}]", "[{profile: llm-d}]"))
    assert set(found) == {"sources[0].topic"}
    assert set(problems("outputs: [{profile: llm-d}]")) == {"sources"}


def test_a_model_with_an_at_sign_breaks_an_llm_d_topic(problems, read):
    text = _text("[{}]", "[{profile: llm-d, topic: 'kv@{worker}@{model}'}]", "worker: w\n")
    assert "'kv@w@a@b'" in problems(text + "model: a@b")["outputs[0].topic"]
    assert read(text + "model: a").outputs[0].profile == "llm-d"


@pytest.mark.parametrize(
    "text",
    [
        "sources: [{endpoint: bad}, {name: b}]\noutputs: [{layout: merged}, {name: b, layout: bad}]",
        "sources: [{name: a, data_parallel_size: x}, {name: b, endpoint: 'ipc:///b'}]\noutputs: [{layout: merged}]",
        "sources: 5\noutputs: [{}, {endpoint: bad, name: b}]",
    ],
)
def test_a_bad_key_causes_no_second_problem(problems, text):
    found = problems(text)
    assert not [line for line in found.values() if "taken by" in line or "at least one" in line]


def test_slots_keep_places_and_may_not_meet(read, problems):
    three = "[{name: a, endpoint: 'ipc:///a'}, {name: c, endpoint: 'ipc:///c', slot: 2, data_parallel_size: 2}, "
    config = read(_text(three + "{name: d, endpoint: 'ipc:///d'}]", "[{layout: merged}]"))
    assert [(stream.label, stream.index) for stream in config.streams()] == [("a", 0), ("c/0", 2), ("c/1", 3), ("d", 4)]
    found = problems(_text(three + "{name: d, endpoint: 'ipc:///d', slot: 3}]", "[{layout: merged}]"))
    assert "= 3: slot 3 is taken by c; for example slot: 4" in found["sources[2].slot"]


def test_a_slot_is_a_port(problems):
    sources = "[{name: a, endpoint: 'ipc:///a'}, {name: c, endpoint: 'ipc:///c', slot: 5}]"
    found = problems(_text(sources, "[{endpoint: 'tcp://*:7000', replay_endpoint: 'tcp://*:7005'}]"))
    assert "port 7005 (stream 0) is taken by outputs[0].endpoint (stream 5)" in found["outputs[0].replay_endpoint"]


SECRET, SERVER, CLIENTS = "curve_secret_key_file: /s", "curve_server_key_file: /p", "curve_client_keys: /c"


@pytest.mark.parametrize(
    ("source", "key", "wrong"),
    [
        (SECRET, "curve_server_key_file", "needed with curve_secret_key_file, for what kvbus connects to"),
        (SERVER, "curve_secret_key_file", "needed too, with curve_server_key_file"),
        (f"{SECRET}, {SERVER}, {CLIENTS}", "curve_client_keys", "there is nothing here that kvbus binds"),
        (f"bind: true, {SECRET}", "curve_client_keys", "needed with curve_secret_key_file, for what kvbus binds"),
        (f"bind: true, {SECRET}, {CLIENTS}, {SERVER}", "curve_server_key_file", "nothing here that kvbus connects to"),
        (f"bind: true, replay_endpoint: 'ipc:///r', {SECRET}, {CLIENTS}", "curve_server_key_file", "needed with"),
    ],
)
def test_half_a_curve_of_a_source(problems, source, key, wrong):
    found = problems(_text(f"[{{endpoint: 'ipc:///a', {source}}}]", "[{}]"))
    assert wrong in found[f"sources[0].{key}"]


@pytest.mark.parametrize(
    ("output", "key", "wrong"),
    [
        (SECRET, "curve_client_keys", "needed with curve_secret_key_file, for what kvbus binds"),
        (CLIENTS, "curve_secret_key_file", "needed too, with curve_client_keys"),
        (f"{SECRET}, {CLIENTS}, {SERVER}", "curve_server_key_file", "there is nothing here that kvbus connects to"),
        (f"bind: false, {SECRET}, {SERVER}, {CLIENTS}", "curve_client_keys", "there is nothing here that kvbus binds"),
        (f"bind: false, {SECRET}", "curve_server_key_file", "needed with"),
        (f"bind: false, replay_endpoint: 'ipc:///r', {SECRET}, {SERVER}", "curve_client_keys", "needed with"),
    ],
)
def test_half_a_curve_of_an_output(problems, output, key, wrong):
    found = problems(_text("[{}]", f"[{{endpoint: 'ipc:///o', {output}}}]"))
    assert wrong in found[f"outputs[0].{key}"]


def test_a_whole_curve(read):
    source = f"{{endpoint: 'ipc:///a', {SECRET}, {SERVER}}}"
    output = f"{{endpoint: 'ipc:///o', replay_endpoint: 'ipc:///r', bind: false, {SECRET}, {SERVER}, {CLIENTS}}}"
    config = read(_text(f"[{source}]", f"[{output}]"))
    assert str(config.outputs[0].curve_client_keys) == "/c"


def test_caches_are_reset_by_an_api_that_is_named(problems):
    found = problems(
        _text("[{}, {name: b, endpoint: 'ipc:///b', api: 'http://127.0.0.1:8000'}]", "[{}]", "on_partial: reset")
    )
    (wrong,) = [text for key, text in found.items() if key.startswith("sources[0]")]
    assert "null, and on_partial: reset needs the engine's HTTP API; for example api: http://127.0.0.1:8000" in wrong
    assert "sources[1].api" not in found


def test_an_api_may_be_named_before_it_is_asked(read):
    config = read(_text("[{api: 'https://engine:8000/v1/'}]", "[{}]"))
    assert (config.on_partial, config.sources[0].api) == ("keep", "https://engine:8000/v1")


def test_a_bad_api_is_told_once(problems):
    found = problems(_text("[{api: 'engine:8000'}]", "[{}]", "on_partial: reset"))
    assert set(found) == {"sources[0].api"}
    assert "must be http://host:port" in found["sources[0].api"]


def test_keys_of_an_output_need_libsodium(monkeypatch, problems):
    text = _text("[{}]", f"[{{bind: true, endpoint: 'tcp://*:7000', {SECRET}, {CLIENTS}}}]")
    monkeypatch.setattr(parts, "has_libsodium", lambda: False)
    found = problems(text)
    assert set(found) == {"outputs[0].curve_secret_key_file"}
    assert "need libsodium, which is not installed; for example pip install kvbus[curve]" in str(found)


@pytest.mark.parametrize("profile", PROFILES)
def test_an_output_without_tokens_is_refused_where_routers_hash_them(problems, read, profile):
    output = f"[{{profile: {profile}, token_ids: drop, topic: 'kv@{{worker}}@m'}}]"
    if profile == "vllm":
        assert read(_text("[{}]", output)).outputs[0].token_ids == "drop"
        return
    wrong = problems(_text("[{}]", output))["outputs[0].token_ids"]
    assert f"routers of profile {profile} hash the tokens themselves" in wrong
    assert "for example token_ids: keep" in wrong


def test_a_state_key_needs_libsodium_and_a_state(monkeypatch, problems):
    text = _text("[{}]", "[{}]", "state_key_file: /k")
    assert "no state to seal with state_dir: null" in problems(f"{text}\nstate_dir: null")["state_key_file"]
    monkeypatch.setattr(parts, "has_libsodium", lambda: False)
    found = problems(text)
    assert set(found) == {"state_key_file"}
    assert "sealing needs libsodium, which is not installed; for example pip install kvbus[curve]" in str(found)
