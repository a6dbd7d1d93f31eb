"""Tests with a real Prometheus and real faults of kvbus and its peers: every expected alert fires, and no other."""

from __future__ import annotations

import subprocess

import pytest

from kvbus.core.source_spec import SourceSpec
from tests.monitoring.conftest import BusState
from tests.monitoring.faults import EXPECTED, OF_FINDINGS, SCRAPE, fired
from tests.monitoring.prometheus import alerts

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

STARVED = {"KvbusLoopLag": 0.02, "KvbusDown": SCRAPE}
"""Alerts that a lack of CPU can cause, each with the delay of this process's timers in seconds that explains the alert.

KvbusLoopLag fires at a delay of 0.1 s. Its limit here is lower, because another process on the same machine may wait
several times as long as this process.
"""


QUESTION = SourceSpec().replay_total_timeout
"""Maximum duration of a replay request, in seconds.

On a busy machine, the scene may last until the open request fails.
"""


def test_the_tests_cause_a_fault_for_every_alert() -> None:
    # The scene is shorter than half an hour on the faster clock. rules.test.yml tests this alert.
    assert {name for name, *_ in EXPECTED} == set(alerts()) - {"KvbusNote"}


def test_exactly_the_expected_alerts_fire(observed: BusState) -> None:
    others = fired(observed.server, observed.at) - EXPECTED
    others -= {alert for alert in others if alert[0] in OF_FINDINGS and alert[1] != "healthy"}
    # If this process also got no CPU for so long, such an alert is true for the other processes, and not an error.
    true = {name for name, seconds in STARVED.items() if observed.lag > seconds}
    late = {("KvbusReplayFailing", "stuck", "engine")} if observed.lasted > QUESTION - 1 else set()
    assert {alert for alert in others - late if alert[0] not in true} == set()
    assert fired(observed.server, observed.at) >= EXPECTED


def test_the_texts_of_fired_alerts_have_no_empty_template_values(observed: BusState) -> None:
    assert observed.alerts
    for alert in observed.alerts:
        for text in (alert["annotations"]["summary"], alert["annotations"]["description"]):
            assert "<" not in text, "a template's <no value> or <error>"
            assert "{{" not in text
        assert alert["labels"]["instance"] in alert["annotations"]["summary"]


def test_the_metrics_of_kvbus_follow_the_conventions_of_prometheus(observed: BusState, promtool: str) -> None:
    for name, text in observed.metrics.items():
        done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), name
