#!/usr/bin/env bash
# Unpack Debian's nats-server, unless one is installed. Nothing is installed, and no service is started.
#
#   .ci/nats.sh DIR       TEST_NATS_HOME=DIR names it to the tests; DIR is empty if the server is installed
set -Eeuo pipefail
mkdir -p "$1"
if command -v nats-server; then exit 0; fi
cd "$1"
if [[ ! -x usr/sbin/nats-server ]]; then
    if [[ $(id -u) == 0 ]]; then
        apt-get update -qq
        # apt's sandbox user could not write to this directory
        set -- -o APT::Sandbox::User=root
    else
        set --
    fi
    apt-get "$@" download -qq nats-server
    dpkg-deb -x nats-server_*.deb .
fi
usr/sbin/nats-server --version
