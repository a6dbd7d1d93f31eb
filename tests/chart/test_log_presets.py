"""Tests for the chart's log presets: one kvbus writes to a log, and two aggregators read the log.

The tests check the configuration, the credentials and the network access of each pod.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.config import Config
from kvbus.config.endpoints import parse_endpoint
from kvbus.config.logs import TYPES
from tests.chart.charts import CASES, Release, Values, helm, render
from tests.chart.test_render import loaded_config
from tests.security.certificates import Authority

ROLES = ("leaf", "aggregator")
MOUNT = "/etc/kvbus-log"
each_kind = pytest.mark.parametrize("kind", TYPES)
each_role = pytest.mark.parametrize("role", ROLES)


def rendered(role: str, kind: str) -> Release:
    return render(CASES[f"{role}-{kind}"])


def access(config: Config, kind: str) -> dict[str, Any]:
    """Return how a release reaches its log of streams (Kafka, NATS or Redis): the endpoint and the credentials."""
    log = next((output for output in config.outputs if output.type == kind), None)
    if log is None or log.log is None:
        settings = config.sources[0].log_settings
        assert settings is not None
        return settings
    return {"endpoint": log.endpoint, "model": config.model, **log.log.model_dump(mode="json")}


@each_kind
def test_the_aggregator_preset_reads_the_log_of_the_leaf_preset(kind: str, tmp_path: Path) -> None:
    leaf, reader = (access(loaded_config(rendered(role, kind), tmp_path), kind) for role in ROLES)
    shared = {"endpoint", "more_servers", "topic", "stream", "prefix", "database", "cluster", "model", "tls_ca_file"}
    assert {key: leaf[key] for key in shared & leaf.keys()} == {key: reader[key] for key in shared & reader.keys()}
    assert leaf["username"] != reader["username"], "who reads may not write"


@each_role
@each_kind
def test_check_accepts_a_log_preset_and_names_a_missing_credential_file(role: str, kind: str, tmp_path: Path) -> None:
    """`kvbus check` accepts a preset's configuration with its credential files, and names a file that is missing.

    The files have the permissions of a Secret that the kubelet mounts: kvbus's group may read them, other users may
    not.
    """
    (tmp_path / "ca.crt").write_text(Authority(tmp_path).certificate.read_text())
    password = tmp_path / "password"
    password.write_text("hunter2")
    password.chmod(0o440)
    release = rendered(role, kind)
    config = tmp_path / "kvbus.yaml"
    config.write_text(str(release.file()).replace(MOUNT, str(tmp_path)))
    env = {"KVBUS_STATE_DIR": str(tmp_path)} if role == "leaf" else {}
    done = CliRunner().invoke(main, ["check", "-c", str(config)], env=env)
    assert (done.exit_code, "hunter2" in done.output) == (0, False), done.output
    password.unlink()
    done = CliRunner().invoke(main, ["check", "-c", str(config)], env=env)
    assert (done.exit_code, f"{kind}.password_file = {password}: cannot be read" in done.output) == (78, True)


@each_role
@each_kind
def test_passwords_of_a_log_are_only_in_mounted_files_of_a_secret(role: str, kind: str, tmp_path: Path) -> None:
    release = rendered(role, kind)
    assert release.all("Secret") == [], "somebody else makes it"
    (volume,) = (each for each in release.pod["spec"]["volumes"] if each["name"] == "kvbus-log")
    assert volume["secret"] == {
        "secretName": f"kvbus-log-{'leaf' if role == 'leaf' else 'reader'}",
        "defaultMode": 0o440,
    }
    (mount,) = (each for each in release.kvbus["volumeMounts"] if each["name"] == "kvbus-log")
    assert (mount["mountPath"], mount["readOnly"]) == (MOUNT, True)
    assert release.pod["spec"]["securityContext"]["fsGroup"] == 65532
    keys = access(loaded_config(release, tmp_path), kind)
    assert [keys[name] for name in ("tls_ca_file", "password_file")] == [f"{MOUNT}/ca.crt", f"{MOUNT}/password"]
    said = json.dumps([*release.all("ConfigMap"), release.environment()])
    assert said.count("password") == said.count(f"{MOUNT}/password") + said.count("password_file: ")
    if role == "leaf":
        assert all(mount["name"] != "kvbus-log" for mount in release.engine.get("volumeMounts", [])), (
            "the engine has none"
        )


@each_kind
def test_two_aggregators_share_an_address_and_restart_one_after_the_other(kind: str) -> None:
    release = rendered("aggregator", kind)
    spec = release.workload["spec"]
    assert (release.workload["kind"], spec["replicas"]) == ("Deployment", 2)
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    assert release.one("Service")["spec"].get("clusterIP") is None, "their numbers are the same: any of them will do"
    assert release.one("PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    (apart,) = release.pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"]["matchLabels"].items() <= release.pod["metadata"]["labels"].items()
    assert release.kvbus["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert "numbers its streams from 0" not in release.notes


@each_role
@each_kind
def test_a_replaced_pod_has_time_to_send_its_queued_batches(role: str, kind: str, tmp_path: Path) -> None:
    release = rendered(role, kind)
    assert (
        release.pod["spec"].get("terminationGracePeriodSeconds", 30)
        > 2 * loaded_config(release, tmp_path).shutdown_timeout
    )


@each_kind
def test_the_network_policy_lets_an_aggregator_reach_only_dns_and_the_log(kind: str, tmp_path: Path) -> None:
    release = rendered("aggregator", kind)
    keys = access(loaded_config(release, tmp_path), kind)
    servers = [parse_endpoint(each) for each in (keys["endpoint"], *keys.get("more_servers", ()))]
    policy = release.one("NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    names, log = policy["egress"]
    assert {(rule["protocol"], rule["port"]) for rule in names["ports"]} == {("UDP", 53), ("TCP", 53)}
    assert {rule["port"] for rule in log["ports"]} == {server.port for server in servers}
    (peer,) = log["to"]
    namespace = peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    assert {server.host.split(".")[1] for server in servers} == {namespace}


def test_a_network_policy_without_egress_rules_does_not_restrict_egress() -> None:
    policy = render({"networkPolicy": {"enabled": True}}).one("NetworkPolicy")["spec"]
    assert (policy["policyTypes"], "egress" in policy) == (["Ingress"], False)


@each_kind
def test_a_log_output_has_no_curve_keys_of_routers(kind: str, tmp_path: Path) -> None:
    curve: Values = {"existingSecret": "bus-curve"}
    values = CASES[f"leaf-{kind}"]
    config = loaded_config(render({**values, "kvbus": {**values["kvbus"], "curve": curve}}), tmp_path)
    routers, log = config.outputs
    assert routers.curve_secret_key_file is not None
    assert log.curve_secret_key_file is None


@pytest.mark.parametrize(("values", "wrong"), [({"enabled": True}, r"kvbus\.state\.enabled: what is read from a log")])
def test_an_aggregator_of_a_log_refuses_a_state_volume(values: Values, wrong: str) -> None:
    preset = CASES["aggregator-kafka"]
    with pytest.raises(helm.HelmError, match=wrong):
        render({**preset, "kvbus": {**preset["kvbus"], "state": values}})
