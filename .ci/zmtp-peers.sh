#!/usr/bin/env bash
# Build the peers of tests/interop with other ZeroMQ libraries, and the reader of tests/spec in Rust.
#
#   .ci/zmtp-peers.sh DIR [NAME...]    writes into DIR; TEST_ZMTP_PEERS_HOME=DIR names them to the tests
#
# NAME is jeromq (Java 11 or newer, Maven), zeromq-rs or spec-reader (Rust 1.89 or newer, cargo); the default is all.
# Exit code 1: the requirements are there, but a program does not build; 69: a peer is not available here, and is named.
set -Eeuo pipefail
unavailable=69
mkdir -p "$1"
home=$(cd "$1" && pwd)
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../tests"
PATH=$PATH:$HOME/.cargo/bin # the directory of Rust's own installer

same_jars() { # $1: directory, which must have exactly the jars of jars.sha256
    (cd "$1" && sha256sum -- *.jar) | diff jars.sha256 -
}

jeromq() {
    local jars=$home/jeromq/jars
    cd interop/jeromq
    command -v java javac mvn >/dev/null || return $unavailable
    javac --release 11 -version || return $unavailable
    if ! same_jars "$jars" &>/dev/null; then
        rm -rf "$jars"
        mvn --batch-mode --quiet --strict-checksums dependency:copy-dependencies "-DoutputDirectory=$jars" ||
            return $unavailable
        same_jars "$jars" || return 1
    fi
    javac --release 11 -Xlint:all -Werror -d "$home/jeromq/classes" -cp "$jars/*" Peer.java || return 1
}

zeromq-rs() { in_rust zeromq-rs interop/zeromq-rs peer; }

spec-reader() { in_rust spec-reader spec/readers/rust reader; }

in_rust() { # $1: name, $2: directory of the crate, $3: its program
    local crate=$home/$1/crate registry
    cargo --version || return $unavailable
    printf 'rustc 1.89\n%s\n' "$(rustc --version)" | sort --check --version-sort || return $unavailable
    mkdir -p "$home/$1" && rm -rf "$crate"
    cp -r "$2" "$crate"
    cd "$crate"
    # Cargo.lock.in has the checksums; only the registry's address comes from cargo's configuration
    cargo generate-lockfile --quiet || return $unavailable
    registry=$(sed -n 's/^source = "\(.*\)"$/\1/p' Cargo.lock | sort -u)
    sed "s|@REGISTRY@|$registry|" Cargo.lock.in >Cargo.lock
    cargo fetch --locked --quiet || return $unavailable
    cargo build --locked --offline --quiet --target-dir "$home/$1/target" || return 1
    cp "$home/$1/target/debug/$3" "$home/$1/"
}

result=0
if (($# == 0)); then set -- jeromq zeromq-rs spec-reader; fi
for name; do
    status=0
    ($name) || status=$?
    if ((status == 0)); then
        echo "$name: ok"
    elif ((status == 1)); then
        echo "$name: DOES NOT BUILD"
        result=1
    else
        echo "$name: CANNOT BE HAD HERE"
        if ((result == 0)); then result=$unavailable; fi
    fi
done
exit $result
