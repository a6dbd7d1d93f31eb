#!/usr/bin/env bash
# Unpack Debian's Redis, unless Redis or Valkey is installed. Nothing is installed, and no service is started.
#
#   .ci/redis.sh DIR       TEST_REDIS_HOME=DIR names it to the tests; DIR is empty if a server is installed
set -Eeuo pipefail
mkdir -p "$1"
if command -v redis-server || command -v valkey-server; then exit 0; fi
cd "$1"
if [[ ! -x usr/bin/redis-server ]]; then
    if [[ $(id -u) == 0 ]]; then
        apt-get update -qq
        # apt's sandbox user could not write to this directory
        set -- -o APT::Sandbox::User=root
    else
        set --
    fi
    apt-get "$@" download -qq redis-server redis-tools libatomic1 libjemalloc2 liblzf1
    for package in *.deb; do dpkg-deb -x "$package" .; done
fi
LD_LIBRARY_PATH=$(echo "$PWD"/usr/lib/*-linux-gnu) usr/bin/redis-server --version
