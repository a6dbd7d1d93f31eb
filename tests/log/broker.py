"""Run a Kafka broker, from Kafka's published jars, in its own directory. `.ci/kafka.sh` downloads the jars."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.log.server import Server
from tests.ports import free_ports
from tests.security.certificates import Authority

HOME_ENV = "TEST_KAFKA_HOME"
MISSING = f"{HOME_ENV} names no jars of Kafka: .ci/kafka.sh DIR fetches them (Java 17, Maven); .ci/run does both"
PATIENCE = 240.0
"""Maximum duration of a start on a busy machine, in seconds. An idle machine needs four seconds."""

SETTINGS = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller},\
 SCRAM://0.0.0.0:{scram},MUTUAL://127.0.0.1:{mutual},EXPIRED://127.0.0.1:{expired}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},SCRAM://127.0.0.1:{scram},MUTUAL://127.0.0.1:{mutual},\
 EXPIRED://127.0.0.1:{expired}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SCRAM:SASL_SSL,MUTUAL:SSL,EXPIRED:SSL
controller.listener.names=CONTROLLER
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
ssl.keystore.type=PEM
ssl.keystore.location={directory}/broker.pem
ssl.truststore.type=PEM
ssl.truststore.location={directory}/authority.crt
sasl.enabled.mechanisms=SCRAM-SHA-512
listener.name.scram.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.scram.scram-sha-512.connections.max.reauth.ms=2000
listener.name.mutual.ssl.client.auth=required
listener.name.expired.ssl.keystore.location={directory}/expired.pem
log.dirs={directory}/data
num.partitions=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
group.initial.rebalance.delay.ms=0
log.retention.check.interval.ms=200
log.segment.delete.delay.ms=0
log.initial.task.delay.ms=200
auto.create.topics.enable=false
num.network.threads=1
num.io.threads=2
background.threads=2
log.cleaner.backoff.ms=200
initial.broker.registration.timeout.ms=600000
log.cleaner.dedupe.buffer.size=2097152
"""


def java(*words: str) -> tuple[str, ...]:
    """Return the command line of one of Kafka's Java programs, with small memory limits."""
    small = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
    return ("java", *small, "-cp", f"{os.environ[HOME_ENV]}/jars/*", *words)


def format_storage(settings: Path) -> None:
    """Write the files that a broker needs in its data directory."""
    cluster = "--cluster-id=kvbusAAAAAAAAAAAAAAAAA"
    tool = java("kafka.tools.StorageTool", "format", cluster, "-c", str(settings))
    done = subprocess.run(tool, check=False, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


class Broker(Server):
    """A Kafka broker. A client without TLS may do everything.

    A client with SCRAM or a certificate may do what ACLs allow.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        port, controller, *self._tls_ports = free_ports(5)
        ports = dict(zip(("scram", "mutual", "expired"), self._tls_ports, strict=True))
        self.authority = Authority(directory)
        for name, days in (("broker", 1), ("expired", -1)):
            issued = self.authority.issue(name, days=days)
            (directory / f"{name}.pem").write_text(issued.key.read_text() + issued.certificate.read_text())
        self._settings = settings = directory / "server.properties"
        settings.write_text(SETTINGS.format(port=port, controller=controller, directory=directory, **ports))
        format_storage(settings)
        super().__init__(directory, port, java("kafka.Kafka", str(settings)), patience=PATIENCE)

    def lose(self) -> None:
        """Delete the data of the stopped broker, so that its log is lost."""
        shutil.rmtree(self._directory / "data")
        format_storage(self._settings)

    @property
    def tls_ports(self) -> tuple[int, int, int]:
        """The ports for SCRAM, for client certificates, and with an expired server certificate."""
        scram, mutual, expired = self._tls_ports
        return scram, mutual, expired
