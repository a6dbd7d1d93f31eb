"""Tests that cut the leading member of a cluster off from the network while it runs: see :mod:`tests.log.partition`."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.namespaces import why_not
from tests.log import broker, nats_server, redis_server

ROOT = Path(__file__).parents[2]
MISSING = {
    "kafka": lambda: None if os.environ.get(broker.HOME_ENV) else broker.MISSING,
    "nats": lambda: None if nats_server.command() else nats_server.MISSING,
    "redis": lambda: None if redis_server.command() else redis_server.MISSING,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MISSING))
def test_every_loss_is_counted_when_the_leader_loses_its_peers(name):
    missing = MISSING[name]() or asyncio.run(why_not(network=True))
    if missing:
        pytest.skip(missing)
    ran = subprocess.run(
        ["unshare", "--net", sys.executable, "-m", "tests.log.partition", name, "peers"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.fullmatch(r"peers: .* s, epoch [1-9].*\n", ran.stdout), ran.stdout
