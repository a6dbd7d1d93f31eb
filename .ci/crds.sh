#!/usr/bin/env bash
# Copy other projects' custom resource definitions from the modules in tests/chart/crds/go.mod.
#
#   .ci/crds.sh DIR      writes DIR/*.yaml
#
# Exit code 69: Go is not installed, or a module is not available.
set -Eeuo pipefail
unavailable=69
mkdir -p "$1"
crds=$(cd "$1" && pwd)
PATH=$PATH:/usr/local/go/bin # the directory of Go's own installer
cd "$(dirname "${BASH_SOURCE[0]}")/../tests/chart/crds"
go version || exit $unavailable
for module in $(sed -n 's/^\t\(.*\) \(v.*\)$/\1@\2/p' go.mod); do
    at=$(go mod download -json "$module" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p') # go.sum has its checksum
    [[ -d $at ]] || exit $unavailable
    case $module in
    */kserve@*) find "$at/config/crd/full" -regex '.*/serving.kserve.io_llminferenceservice\(config\)?s.yaml' ;;
    */lws@*) find "$at/config/crd/bases" -name '*leaderworkersets.yaml' ;;
    */aibrix@*) find "$at/config/crd" -name '*_stormservices.yaml' ;;
    */prometheus-operator@*) find "$at/example/prometheus-operator-crd" -regex '.*_podmonitors.yaml\|.*_prometheusrules.yaml' ;;
    esac | xargs -I{} install -m 644 {} "$crds/"
done
