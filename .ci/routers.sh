#!/usr/bin/env bash
# Install other projects' routers for tests/interop, each by its own package client.
#
#   .ci/routers.sh DIR [NAME...]       writes into DIR; TEST_ROUTERS_HOME=DIR names them to the tests
#
# NEWEST=1 installs the newest release of each, in a directory of its own, to test it before its version is pinned.
# NEWEST=pre also takes a development build, where the package index has one.
#
# NAME is llmd (Go), aibrix (Go, gcc, Debian's libzmq, unpacked), vllm-router, smg or dynamo (Python). The default is
# all except dynamo, for which .ci/run has its own step. Exit code 1: the requirements are there, but a program does not
# build; 69: a router is not available here, and is named.
set -Eeuo pipefail
unavailable=69
mkdir -p "$1"
home=$(cd "$1" && pwd)
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH=$PATH:/usr/local/go/bin # the directory of Go's own installer

go_program() { # $1: name, $2: the router's module, rest: arguments of go build; go.sum has the modules' checksums
    local name=$1 module=$2
    shift 2
    (
        cd "tests/interop/$name"
        if [[ -n ${NEWEST:-} ]]; then
            rm -rf "$home/source-$name" && cp -R . "$home/source-$name" && cd "$home/source-$name"
            go get "$module@latest" && go mod tidy || exit $unavailable
            go list -m "$module"
        fi
        go version && go mod download || exit $unavailable
        go build -mod=readonly -trimpath "$@" -o "$home/$name" . || exit 1
    )
}

llmd() { CGO_ENABLED=0 go_program llmd github.com/llm-d/llm-d-kv-cache; }

# aibrix's ZMQ client is libzmq by cgo; headers and library are unpacked, not installed
aibrix() {
    local lib
    command -v gcc pkg-config >/dev/null || return $unavailable
    mkdir -p "$home/libzmq"
    (
        cd "$home/libzmq"
        if [[ ! -e usr/include/zmq.h ]]; then
            sandbox=()
            # apt's sandbox user could not write to this directory
            if [[ $(id -u) == 0 ]]; then apt-get update -qq && sandbox=(-o APT::Sandbox::User=root); fi
            apt-get "${sandbox[@]}" download -qq libzmq3-dev libzmq5 libpgm-5.3-0 libnorm1 libsodium23 || exit $unavailable
            for package in *.deb; do dpkg-deb -x "$package" .; done
        fi
    ) || return $unavailable
    lib=$(dirname "$(find "$home/libzmq" -name libzmq.so)")
    printf 'Name: libzmq\nDescription: libzmq\nVersion: 4.3\nLibs: -L%s -lzmq\nCflags: -I%s\n' \
        "$lib" "$home/libzmq/usr/include" >"$home/libzmq/libzmq.pc"
    # an old-style rpath also finds the libraries that libzmq needs
    PKG_CONFIG_LIBDIR="$home/libzmq" CGO_LDFLAGS_ALLOW='-Wl,.*' \
        CGO_LDFLAGS="-Wl,--disable-new-dtags -Wl,-rpath,$lib -Wl,-rpath-link,$lib" go_program aibrix github.com/vllm-project/aibrix -tags zmq
}

python_router() { # $1: name of the router, whose packages are pinned with hashes
    local venv=$home/$1 lock=.ci/$1.lock
    local -a wanted=(--require-hashes -r "$lock")
    if [[ -n ${NEWEST:-} ]]; then mapfile -t wanted < <(sed -n 's/^\([A-Za-z0-9._-]*\)==.*/\1/p' "$lock"); fi
    if [[ ${NEWEST:-} == pre ]]; then wanted+=(--pre); fi
    if [[ ! -f $venv/.installed || $lock -nt $venv/.installed ]]; then
        "${PYTHON:-python3}" -m venv "$venv" &&
            "$venv/bin/python" -m pip install --quiet --only-binary :all: "${wanted[@]}" &&
            touch "$venv/.installed" || return $unavailable
    fi
}

result=0
if (($# == 0)); then set -- llmd aibrix vllm-router smg; fi
for name; do
    status=0
    case $name in
    llmd | aibrix) $name || status=$? ;;
    *) python_router "$name" || status=$? ;;
    esac
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
