#!/usr/bin/env bash
# What tests/chart/test_inject.py asks: other projects' custom resource definitions, and the API server's own CEL.
#
#   .ci/platforms.sh DIR       DIR/crds/*.yaml and DIR/policy; TEST_PLATFORMS_HOME=DIR names them to the tests. It takes
#                              ten minutes to build: `make platforms` is for people, and .ci/run does not wait for it
#
# Exit code 1: the program does not build; 69: there is no Go here, or a module cannot be had.
set -Eeuo pipefail
unavailable=69
mkdir -p "$1/crds"
home=$(cd "$1" && pwd)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=$PATH:/usr/local/go/bin # where Go's own installer puts it
go version || exit $unavailable
cd "$here/tests/chart/crds"
for module in $(sed -n 's/^\t\(.*\) \(v.*\)$/\1@\2/p' go.mod); do
    at=$(go mod download -json "$module" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p') # go.sum holds what it must be
    [[ -d $at ]] || exit $unavailable
    find "$at/config/crd" -name '*llminferenceserviceconfigs.yaml' -path '*/full/*' -exec install -m 644 {} "$home/crds/" \;
    find "$at/config/crd" -name '*leaderworkersets.yaml' -path '*/bases/*' -exec install -m 644 {} "$home/crds/" \;
done
cd "$here/tests/chart/policy"
go mod download || exit $unavailable
CGO_ENABLED=0 go build -mod=readonly -trimpath -o "$home/policy" . || exit 1
