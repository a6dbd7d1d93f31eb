"""Fixtures for tests of the container image: the image that .ci/image.sh has built, and a podman to run it.

Without them the tests of the image are skipped.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from uuid import uuid4

import pytest

IMAGE: Final = "localhost/kvbus:ci"
SECURE: Final = ("--pull=never", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")


class Podman:
    """The podman program that .ci/image.sh has installed, with functions that run its commands."""

    def __init__(self, wrapper: str) -> None:
        self.wrapper = wrapper

    def __call__(self, *args: str, check: bool = True, limit: float = 60) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([self.wrapper, *args], capture_output=True, text=True, timeout=limit, check=False)
        assert not check or done.returncode == 0, f"podman {' '.join(args)}: {done.stderr}"
        return done

    def shell(self, script: str, *options: str) -> str:
        """Run a shell script in a container of the image, and return its output."""
        isolated = ("run", "--rm", *SECURE, "--network", "none", "--entrypoint", "sh", *options)
        return self(*isolated, IMAGE, "-c", script).stdout


@pytest.fixture(scope="session")
def podman() -> Podman:
    home = os.environ.get("TEST_IMAGE_HOME")
    if not home:
        pytest.skip("no image: .ci/image.sh DIR builds it (root, apt), TEST_IMAGE_HOME=DIR names it; .ci/run does both")
    return Podman(str(Path(home) / "podman"))


@pytest.fixture
def name(podman: Podman) -> Iterator[str]:
    """A name for a container or a pod, which is removed after the test in any case."""
    chosen = f"kvbus-{uuid4().hex[:12]}"
    yield chosen
    podman("rm", "--force", "--ignore", "--time", "0", chosen)
    podman("pod", "rm", "--force", "--ignore", "--time", "0", chosen)
