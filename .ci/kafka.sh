#!/usr/bin/env bash
# Download Kafka's released jars, for the broker that tests/log starts.
#
#   .ci/kafka.sh DIR    writes into DIR; TEST_KAFKA_HOME=DIR names it to the tests
#
# It needs Java 17 or newer and Maven. Exit code 69: they are not available here; 1: the jars differ from jars.sha256.
set -Eeuo pipefail
unavailable=69
mkdir -p "$1"
jars=$(cd "$1" && pwd)/jars
cd "$(dirname "${BASH_SOURCE[0]}")/../tests/log/kafka"

same_jars() { # exactly the jars of jars.sha256
    (cd "$jars" && sha256sum -- *.jar) | diff jars.sha256 -
}

command -v java mvn >/dev/null || exit $unavailable
java --version
if ! same_jars &>/dev/null; then
    rm -rf "$jars"
    mvn --batch-mode --quiet --strict-checksums dependency:copy-dependencies "-DoutputDirectory=$jars" || exit $unavailable
    same_jars || exit 1
fi
