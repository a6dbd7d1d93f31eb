#!/usr/bin/env bash
# Look up every pinned dependency in the advisory databases.
#
#   .ci/audit.sh DIR       DIR has pip-audit's own environment, which is made if it is missing
#
# Exit code 0: no advisory is known; 1: there are advisories, which are printed; 69: no advisory service can be reached.
set -Eeuo pipefail
unavailable=69
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$1
report=$(mktemp)
trap 'rm -f "$report"' EXIT

locked_venv "$venv" .ci/audit.lock || exit $unavailable

for service in pypi osv; do
    rm -f "$report"
    # pip-audit exits with 1 both for advisories and without an answer, so only the report counts
    timeout 60 "$venv/bin/python" -m pip_audit -s "$service" --timeout 10 --progress-spinner off -f json \
        --require-hashes --disable-pip -r requirements.lock -o "$report" >/dev/null 2>&1 || true
    [[ -s $report ]] || continue
    status=0
    "$venv/bin/python" - "$report" "$service" <<'PYTHON' || status=$?
import json
import sys

with open(sys.argv[1]) as file:
    found = json.load(file)["dependencies"]
bad = [(each, advisory) for each in found for advisory in each.get("vulns", ())]
unknown = [each["name"] for each in found if "skip_reason" in each]
for each, advisory in bad:
    fixed = ", ".join(advisory["fix_versions"]) or "no version yet"
    print(f"{each['name']} {each['version']}: {advisory['id']}, fixed in {fixed}")
print(f"{len(found)} packages, {len(unknown)} of them unknown to {sys.argv[2]}: {len(bad)} advisories")
# an index that does not know all packages is not an advisory service
sys.exit(1 if bad else 69 if unknown or not found else 0)
PYTHON
    [[ $status == "$unavailable" ]] || exit "$status"
done
exit $unavailable
