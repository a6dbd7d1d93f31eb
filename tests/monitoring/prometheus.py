"""Run a real Prometheus on a free port of loopback, with kvbus's alert rules on a faster clock."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

from tests.doubles.bus import PATIENCE
from tests.ports import free_port

ROOT: Final = Path(__file__).parents[2]
RULES: Final = ROOT / "deploy" / "prometheus" / "kvbus.rules.yml"
SCALE: Final = 40
"""Factor by which the test shortens the durations in kvbus's alert rules: an hour becomes one and a half minutes."""

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_yaml: Final = YAML(typ="safe", pure=True)

Series = tuple[dict[str, str], float]
"""A time series in an answer of Prometheus: its labels and its value."""


def rules(file: Path = RULES) -> list[dict[str, Any]]:
    """Return every rule of a file: alerts and recorded series."""
    return [rule for group in _yaml.load(file.read_text())["groups"] for rule in group["rules"]]


def alerts(file: Path = RULES) -> dict[str, dict[str, Any]]:
    """Return the alert rules of a file, by the alert's name."""
    return {rule["alert"]: rule for rule in rules(file) if "alert" in rule}


def faster(duration: str) -> str:
    """Divide a duration of the alert rules, such as ``5m``, by `SCALE`. Return it in milliseconds, such as ``7500ms``."""
    return f"{int(duration[:-1]) * _SECONDS[duration[-1]] * 1000 // SCALE}ms"


def rules_in_a_hurry() -> str:
    """Return the alert rules with shorter windows, offsets and pending times. The thresholds do not change."""
    loaded = _yaml.load(RULES.read_text())
    for rule in (rule for group in loaded["groups"] for rule in group["rules"]):
        rule["expr"] = re.sub(r"(?<=\[)\d+[smhd](?=\])|(?<=offset )\d+[smhd]", lambda m: faster(m[0]), rule["expr"])
        if "for" in rule:
            rule["for"] = faster(rule["for"])
    return json.dumps(loaded)


class Prometheus:
    """A client for the HTTP API of a running Prometheus."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}?{query}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def query(self, expression: str, at: float | None = None) -> list[Series]:
        when = {} if at is None else {"time": f"{at:.3f}"}
        result = self.get("/api/v1/query", query=expression, **when)["result"]
        return [(each["metric"], float(each["value"][1])) for each in result]

    def labels(self, label: str, match: str) -> list[str]:
        return list(self.get(f"/api/v1/label/{label}/values", **{"match[]": match}))

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextlib.contextmanager
def running_prometheus(directory: Path, config: str) -> Iterator[Prometheus]:
    port = free_port()
    file = directory / "prometheus.yml"
    file.write_text(config)
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={directory / 'tsdb'}"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=log, stdout=log)
    try:
        server = Prometheus(port)
        end = time.monotonic() + PATIENCE
        while not server.ready():
            assert process.poll() is None, (directory / "prometheus.log").read_text()
            assert time.monotonic() < end, "Prometheus is not ready"
            time.sleep(0.02)
        yield server
    finally:
        process.terminate()
        process.wait(60)
