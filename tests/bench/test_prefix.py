"""The script that measures questions, in small."""

from __future__ import annotations

import re
import subprocess
import sys


def test_the_script_that_measures_questions():
    command = [sys.executable, "-m", "tests.bench.prefix", "--blocks", "2000", "--workers", "4", "--asked", "8"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert said.startswith("2,000 blocks of 4 workers:\n")
    assert re.search(r"\d+ bytes and \d+\.\d us of CPU a block", said)
    assert len(re.findall(r"a prompt of 8 blocks that .+: \d+\.\d us \(median \d+\.\d\)", said)) == 3
