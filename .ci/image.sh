#!/usr/bin/env bash
# Build the Dockerfile with buildah, and provide a podman that runs the image, without a Docker engine or an image
# registry.
#
#   .ci/image.sh DIR       needs root and apt; DIR has the base, the image and the containers' storage
#
# The Dockerfile's base is not pulled. A Debian of the same release with its python3 replaces it, so only kvbus's own
# part is tested: the build from hashed wheels, and the running container. Sizes are those of this base plus kvbus.
#
# Exit code 1: the Dockerfile does not build; 69: a requirement is not available here.
#
# Afterwards DIR/podman runs podman on that storage, and DIR/facts has the image's name, size and build time.
set -Eeuo pipefail
unavailable=69
trap 'exit $unavailable' ERR
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$1"
home=$(cd "$1" && pwd)
image=localhost/kvbus:ci

if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "building the image takes root and apt" >&2
    exit $unavailable
fi
packages=()
for tool in buildah podman runc catatonit debootstrap; do
    command -v "$tool" >/dev/null || packages+=("$tool")
done
if ((${#packages[@]})); then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
fi

# from python:3.13.1-slim-trixie@sha256:… take name and tag, and the release of Debian
pinned=$(sed -n 's/^ARG PYTHON_IMAGE=//p' Dockerfile)
base=localhost/${pinned%@*}
release=${base##*-}

# podman refuses long paths for its run-time directories
short=/run/kvbus-$(cksum <<<"$home" | cut -d' ' -f1)
mkdir -p "$home/storage" "$short/run" "$short/tmp"
cat >"$home/containers.conf" <<CONF
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
init = false
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
CONF
storage=(--storage-driver overlay --root "$home/storage" --runroot "$short/run")
cat >"$home/podman" <<WRAPPER
#!/bin/sh
CONTAINERS_CONF='$home/containers.conf' exec podman ${storage[*]@Q} --tmpdir '$short/tmp' "\$@"
WRAPPER
chmod +x "$home/podman"
# podman's database stores its path: if the directory was moved, delete the database but keep the images
"$home/podman" info >/dev/null 2>&1 || rm -rf "$home/storage/libpod"
"$home/podman" info >/dev/null

if ! buildah "${storage[@]}" inspect --type image "$base" >/dev/null 2>&1; then
    # a killed build leaves its /proc mounted
    mountpoint -q "$home/rootfs/proc" && umount "$home/rootfs/proc"
    rm -rf "$home/rootfs"
    debootstrap --variant=minbase --include=python3,python3-dev,python3-venv,python3-pip,ca-certificates "$release" "$home/rootfs" >"$home/debootstrap.log" 2>&1 ||
        { tail -5 "$home/debootstrap.log" >&2 && exit $unavailable; }
    rm -rf "$home/rootfs/var/cache/apt" "$home/rootfs/var/lib/apt/lists" "$home"/rootfs/var/log/*
    container=$(buildah "${storage[@]}" from scratch)
    buildah "${storage[@]}" add --quiet "$container" "$home/rootfs" / >/dev/null
    buildah "${storage[@]}" commit --quiet --rm "$container" "$base" >/dev/null
    rm -rf "$home/rootfs"
fi

# pip in the build trusts the same certificates as this machine
printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' >"$home/pip.conf"
trap - ERR
began=$SECONDS
# all files get the commit's date, so that a commit always gives the same image
buildah "${storage[@]}" bud --isolation chroot --pull-never --layers --format oci \
    --volume /etc/ssl/certs:/etc/ssl/certs:ro --volume "$home/pip.conf:/etc/pip.conf:ro" \
    --build-arg "PYTHON_IMAGE=$base" --build-arg "REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)" \
    --timestamp "$(git log -1 --format=%ct 2>/dev/null || echo 0)" --tag "$image" . >"$home/build.log" 2>&1 || { tail -20 "$home/build.log" >&2 && exit 1; }

took=$((SECONDS - began))
size() { "$home/podman" image inspect --format '{{.Size}}' "$1"; }
bytes=$(size "$image")
base_bytes=$(size "$base")
printf '%s\n' "image=$image" "seconds=$took" "bytes=$bytes" "base_bytes=$base_bytes" | tee "$home/facts"
