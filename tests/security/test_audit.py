"""Tests for `.ci/audit.sh`: it fails if it finds an advisory, if it gets no answer, or if it could not check a
package.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PIP_AUDIT = """#!/bin/sh
case "$*" in
*pip_audit*) while [ "$1" != -o ]; do shift; done; [ -z "$ANSWER" ] || printf %s "$ANSWER" >"$2"; exit 1 ;;
*) exec python3 "$@" ;;
esac
"""


def package(**more: object) -> dict[str, object]:
    return {"name": "zmq", "version": "1", **more}


ADVISORY = {"id": "PYSEC-2026-1", "fix_versions": ["2"]}


@pytest.mark.parametrize(
    ("packages", "code"),
    [
        ([package(vulns=[])], 0),
        ([package(vulns=[ADVISORY])], 1),
        ([package(vulns=[ADVISORY]), package(skip_reason="unknown")], 1),
        ([package(vulns=[]), package(skip_reason="unknown")], 69),
        ([], 69),
        (None, 69),
    ],
)
def test_the_audit_fails_for_an_advisory_or_a_missing_answer(
    tmp_path: Path, packages: list[object] | None, code: int
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PIP_AUDIT)
    python.chmod(0o755)
    answer = "" if packages is None else json.dumps({"dependencies": packages})
    run = f"locked_venv() {{ true; }}; export -f locked_venv; exec .ci/audit.sh {tmp_path}"
    env = os.environ | {"ANSWER": answer}
    done = subprocess.run(["bash", "-c", run], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("PYSEC-2026-1, fixed in 2" in done.stdout) == (code == 1)
