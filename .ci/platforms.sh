#!/usr/bin/env bash
# What tests/chart asks: other projects' custom resource definitions, kustomize, and the API server's own CEL.
#
#   .ci/platforms.sh DIR       DIR/crds/*.yaml, DIR/kustomize and DIR/policy; TEST_PLATFORMS_HOME=DIR names them to the
#                              tests. It takes ten minutes to build: `make platforms` is for people, and .ci/run does not
#                              wait for it
#
# Exit code 1: the program does not build; 69: there is no Go here, or a module cannot be had.
set -Eeuo pipefail
unavailable=69
mkdir -p "$1"
home=$(cd "$1" && pwd)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=$PATH:/usr/local/go/bin # where Go's own installer puts it
"$here/.ci/crds.sh" "$home/crds"
GOBIN=$home go install sigs.k8s.io/kustomize/kustomize/v5@v5.8.1 || exit $unavailable
cd "$here/tests/chart/policy"
go mod download || exit $unavailable
CGO_ENABLED=0 go build -mod=readonly -trimpath -o "$home/policy" . || exit 1
