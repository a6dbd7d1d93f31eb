"""Test CURVE keys in a running bus that the chart configures.

A router whose key is on the list rebuilds all blocks. A router without a key receives nothing.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from kvbus.transport import curve
from tests.chart.charts import render
from tests.doubles.bus import eventually
from tests.doubles.kvbus_process import Program
from tests.ports import ports_in_a_row

pytestmark = pytest.mark.slow


async def test_only_a_router_with_a_listed_key_gets_an_answer(tmp_path: Path) -> None:
    first = ports_in_a_row(5)
    public, secret = curve.generate()
    router_public, router_secret = curve.generate()
    ports = {"http": first, "events": first + 1, "replay": first + 2}
    engine = {"port": first + 3, "replayPort": first + 4}
    values = {
        "curve": {"existingSecret": "bus-keys"},
        "ports": ports,
        "engineEvents": engine,
        "state": {"enabled": False},
    }
    release = render({"kvbus": values})
    files = {"kvbus.key_secret": curve.certificate(public, secret), "routers.keys": router_public.decode()}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o440)
    (tmp_path / "kvbus.yaml").write_text(str(release.file()).replace("/etc/kvbus-curve", str(tmp_path)))
    (tmp_path / "kvbus.key").write_text(curve.certificate(public))
    (tmp_path / "router.key_secret").write_text(curve.certificate(router_public, router_secret))
    (tmp_path / "router.key_secret").chmod(0o600)

    def settled() -> bool:
        """Return whether the simulated engine has published its workload and no batch is missing."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{first}/sources", timeout=5) as answer:
                (source,) = json.load(answer)
        except OSError:
            return False
        return "the workload has ended" in sim.said and source["state"] == "live" and source["counts"]["stored"] > 0

    dump = ("dump", f"--replay-endpoint=tcp://127.0.0.1:{first + 2}")
    own = (f"--curve-secret-key={tmp_path / 'router.key_secret'}", f"--curve-server-key={tmp_path / 'kvbus.key'}")
    with (
        Program(tmp_path, "run", "-c", str(tmp_path / "kvbus.yaml")),
        Program(tmp_path, *release.engine["args"], "--requests=20", "--rate=100", name="engine") as sim,
    ):
        await eventually(settled, "an engine that is idle and relayed")
        with Program(tmp_path, *dump, *own, name="known") as known:
            assert await known.ends() == 0, known.said
            assert int(known.printed.split()[0]) > 0
        with Program(tmp_path, *dump, "--timeout=2", name="unknown") as unknown:
            assert await unknown.ends() == 69
            assert unknown.printed == ""
