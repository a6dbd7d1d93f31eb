#!/bin/sh
# kvbus as a service of this machine, with a simulated engine until yours takes its place. From a checkout, as root:
#
#   deploy/systemd/install.sh
#
# ENGINE and ROUTER are what `kvbus init` takes (vllm and dynamo). Where a configuration exists, this is an upgrade: it keeps
# the configuration, restarts kvbus and leaves the simulated engine as it is. ROOT is a directory in place of /, for a look
# without a service manager.
set -eu
cd "$(dirname "$0")/../.."
root=${ROOT:-}
"${PYTHON:-python3}" -m venv "$root/opt/kvbus"
pip() { "$root/opt/kvbus/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
pip --require-hashes -r requirements-runtime.lock -r requirements-build.lock
pip --no-deps --no-build-isolation .
install -d "$root/etc/kvbus" "$root/etc/systemd/system"
config=$root/etc/kvbus/kvbus.yaml
units=kvbus
if [ ! -e "$config" ]; then
    "$root/opt/kvbus/bin/kvbus" init --engine "${ENGINE:-vllm}" --router "${ROUTER:-dynamo}" -o "$config"
    units="kvbus-sim kvbus"
fi
install -m 0644 deploy/systemd/kvbus.service deploy/systemd/kvbus-sim.service "$root/etc/systemd/system"
if [ -z "$root" ]; then
    systemctl daemon-reload
    # shellcheck disable=SC2086 # one word for each unit
    systemctl enable $units
    # shellcheck disable=SC2086
    systemctl restart $units
fi
cat <<'NEXT'
The page: http://127.0.0.1:9477/
Your own engine: systemctl disable --now kvbus-sim, then start the engine as /etc/kvbus/kvbus.yaml says.
Prometheus: deploy/prometheus has its configuration and the rules, for /etc/prometheus.
NEXT
