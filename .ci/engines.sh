#!/usr/bin/env bash
# Extract the publishers of released engines from their wheels, for tests/conform and tests/spec.
#
#   .ci/engines.sh DIR       writes into DIR; TEST_ENGINES_HOME=DIR names them to the tests
#
# NEWEST=1 extracts the newest release of each into DIR/NAME-newest and ignores the lock (newest.yml). The download has
# 380 MB (eight seconds at 50 MB/s), of which 70 MB are kept. The publishers are pure Python, so wheels for one Python
# and one platform suffice; vLLM's Rust front end runs on x86-64. Exit code 69: a wheel is not available here.
set -Eeuo pipefail
unavailable=69
mkdir -p "$1"
home=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if [[ -f $home/.installed && ! .ci/engines.lock -nt $home/.installed && ! .ci/engines.sh -nt $home/.installed ]]; then exit 0; fi

wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
wanted=(--require-hashes -r .ci/engines.lock)
if [[ ${NEWEST:-} ]]; then wanted=(vllm sglang); fi
"$python" -m pip download --quiet --no-cache-dir --no-deps --only-binary :all: --python-version 3.11 --implementation cp \
    --abi cp311 --abi abi3 --abi none --platform manylinux_2_28_x86_64 --platform manylinux_2_34_x86_64 --platform any \
    -d "$wheels" "${wanted[@]}" || exit $unavailable
"$python" - "$home" "$wheels"/*.whl <<'PYTHON'
import os
import sys
import zipfile
from pathlib import Path

modules = (
    "vllm/distributed/kv_events.py",
    "sglang/srt/disaggregation/kv_events.py",
    "sglang/srt/utils/network.py",
    "vllm/vllm-rs",
    "sglang/srt/rust_extensions/_grpc.cpython-311-x86_64-linux-gnu.so",
)
for wheel in map(Path, sys.argv[2:]):
    name, version, _ = wheel.name.split("-", 2)
    with zipfile.ZipFile(wheel) as archive:
        found = [each for each in modules if each in archive.namelist()]
        kept = "newest" if os.environ.get("NEWEST") else version
        home = Path(sys.argv[1]) / f"{name.removesuffix('_tpu')}-{kept}"
        archive.extractall(home, found)
        if (program := home / "vllm" / "vllm-rs").exists():
            program.chmod(0o755)
    print(name, version, *found)
PYTHON
touch "$home/.installed"
