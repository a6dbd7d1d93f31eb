#!/usr/bin/env bash
# Build the programs of tests/cluster from their Go modules: kube-apiserver, etcd and a Prometheus with discovery in
# Kubernetes (Debian's has none). Also copy other projects' custom resource definitions.
#
#   .ci/cluster.sh DIR       writes DIR/VERSION/{kube-apiserver,etcd}, DIR/prometheus-VERSION/prometheus, DIR/crds/*.yaml;
#                            TEST_KUBERNETES=DIR names them to the tests. It takes three quarters of an hour on two cores,
#                            once per version. People and a separate job run `make cluster`; .ci/run does not include it
#
# Exit code 1: a program does not build; 69: Go is not installed, or a module is not available.
set -Eeuo pipefail
unavailable=69
mkdir -p "$1"
home=$(cd "$1" && pwd)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=$PATH:/usr/local/go/bin # the directory of Go's own installer
"$here/.ci/crds.sh" "$home/crds"
export CGO_ENABLED=0
cd "$here/tests/cluster/server"
version=$(sed -n 's/^\tk8s.io\/kubernetes \(v[^ ]*\).*/\1/p' go.mod)
if ! cmp --silent go.sum "$home/$version/go.sum"; then
    go mod download k8s.io/kubernetes go.etcd.io/etcd/server/v3 || exit $unavailable
    mkdir -p "$home/$version"
    IFS=. read -r major minor _ <<<"${version#v}"
    stamp=k8s.io/component-base/version # without it, the API server reports the version v0.0.0-master
    stamps="-s -w -X $stamp.gitVersion=$version -X $stamp.gitMajor=$major -X $stamp.gitMinor=$minor"
    go build -mod=readonly -trimpath -ldflags "-s -w" -o "$home/$version/etcd" go.etcd.io/etcd/server/v3 || exit 1
    go build -mod=readonly -trimpath -ldflags "$stamps" -o "$home/$version/" k8s.io/kubernetes/cmd/kube-apiserver || exit 1
    cp go.sum "$home/$version/"
fi
ln -sfn "$version" "$home/bin"

cd "$here/tests/cluster/prometheus"
module=$(sed -n 's/^require \(.*\) \(v.*\)$/\1@\2/p' go.mod)
prometheus=$home/prometheus-${module#*@}
if [[ ! -x $prometheus/prometheus ]]; then
    at=$(go mod download -json "$module" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p') # go.sum has its checksum
    [[ -d $at ]] || exit $unavailable
    source=$(mktemp -d)
    trap 'rm -rf "$source"' EXIT
    cp -R "$at/." "$source"
    chmod -R u+w "$source"
    cd "$source"
    # its list of discovery plugins is meant to be edited: the plugins for clouds would take an hour to build
    printf 'package plugins\n\nimport _ "%s/discovery/kubernetes"\n' "${module%@*}" >plugins/plugins.go
    go list -deps ./cmd/prometheus >/dev/null || exit $unavailable
    go build -mod=readonly -trimpath -ldflags "-s -w" -o "$prometheus/prometheus" ./cmd/prometheus || exit 1
fi
ln -sfn "$(basename "$prometheus")" "$home/prometheus"
