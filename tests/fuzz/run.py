"""Fuzz one target of kvbus with atheris, guided by code coverage.

Run it with ``python -m tests.fuzz.run codec --seconds 60`` (``make fuzz``). Inputs that reach new code are added to a
separate directory, from which a developer may pick some for the committed corpus. An input that crashes the target is
written to the same directory and ends the run with exit code 77.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvbus.core"]):
    from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"


def main() -> None:
    """Fuzz the target that the command line names, for the given number of seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--found", type=Path, default=Path(".hypothesis/fuzz"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    committed, found = CORPUS / options.target, options.found / options.target
    found.mkdir(parents=True, exist_ok=True)
    flags = [
        f"-max_total_time={options.seconds}",
        f"-seed={options.seed}",
        f"-artifact_prefix={found}/",
        "-max_len=4096",
        "-print_final_stats=1",
        "-rss_limit_mb=2048",
    ]
    atheris.Setup([sys.argv[0], *flags, str(found), str(committed)], TARGETS[options.target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
