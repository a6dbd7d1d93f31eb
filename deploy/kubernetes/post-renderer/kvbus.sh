#!/bin/sh
# kvbus into what a chart of others renders, whatever its templates make of init containers. Helm pipes the manifests
# through here; what is needed is kubectl (or KUSTOMIZE="kustomize build").
#
#   Helm 3   KVBUS_SELECT=model helm install … --post-renderer deploy/kubernetes/post-renderer/kvbus.sh
#   Helm 4   helm plugin install deploy/kubernetes/post-renderer
#            KVBUS_SELECT=model helm install … --post-renderer kvbus
#
# KVBUS_ROUTER     the component, a folder of deploy/kubernetes/component (llm-d)
# KVBUS_SELECT     labels of the workloads that get kvbus, as kubectl's -l takes them (kvbus=enabled)
# KVBUS_IMAGE      REGISTRY/kvbus, without a tag (kvbus)
set -eu
here=$(cd "$(dirname "$0")" && pwd -P)
component=$here/../component/${KVBUS_ROUTER:=llm-d}
if [ ! -f "$component/kustomization.yaml" ]; then
    echo "KVBUS_ROUTER=$KVBUS_ROUTER: no such component; there are $(cd "$here/../component" && echo *)" >&2
    exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/chart"
cp -R "$component" "$work/component"
cat >"$work/chart/manifests.yaml"
cat >"$work/chart/kustomization.yaml" <<END
resources: [manifests.yaml]
patches:
  - target: {kind: Deployment|StatefulSet|LeaderWorkerSet, labelSelector: "${KVBUS_SELECT:=kvbus=enabled}"}
    patch: |
      {apiVersion: v1, kind: any, metadata: {name: any, labels: {kvbus: enabled}}}
END
cat >"$work/kustomization.yaml" <<END
resources: [chart]
components: [component]
images: [{name: kvbus, newName: "${KVBUS_IMAGE:-kvbus}"}]
END
${KUSTOMIZE:-kubectl kustomize} "$work" >"$work/made.yaml"
if ! grep -q 'name: kvbus-state$' "$work/made.yaml"; then
    echo "no workload of the chart has the labels KVBUS_SELECT=$KVBUS_SELECT" >&2
    exit 1
fi
cat "$work/made.yaml"
