#!/usr/bin/env bash
# Fetch Kafka's published jars, for the broker that tests/log starts.
#
#   .ci/kafka.sh DIR    into DIR; TEST_KAFKA_HOME=DIR names it to the tests
#
# It takes Java 17 or newer and Maven. Exit code 69: they cannot be had here; 1: the jars are not those of jars.sha256.
set -Eeuo pipefail
unavailable=69
mkdir -p "$1"
jars=$(cd "$1" && pwd)/jars
cd "$(dirname "${BASH_SOURCE[0]}")/../tests/log/kafka"

same_jars() { # those of jars.sha256, and no others
    (cd "$jars" && sha256sum -- *.jar) | diff jars.sha256 -
}

command -v java mvn >/dev/null || exit $unavailable
java --version
if ! same_jars &>/dev/null; then
    rm -rf "$jars"
    mvn --batch-mode --quiet --strict-checksums dependency:copy-dependencies "-DoutputDirectory=$jars" || exit $unavailable
    same_jars || exit 1
fi
