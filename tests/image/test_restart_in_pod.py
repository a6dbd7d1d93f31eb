"""Test that kills kvbus in a pod of podman. Its state outlives the container, so routers notice only a pause."""

from __future__ import annotations

import pytest

from tests.image.conftest import Podman
from tests.image.test_play_kube import ANY_HOST, CAPTURE, Pod, pod, with_capture
from tests.wire.captures import load, truth

__all__ = ["pod"]
pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize("pod", [with_capture], indirect=True)
def test_kvbus_continues_with_its_state_after_a_kill_in_a_pod(podman: Podman, pod: Pod) -> None:
    last = load(CAPTURE)[-1].seq

    def relayed() -> bool:
        source = pod.source()
        return bool(source) and (source["last_seq"], source["state"]) == (last, "live")

    pod.until(relayed, "every batch relayed")
    podman("kill", "--signal", "KILL", f"{pod.name}-kvbus")
    podman("start", f"{pod.name}-kvbus")
    pod.until(relayed, "the same place in the stream after it was killed")
    assert "state read: " in pod.said("kvbus")
    source = pod.source()
    assert source["counts"]["batches"] == 0, "nothing had to be asked for again"
    assert source["epoch"] == 0
    assert pod.blocks(f"{ANY_HOST}5658") == truth(CAPTURE)
    format_ = "{{.State.Running}} {{.RestartCount}}"
    assert podman("inspect", "--format", format_, f"{pod.name}-engine").stdout.split() == ["true", "0"]
