"""Tests for the chart's router presets.

Each router finds kvbus at the address and in the format that it expects. Each engine publishes to the address at which
kvbus listens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbus.config import Config, render_topic
from kvbus.config.notes import notes
from tests.chart.charts import OF_THE_POD, Values, render
from tests.chart.test_render import loaded_config

ROOT = Path(__file__).parents[2]


def rendered(router: str, tmp_path: Path, **kvbus: Any) -> Config:
    return loaded_config(render({"kvbus": {"router": router, **kvbus}}), tmp_path)


@pytest.mark.parametrize(
    ("router", "profile", "events", "replay"),
    [
        ("generic", "vllm", "tcp://*:5657", "tcp://*:5658"),
        ("dynamo", "dynamo", "tcp://*:5657", "tcp://*:5658"),
        ("mooncake", "mooncake", "tcp://*:5657", "tcp://*:5658"),
        ("smg", "smg", "tcp://*:5657", "tcp://*:5658"),
        ("kthena", "kthena", "tcp://*:5657", "tcp://*:5658"),
        ("vllm-router", "vllm-router", "tcp://*:5657", "tcp://*:5658"),
        ("sglang", "sglang", "tcp://*:5657", "tcp://*:5658"),
        ("llm-d", "llm-d", "tcp://*:5657", "tcp://*:5658"),
        ("aibrix", "aibrix", "tcp://*:5557", "tcp://*:5558"),
    ],
)
def test_each_preset_serves_the_endpoints_where_its_router_reads(
    router: str, profile: str, events: str, replay: str, tmp_path: Path
) -> None:
    config = rendered(router, tmp_path, model="m")
    (output,) = config.outputs
    assert (output.profile, output.endpoint, output.replay_endpoint) == (profile, events, replay)
    (source,) = config.sources
    assert source.endpoint == "tcp://127.0.0.1:15557", "the engine moved to loopback"
    assert source.bind


def test_the_llm_d_preset_has_pod_and_model_in_its_topic(tmp_path: Path) -> None:
    config = rendered("llm-d", tmp_path, model="Qwen/Qwen3-32B", servingPort=8001)
    topic = render_topic(str(config.outputs[0].topic), config.streams()[0], config)
    assert topic.decode() == f"kv@{OF_THE_POD['POD_IP']}:8001@Qwen/Qwen3-32B"
    assert (
        render({"kvbus": {"router": "llm-d", "model": "m"}}).pod["metadata"]["labels"]["llm-d.ai/inference-serving"]
        == "true"
    )


@pytest.mark.parametrize("router", ["llm-d", "aibrix", "kthena"])
def test_ranks_share_a_stream_if_routers_apply_clears_to_the_pod(router: str, tmp_path: Path) -> None:
    config = rendered(router, tmp_path, model="m", dataParallelSize=4)
    assert config.outputs[0].layout == "merged"
    assert notes(config) == []


def test_the_aibrix_preset_has_its_labels_and_one_port_for_all_ranks(tmp_path: Path) -> None:
    values: Values = {"kvbus": {"router": "aibrix", "model": "qwen3-32b", "dataParallelSize": 4}}
    release = render(values)
    labels = release.pod["metadata"]["labels"]
    assert {name: value for name, value in labels.items() if name.startswith("model.aibrix.ai/")} == {
        "model.aibrix.ai/name": "qwen3-32b",
        "model.aibrix.ai/port": "8000",
        "model.aibrix.ai/kv-events-enabled": "true",
    }
    assert loaded_config(release, tmp_path).outputs[0].layout == "merged"
    assert {port["containerPort"] for port in release.kvbus["ports"]} == {5557, 5558, 9477}


def test_interpose_serves_routers_at_the_port_of_the_engine(tmp_path: Path) -> None:
    """The engine and its routers connect to the same port of kvbus on loopback. The engine still binds its replay port.

    From outside the pod, only kvbus's HTTP port is reachable.
    """
    release = render({"kvbus": {"router": "dynamo", "interpose": True, "dataParallelSize": 2}})
    config = loaded_config(release, tmp_path)
    (source,), (output,) = config.sources, config.outputs
    assert source.bind
    assert output.interpose
    assert source.endpoint == output.endpoint == "tcp://127.0.0.1:15557"
    assert (source.replay_endpoint, output.replay_endpoint) == ("tcp://127.0.0.1:15657", None)
    assert (output.profile, output.layout) == ("dynamo", "per_source")
    assert [port["containerPort"] for port in release.kvbus["ports"]] == [9477]
    assert f"--endpoint={source.endpoint}" in release.engine["args"]
    claimed = {"networkPolicy": {"enabled": True}, "kvbus": {"interpose": True}}
    assert not render(claimed).one("NetworkPolicy")["spec"]["ingress"], "a rule without a port would open all"
    asked = loaded_config(render({"kvbus": {"interpose": True, "ports": {"replay": 15757}}}), tmp_path)
    assert asked.outputs[0].replay_endpoint == "tcp://127.0.0.1:15757"


@pytest.mark.parametrize("configured", ["configMap", "environment"])
def test_a_release_without_a_state_volume_has_no_state_dir(configured: str, tmp_path: Path) -> None:
    """Without a volume the chart turns kvbus's state off: `state_dir: auto` would choose a directory in the container,
    which is lost with it.
    """
    config = rendered("generic", tmp_path, configFrom=configured, state={"enabled": False})
    assert config.state_dir is None
    assert str(rendered("generic", tmp_path, configFrom=configured).state_dir) == "/var/lib/kvbus"


def test_the_container_has_only_the_pod_variables_that_it_uses() -> None:
    assert "env" not in render().kvbus
    names = [variable["name"] for variable in render({"kvbus": {"router": "llm-d", "model": "m"}}).kvbus["env"]]
    assert names == ["POD_IP", "KVBUS_WORKER"], "the variable stands before the one that uses it"


def test_the_configuration_may_contain_variables_of_the_pod(tmp_path: Path) -> None:
    config = {"worker": "$(NODE_NAME)-$(POD_NAME)", "log_level": "debug"}
    release = render({"kvbus": {"config": config}})
    assert loaded_config(release, tmp_path).worker == "node-a-demo-0"
    assert "worker" not in str(release.file()), "a file would keep it as it is written"


@pytest.mark.parametrize("ranks", [1, 2, 8, 128])
@pytest.mark.parametrize("router", ["generic", "llm-d"])
def test_each_rank_uses_the_same_port_offset_at_engine_and_kvbus(router: str, ranks: int, tmp_path: Path) -> None:
    release = render({"kvbus": {"router": router, "model": "m", "dataParallelSize": ranks}})
    config = loaded_config(release, tmp_path)
    events = dict(argument.removeprefix("--").split("=", 1) for argument in release.engine["args"][1:])
    first, last = config.streams()[0], config.streams()[-1]
    assert (first.endpoint, first.replay_endpoint) == (events["endpoint"], events["replay-endpoint"])
    assert port(last.endpoint) == port(events["endpoint"]) + ranks - 1
    assert port(last.replay_endpoint) == port(events["replay-endpoint"]) + ranks - 1
    assert events["ranks"] == str(ranks)


def port(endpoint: str | None) -> int:
    assert endpoint is not None
    return int(endpoint.rpartition(":")[2])


def test_the_simulated_engine_runs_the_kvbus_image_without_a_gpu() -> None:
    release = render({"kvbus": {"dataParallelSize": 3, "image": {"repository": "r/kvbus"}}})
    assert release.engine["image"] == release.kvbus["image"]
    assert release.engine["args"] == [
        "sim",
        "--endpoint=tcp://127.0.0.1:15557",
        "--replay-endpoint=tcp://127.0.0.1:15657",
        "--ranks=3",
    ]
    assert [each["name"] for each in release.pod["spec"]["volumes"]] == ["kvbus-config", "kvbus-state"]
