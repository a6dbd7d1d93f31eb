"""Render the chart with every example of values.

Helm must report no error, Kubernetes must accept the manifests, and kvbus must accept its configuration.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.config import Config, load
from kvbus.config.endpoints import parse_endpoint
from tests.chart.charts import CASES, CHART, LIBRARY, Release, containers, helm, render
from tests.chart.charts import load as load_yaml

WARNING: Final = 2
OLDEST: Final = 29
"""Minor version of the oldest Kubernetes 1.x that the chart supports. The tests also use all newer versions."""
CUSTOM: Final = {"PodMonitor", "PrometheusRule"}
"""Kinds of objects that the Prometheus operator defines. Kubernetes' own schemas do not describe them."""
VOLUMES: Final = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
"""Types of volumes that the restricted Pod Security Standard allows."""

each_case = pytest.mark.parametrize("case", CASES)


@each_case
def test_the_chart_passes_strict_lint(case: str) -> None:
    report = helm.lint(str(CHART), CASES[case], strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] >= WARNING] == []


def test_the_library_chart_passes_strict_lint() -> None:
    report = helm.lint(str(LIBRARY), strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] >= WARNING] == []


@each_case
def test_rendered_objects_are_valid_for_kubernetes(case: str) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    objects = [each for each in render(CASES[case]).objects if each["kind"] not in CUSTOM]
    assert len(objects) >= 4
    for each in objects:
        if (text := json.dumps(each, sort_keys=True)) in valid:  # many objects are the same in several cases
            continue
        for minor in range(OLDEST, int(kubernetes.latest_version().split(".")[1]) + 1):
            kubernetes.validate(each, f"1.{minor}", strict=True)
        valid.add(text)


valid: Final[set[str]] = set()


def test_the_check_refuses_an_object_with_a_misspelled_field() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    workload = copy.deepcopy(render().workload)
    workload["spec"]["template"]["spec"]["initContainers"][0]["restartPolcy"] = "Always"
    with pytest.raises(kubernetes.ValidationError, match="restartPolcy"):
        kubernetes.validate(workload, f"1.{OLDEST}", strict=True)


@each_case
def test_every_pod_meets_the_restricted_pod_security_standard(case: str) -> None:
    for spec in render(CASES[case]).pods():
        assert restricted(spec) == []


def restricted(spec: Any) -> list[str]:
    """Return the rules of the restricted Pod Security Standard that a pod violates."""
    wrong = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    wrong += [
        f"volume {volume['name']}" for volume in spec.get("volumes", []) if not volume.keys() - {"name"} <= VOLUMES
    ]
    of_pod = spec.get("securityContext", {})
    for each in containers(spec):
        context = {**of_pod, **each.get("securityContext", {})}
        checks = {
            "privileged": not context.get("privileged"),
            "allowPrivilegeEscalation": context.get("allowPrivilegeEscalation") is False,
            "runAsNonRoot": context.get("runAsNonRoot") is True,
            "runAsUser": context.get("runAsUser") != 0,
            "seccompProfile": context.get("seccompProfile", {}).get("type") in {"RuntimeDefault", "Localhost"},
            "drop": "ALL" in context.get("capabilities", {}).get("drop", []),
            "add": set(context.get("capabilities", {}).get("add", [])) <= {"NET_BIND_SERVICE"},
            "hostPort": not any(port.get("hostPort") for port in each.get("ports", [])),
        }
        wrong += [f"{each['name']}: {name}" for name, good in checks.items() if not good]
    return wrong


def test_the_check_finds_violations_of_the_pod_security_standard() -> None:
    bad = {"hostNetwork": True, "volumes": [{"name": "v", "hostPath": {}}], "containers": [{"name": "c"}]}
    assert {"hostNetwork", "volume v", "c: runAsNonRoot", "c: drop"} <= set(restricted(bad))


def loaded_config(release: Release, tmp_path: Path) -> Config:
    """Return the configuration that kvbus loads from the file and the environment variables of a rendered release."""
    path = None
    if (text := release.file()) is not None:
        path = tmp_path / "kvbus.yaml"
        path.write_text(text)
        assert release.kvbus["args"] == ["run", "/etc/kvbus/kvbus.yaml"]
    else:
        assert release.kvbus["args"] == ["run"]
    return load(path, env=release.environment(), overrides={})


