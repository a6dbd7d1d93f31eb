#!/usr/bin/env bash
# Check the forge's workflows: keys, expressions, what jobs need of each other. Everywhere the same: without shellcheck.
#
#   .ci/actionlint.sh DIR      into DIR
#
# Exit code 1: something is wrong with one; 69: it cannot be had here (Go and its module proxy).
set -Eeuo pipefail
unavailable=69
mkdir -p "$1"
home=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH=$PATH:/usr/local/go/bin # where Go's own installer puts it
if [[ ! -x $home/actionlint || .ci/actionlint.sh -nt $home/actionlint ]]; then
    GOBIN=$home go install github.com/rhysd/actionlint/cmd/actionlint@v1.7.12 || exit $unavailable
    touch "$home/actionlint"
fi
"$home/actionlint" -shellcheck= -pyflakes= .github/workflows/*.yml
