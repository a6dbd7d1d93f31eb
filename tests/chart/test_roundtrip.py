"""`helm test`, run: the script of the test's pod with the environment its container is given."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chart.charts import CASES, CHART, Values, environment, render
from tests.ports import ports_in_a_row


def pod_of(values: Values) -> Any:
    (pod,) = (each for each in render(values).all("Pod") if each["metadata"]["name"].endswith("-roundtrip"))
    return pod


@pytest.mark.slow
@pytest.mark.parametrize("router", ["generic", "llm-d"])
def test_what_is_published_comes_out_exact(router: str, tmp_path: Path) -> None:
    done = run({"kvbus": {"router": router, "dataParallelSize": 2, "config": {"log_level": "warning"}}}, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    streams = 1 if router == "llm-d" else 2
    assert re.search(
        rf"ok: [1-9][0-9]+ live blocks of 2 rank\(s\) came through {streams} stream\(s\) exactly", done.stdout
    )


@pytest.mark.slow
def test_a_relay_that_leaves_something_out_fails_it(tmp_path: Path) -> None:
    """Blocks of another size than the engine's are refused, so nothing comes out."""
    script = tmp_path / "roundtrip.py"
    text = (CHART / "files" / "roundtrip.py").read_text()
    for there, instead in {"PATIENCE = 60.0": "PATIENCE = 15.0", "LINGER = 5": "LINGER = 1", ", *size),": "),"}.items():
        assert text.count(there) == 1
        text = text.replace(there, instead)
    script.write_text(text)
    done = run({"kvbus": {"config": {"block_size": 64, "log_level": "error"}}}, tmp_path, script)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"FAILED: [1-9][0-9]* blocks live, [1-9][0-9]* of them missing", done.stdout)


def run(values: Values, tmp_path: Path, script: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The container's command on ports of this machine that are free."""
    first = ports_in_a_row(12)
    ports = {"events": first, "replay": first + 2, "http": first + 4}
    values["kvbus"] |= {"ports": ports, "engineEvents": {"port": first + 6, "replayPort": first + 8}}
    (container,) = pod_of(values)["spec"]["containers"]
    assert container["command"] == ["python", "-c"]
    env = {**os.environ, **environment(container), "KVBUS_STATE_DIR": str(tmp_path / "state")}
    env |= {"TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, str(script or CHART / "files" / "roundtrip.py")]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)


def test_the_pod_has_the_script_and_room_to_write() -> None:
    spec = pod_of(CASES["everything"])["spec"]
    (container,) = spec["containers"]
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/tmp", "/var/lib/kvbus"}  # noqa: S108
    (script,) = container["args"]
    assert script.rstrip() == (CHART / "files" / "roundtrip.py").read_text().rstrip()
    assert "$(" not in script, "Kubernetes would fill that in"


def test_every_hook_is_a_pod_that_is_still_there_when_its_log_is_read() -> None:
    """`helm test --logs` asks each hook of the test for a pod's log, once all of them have ended."""
    objects = render(CASES["everything"]).objects + render().objects
    hooks = [each for each in objects if "helm.sh/hook" in each["metadata"].get("annotations", {})]
    assert {each["kind"] for each in hooks} == {"Pod"}
    policies = {each["metadata"]["annotations"]["helm.sh/hook-delete-policy"] for each in hooks}
    assert policies == {"before-hook-creation"}


@pytest.mark.parametrize("case", CASES)
def test_whatever_the_release_is_its_test_is_a_worker_on_loopback(case: str) -> None:
    (container,) = pod_of(CASES[case])["spec"]["containers"]
    env = environment(container)
    assert '"endpoint":"tcp://127.0.0.1:' in env["KVBUS_SOURCES"]
    assert "curve" not in env["KVBUS_OUTPUTS"]
