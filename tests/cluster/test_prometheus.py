"""Test that a real Prometheus finds the chart's pods with the configuration in deploy/prometheus.

Prometheus's service account may only list and watch pods.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from ruamel.yaml import YAML

from tests.chart.charts import ROOT, containers, render
from tests.cluster.api import Api, Object
from tests.cluster.control_plane import HOME_ENV, PATIENCE
from tests.doubles.kvbus_process import Process
from tests.monitoring.prometheus import Prometheus, running_prometheus

FOLDER: Final = ROOT / "deploy" / "prometheus"
BUILT: Final = Path(os.environ.get(HOME_ENV, "/nonexistent")) / "prometheus"


class Pod(Process):
    """A kvbus process at an address of its own, and the Kubernetes object of the pod that would contain it."""

    def __init__(self, directory: Path, name: str, host: str, namespace: str) -> None:
        directory.mkdir()
        super().__init__(directory, keeps_state=False)
        port = self.http.rpartition(":")[2]
        self.config["http"] = f"{host}:{port}"
        template = render().pod
        spec = {key: value for key, value in template["spec"].items() if key != "serviceAccountName"}
        for each in containers(spec):
            for one in each.get("ports", []):
                one["containerPort"] = int(port) if one["name"] == "kvbus-http" else one["containerPort"]
        metadata = {"name": name, "namespace": namespace, "labels": template["metadata"]["labels"]}
        self.object: Object = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": spec | {"nodeName": "a"},
        }
        self.status: Object = {"phase": "Running", "podIP": host, "podIPs": [{"ip": host}]}


@contextmanager
def engine(of: Pod) -> Iterator[None]:
    command = [sys.executable, "-m", "kvbus", "sim", "--bind", "--endpoint", of.engine, "--seconds", str(PATIENCE)]
    with subprocess.Popen(
        [*command, "--replay-endpoint", of.engine_replay], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as process:
        try:
            yield
        finally:
            process.kill()


def account(api: Api, namespace: str) -> str:
    """Return the token of a service account that may list and watch pods."""
    group = "rbac.authorization.k8s.io"
    name: Object = {"name": "prometheus", "namespace": namespace}
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    subjects = [{"kind": "ServiceAccount", **name}]
    role = {"apiGroup": group, "kind": "Role", "name": "prometheus"}
    api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": name})
    api.create({"apiVersion": f"{group}/v1", "kind": "Role", "metadata": name, "rules": rules})
    bound = {"apiVersion": f"{group}/v1", "kind": "RoleBinding", "metadata": name, "subjects": subjects}
    api.create({**bound, "roleRef": role})
    return api.token_of(namespace, "prometheus")


def in_kubernetes() -> Any:
    """Return the scrape job for Kubernetes, which deploy/prometheus/prometheus.yml contains as a comment."""
    text = (FOLDER / "prometheus.yml").read_text()
    lines = [line.removeprefix("  # ") for line in text.splitlines() if line.startswith("  # ")]
    (job,) = YAML(typ="safe", pure=True).load("\n".join(lines[next(i for i, x in enumerate(lines) if x[0] == "-") :]))
    return job


def config(api: Api, namespace: str, token: Path) -> str:
    job = in_kubernetes()
    (found,) = job["kubernetes_sd_configs"]
    found |= {"api_server": api.url, "namespaces": {"names": [namespace]}}
    found |= {"authorization": {"credentials_file": str(token)}, "tls_config": {"ca_file": str(api.ca_file)}}
    hurry = {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"}
    rules = [str(FOLDER / name) for name in ("kvbus.rules.yml", "kvbus-fleet.rules.yml")]
    return json.dumps({"global": hurry, "rule_files": rules, "scrape_configs": [job]})


def wait_until_equal(wanted: Any, ask: Callable[[], Any]) -> None:
    until = time.monotonic() + PATIENCE
    while (said := ask()) != wanted:
        assert time.monotonic() < until, said
        time.sleep(0.1)


def pods_of(server: Prometheus, expression: str) -> set[tuple[str, str]]:
    return {(labels["namespace"], labels["pod"]) for labels, _ in server.query(expression)}


@pytest.mark.skipif(not (BUILT / "prometheus").is_file(), reason="no prometheus that discovers here: make cluster")
def test_prometheus_finds_native_sidecars_and_its_rules_have_values(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{BUILT}:{os.environ['PATH']}")
    namespace = api.namespace()
    (tmp_path / "token").write_text(account(api, namespace))
    one, two = (Pod(tmp_path / name, name, f"127.0.0.{n}", namespace) for n, name in ((31, "one"), (32, "two")))
    for each in (one, two):
        api.create(each.object)
        api.set_status(each.object, each.status)
    both = {(namespace, "one"), (namespace, "two")}
    with (
        one,
        two,
        engine(one),
        running_prometheus(tmp_path, config(api, namespace, tmp_path / "token")) as server,
    ):
        wait_until_equal(both, lambda: pods_of(server, "up == 1"))
        wait_until_equal([({"job": "kvbus-pods"}, 0.5)], lambda: live(server))
        assert {each["scrapeUrl"] for each in server.get("/api/v1/targets")["activeTargets"]} == {
            f"http://{each.http}/metrics" for each in (one, two)
        }
        wait_until_equal(both, lambda: pods_of(server, "kvbus:queue_fill:ratio"))
        with engine(two):
            wait_until_equal([({"job": "kvbus-pods"}, 1.0)], lambda: live(server))
        api.delete(two.object)
        wait_until_equal({(namespace, "one")}, lambda: pods_of(server, "up"))
        wait_until_equal({(namespace, "one")}, lambda: pods_of(server, "kvbus:queue_fill:ratio"))


def live(server: Prometheus) -> Any:
    return [
        ({key: value for key, value in labels.items() if key != "__name__"}, value)
        for labels, value in server.query("kvbus:sources_live:ratio")
    ]