@each_case
def test_kvbus_loads_the_rendered_configuration(case: str, tmp_path: Path) -> None:
    values = CASES[case]
    release = render(values)
    config = loaded_config(release, tmp_path)
    assert "$(" not in str(config.to_dict())
    wanted = values.get("kvbus", {}).get("config", {})
    for key in wanted.keys() - {"sources", "outputs", "limits"}:
        assert getattr(config, key) == wanted[key]
    assert len(config.sources) == len(wanted.get("sources", [1]))
    assert len(config.outputs) == len(wanted.get("outputs", [1]))


@each_case
def test_container_and_service_have_exactly_the_configured_ports(case: str, tmp_path: Path) -> None:
    release = render(CASES[case])
    config = loaded_config(release, tmp_path)
    bound = {config.http_address[1]} if config.http_address else set()
    for output in config.outputs:
        for slot in [stream.index for stream in config.streams()] if output.layout == "per_source" else [0]:
            live, replay, snapshot = output.stream_endpoints(slot)
            ends = [*([live] if output.bind else []), replay, snapshot]
            found = [parse_endpoint(end) for end in ends if end is not None]
            # This port of kvbus is only used inside the pod: both the engine and its routers connect to it.
            bound |= {address.port for address in found if not (output.interpose and address.is_loopback)}
    bound |= {
        parse_endpoint(stream.endpoint).port
        for stream in config.streams()
        if stream.bind and not parse_endpoint(stream.endpoint).is_loopback
    }
    ports = {port["name"]: port["containerPort"] for port in release.kvbus["ports"]}
    assert set(ports.values()) == bound
    assert len(ports) == len(release.kvbus["ports"]), "names are unique"
    assert all(len(name) <= 15 for name in ports)
    served = {port["name"]: port["targetPort"] for port in release.one("Service")["spec"]["ports"]}
    served.pop("kvbus-index", None)  # this port belongs to the index's container
    assert served == ports


@each_case
def test_the_probes_request_livez_and_readyz_of_kvbus(case: str) -> None:
    """The probes of the sidecar send their requests to kvbus's own HTTP port.

    The pod is ready only if kvbus is ready, and the engine starts after kvbus's startup probe succeeds.
    """
    kvbus = render(CASES[case]).kvbus
    probes = {name: kvbus[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    at = {"port": "kvbus-http"} | ({"scheme": "HTTPS"} if case == "tls" else {})
    assert probes == {
        "startupProbe": {"path": "/livez", **at},
        "livenessProbe": {"path": "/livez", **at},
        "readinessProbe": {"path": "/readyz", **at},
    }


@each_case
def test_every_mount_has_its_volume_and_state_dir_is_on_a_volume(case: str, tmp_path: Path) -> None:
    release = render(CASES[case])
    for spec in release.pods():
        volumes = [volume["name"] for volume in spec.get("volumes", [])]
        assert len(set(volumes)) == len(volumes)
        mounts = [mount["name"] for each in containers(spec) for mount in each.get("volumeMounts", [])]
        assert set(mounts) == set(volumes)
    states = [mount["mountPath"] for mount in release.kvbus["volumeMounts"] if mount["name"] == "kvbus-state"]
    config = loaded_config(release, tmp_path)
    assert states == ([] if config.log_numbers else [str(config.state_dir)]), (
        "a log has the state of what is read there"
    )


@each_case
def test_only_discovering_pods_have_a_token_and_none_has_service_links(case: str) -> None:
    release = render(CASES[case])
    for spec in release.pods():
        asks = spec is release.pod["spec"] and bool(release.all("Role"))
        assert spec["automountServiceAccountToken"] is asks
        assert spec["enableServiceLinks"] is False


@each_case
def test_the_notes_show_how_to_reach_kvbus(case: str) -> None:
    notes = render(CASES[case]).notes
    assert "/sources" in notes
    assert "port-forward" in notes
    assert "<no value>" not in notes
    assert "%!" not in notes


@each_case
def test_kvbus_check_accepts_the_rendered_configuration(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = render(CASES[case])
    args = ["check"]
    if (text := release.file()) is not None:
        (tmp_path / "kvbus.yaml").write_text(text)
        args += ["-c", str(tmp_path / "kvbus.yaml")]
        of_others = (
            case in {"tls", "index", "everything"} or "/etc/kvbus-log/" in text
        )  # These configurations name Secrets that the chart does not create.
        args += ["--without-keys"] if of_others else []
    for name in [name for name in os.environ if name.startswith("KVBUS_")]:
        monkeypatch.delenv(name)
    done = CliRunner().invoke(main, args, env=release.environment())
    assert done.exit_code == 0, done.output
    assert load_yaml(done.stdout)["outputs"]
