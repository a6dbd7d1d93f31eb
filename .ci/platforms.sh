#!/usr/bin/env bash
# Build the tools of tests/chart: kustomize and the API server's own CEL. Also copy other projects' custom resource
# definitions.
#
#   .ci/platforms.sh DIR       writes DIR/crds/*.yaml, DIR/kustomize and DIR/policy; TEST_PLATFORMS_HOME=DIR names them to the
#                              tests. It takes ten minutes: people run `make platforms`, and .ci/run does not include it
#
# Exit code 1: the program does not build; 69: Go is not installed, or a module is not available.
set -Eeuo pipefail
unavailable=69
mkdir -p "$1"
home=$(cd "$1" && pwd)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=$PATH:/usr/local/go/bin # the directory of Go's own installer
"$here/.ci/crds.sh" "$home/crds"
GOBIN=$home go install sigs.k8s.io/kustomize/kustomize/v5@v5.8.1 || exit $unavailable
cd "$here/tests/chart/policy"
go mod download || exit $unavailable
CGO_ENABLED=0 go build -mod=readonly -trimpath -o "$home/policy" . || exit 1
