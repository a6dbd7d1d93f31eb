#!/usr/bin/env bash
# Run the demo in the environment of `make setup` if it is up to date, else in an environment of its own, with only the
# run-time dependencies of kvbus.
#
#   .ci/demo.sh .venv/demo [arguments of kvbus demo]
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3} venv=$1 locks=(requirements-runtime.lock requirements-build.lock)
shift

install() { # each step returns its own failure, because the shell's -e has no effect before ||
    local all done=0
    all=$(cat "${locks[@]}" | grep -c '^[a-z].*==')
    echo "setting up $venv (once): $all packages"
    "$python" -m venv --clear "$venv" || return
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-compile --require-hashes "${locks[@]/#/-r}" |
        while read -r what name _; do
            if [[ $what == Collecting ]]; then
                done=$((done + 1))
                if [[ -t 1 ]]; then printf '\r\033[K  %d of %d  %s' "$done" "$all" "$name"; fi
            elif [[ $what == Installing ]]; then
                if [[ -t 1 ]]; then printf '\r\033[K  unpacking'; fi
            fi
        done || return
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . || return
    if [[ -t 1 ]]; then printf '\r\033[K'; fi
    cat "${locks[@]}" pyproject.toml >"$venv/.installed" # written last, so that an interrupted installation starts again
}

main() {
    local errors status=0 stopped=
    errors=$(mktemp)
    trap 'rm -f "$errors"' EXIT
    # hide Python's message about a Ctrl-C in its first milliseconds, and show everything else on failure
    trap 'if [[ -t 1 ]]; then echo; fi; exit 130' INT TERM
    if [[ ${venv%/*}/.installed -nt requirements.lock && ${venv%/*}/.installed -nt pyproject.toml ]]; then
        venv=${venv%/*}
    elif ! cat "${locks[@]}" pyproject.toml 2>/dev/null | cmp -s - "$venv/.installed"; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>>"$errors" ||
            { echo "kvbus needs Python 3.11 or newer: make demo PYTHON=python3.12" >&2; exit 1; }
        (install) 2>>"$errors" || { cat "$errors" >&2; exit 1; }
    fi
    trap 'stopped=130' INT TERM # the demo ends by itself and prints its result
    "$venv/bin/python" -m kvbus demo "$@" 2>>"$errors" || status=${stopped:-$?}
    if ((status != 0 && status != 130)); then cat "$errors" >&2; fi
    exit "$status"
}

# a process group of its own: a Ctrl-C then reaches the demo but not make, which would report an error
if [[ -t 0 ]]; then set -m 2>/dev/null; fi
(main "$@")
