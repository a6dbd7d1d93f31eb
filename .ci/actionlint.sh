#!/usr/bin/env bash
# Check the forge's workflows: keys, expressions, dependencies between jobs. shellcheck is off, so that results are the
# same everywhere.
#
#   .ci/actionlint.sh DIR      DIR is where actionlint is installed
#
# Exit code 1: a workflow is wrong; 69: actionlint is not available here (it needs Go and its module proxy).
set -Eeuo pipefail
unavailable=69
mkdir -p "$1"
home=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH=$PATH:/usr/local/go/bin # the directory of Go's own installer
if [[ ! -x $home/actionlint || .ci/actionlint.sh -nt $home/actionlint ]]; then
    GOBIN=$home go install github.com/rhysd/actionlint/cmd/actionlint@v1.7.12 || exit $unavailable
    touch "$home/actionlint"
fi
"$home/actionlint" -shellcheck= -pyflakes= .github/workflows/*.yml
