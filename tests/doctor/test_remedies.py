"""Tests that doctor has a configuration key and a remedy for each reason for which a log's server refuses kvbus."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvbus.parts.log import kafka_client, nats_client, redis_client
from kvbus.tools.doctor.outputs import REMEDIES, finding_key

LOG = Path(kafka_client.__file__).parent
RAISED = re.compile(r'UnavailableError\([^()]*(?:\([^()]*\))?[^()]*, "([a-z_]+)"\)')


def reasons_of_tables() -> set[str]:
    tables = (kafka_client.DENIED, nats_client.CODES, nats_client.SAYS, redis_client.CODES)
    return {reason for table in tables for reason, _ in table.values()}


def raised_reasons() -> set[str]:
    return {reason for path in LOG.glob("*.py") for reason in RAISED.findall(path.read_text())}


def test_doctor_has_a_remedy_for_each_reason_of_a_log_server():
    assert {"data_lost", "primary_unknown", "key_file"} <= raised_reasons()
    assert (reasons_of_tables() | raised_reasons()) - REMEDIES.keys() == set()


@pytest.mark.parametrize("kind", ["kafka", "nats", "redis"])
def test_doctor_names_a_key_of_the_output_or_its_section(kind):
    assert {finding_key(kind, reason).partition(".")[0] for reason in REMEDIES} <= {kind, "endpoint"}
