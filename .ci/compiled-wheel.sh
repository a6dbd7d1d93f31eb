#!/usr/bin/env bash
# Install the compiled wheel of dist/compiled in a fresh environment and run on it the tests that touch the core.
#
#   .ci/compiled-wheel.sh DIR [pytest's arguments]    DIR holds the environment and the tree the tests run in
#
# The tree has everything but the package: kvbus there is what the wheel has installed.
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rm -rf "$1"
"${PYTHON:-python3}" -m venv "$1"
home=$(cd "$1" && pwd)
shift
"$home/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
"$home/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-index dist/compiled/*.whl
mkdir "$home/tree"
git ls-files -z --cached --others --exclude-standard | grep -zv '^kvbus/' | tar --create --null --files-from - | tar --extract --directory "$home/tree"
ln -s "$("$home/bin/python" -Pc 'import kvbus; print(*kvbus.__path__)')" "$home/tree/kvbus"
cd "$home/tree"
version=$("$home/bin/python" -m kvbus --version)
echo "$version"
[[ $version == *"(compiled core)" ]]
if (($#)) && [[ ${!#} == tests/* ]]; then
    exec "$home/bin/python" -m pytest -q --dist loadgroup "$@"
fi
exec "$home/bin/python" -m pytest -q --dist loadgroup "$@" tests/core tests/exhaustive tests/properties tests/wire \
    tests/outputs tests/vopr tests/client tests/sim tests/transport tests/system
