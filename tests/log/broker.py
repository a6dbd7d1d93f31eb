"""A Kafka of one node, from its published jars, in a directory of its own. `.ci/kafka.sh` fetches them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path

from tests.log.server import under_timeout
from tests.ports import free_ports
from tests.security.certificates import Authority

HOME_ENV = "TEST_KAFKA_HOME"
MISSING = f"{HOME_ENV} names no jars of Kafka: .ci/kafka.sh DIR fetches them (Java 17, Maven); .ci/run does both"
PATIENCE = 240.0
"""Seconds for a start on a busy machine; four where nothing else runs."""

MOST = 1200
"""Seconds after which a broker ends, whatever became of the tests."""

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


class Broker:
    """Runs from `start` to `stop`; the addresses stay over a restart.

    Whoever comes without TLS may do everything; who comes by SCRAM or with a certificate may do what ACLs say.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._said = directory / "said"
        self._process: subprocess.Popen[bytes] | None = None
        self._port, controller, *self._tls_ports = free_ports(5)
        ports = dict(zip(("scram", "mutual", "expired"), self._tls_ports, strict=True))
        settings = SETTINGS.format(port=self._port, controller=controller, directory=directory, **ports)
        self.authority = Authority(directory)
        for name, days in (("broker", 1), ("expired", -1)):
            issued = self.authority.issue(name, days=days)
            (directory / f"{name}.pem").write_text(issued.key.read_text() + issued.certificate.read_text())
        (directory / "server.properties").write_text(settings)
        cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        done = self._java(
            "kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "-c", str(directory / "server.properties")
        )
        assert done.wait(PATIENCE) == 0, self._said.read_text()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def tls_ports(self) -> tuple[int, int, int]:
        """For SCRAM, for certificates of clients, and with a certificate that has expired."""
        scram, mutual, expired = self._tls_ports
        return scram, mutual, expired

    @property
    def pid(self) -> int:
        """Of the broker itself."""
        assert self._process is not None
        return under_timeout(self._process)

    def _java(self, *args: str) -> subprocess.Popen[bytes]:
        jars = Path(os.environ[HOME_ENV]) / "jars"
        java = ("java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", f"{jars}/*")
        with self._said.open("ab") as said:
            return subprocess.Popen(
                ["timeout", "--signal=KILL", str(MOST), *java, *args],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                process_group=0,
            )

    def start(self) -> None:
        self._process = self._java("kafka.Kafka", str(self._directory / "server.properties"))
        until = time.monotonic() + PATIENCE
        while not self._answers():
            assert self._process.poll() is None, self._said.read_text()
            assert time.monotonic() < until, "the broker does not come up"
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=5).close()
        except OSError:
            return False
        return True

    def signal(self, number: int) -> None:
        """To the broker, and `timeout` around it."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def end(self) -> None:
        """As whoever replaces it does: with SIGTERM, and patience."""
        assert self._process is not None
        os.kill(self.pid, signal.SIGTERM)
        self._process.wait(PATIENCE)
        self._process = None

    def kill(self) -> None:
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            while self._answers():  # `timeout` is gone, the broker goes
                time.sleep(0.01)
            self._process = None
