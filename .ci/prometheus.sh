#!/usr/bin/env bash
# Unpack Debian's Prometheus and promtool, unless they are installed. Nothing is installed, and no service is started.
#
#   .ci/prometheus.sh DIR       DIR/usr/bin must then be added to PATH
set -Eeuo pipefail
if command -v prometheus >/dev/null && command -v promtool >/dev/null; then exit 0; fi
mkdir -p "$1"
cd "$1"
if [[ ! -x usr/bin/prometheus ]]; then
    if [[ $(id -u) == 0 ]]; then
        apt-get update -qq
        # apt's sandbox user could not write to this directory
        set -- -o APT::Sandbox::User=root
    else
        set --
    fi
    apt-get "$@" download -qq prometheus
    dpkg-deb -x prometheus_*.deb .
fi
usr/bin/prometheus --version >/dev/null && usr/bin/promtool --version >/dev/null
