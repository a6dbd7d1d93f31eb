#!/usr/bin/env bash
# Build the go-zeromq peers of tests/interop.
#
#   .ci/gozmq.sh DIR       writes DIR/subscriber and DIR/publisher; TEST_GOZMQ_HOME=DIR names them to the tests
#
# Exit code 1: they do not build; 69: Go is not installed, or the module is not available.
set -Eeuo pipefail
unavailable=69
mkdir -p "$1"
home=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../tests/interop/gozmq"
PATH=$PATH:/usr/local/go/bin # the directory of Go's own installer
go version || exit $unavailable
go mod download || exit $unavailable # go.sum has the checksums
CGO_ENABLED=0 go build -mod=readonly -trimpath -o "$home/" ./subscriber ./publisher || exit 1
