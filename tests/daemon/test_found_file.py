"""Tests for the file in which kvbus keeps discovered engines over a restart.

The file may be damaged, and the discovery may find nothing after the restart.
"""

from __future__ import annotations

import pytest

from kvbus.daemon.found import FoundFile
from kvbus.parts.discovery.contract import Engine, Publisher
from kvbus.state.reservations import SeqReservations
from tests.daemon.test_found import config

ENGINES = {"workers": [Engine("pod", (Publisher(0, "tcp://a:1", "tcp://a:2"), Publisher(1, "tcp://a:3")), "here", "t")]}


def test_kept_engines_are_read_again():
    reservations = SeqReservations(None)
    FoundFile(reservations, config("workers")).keep(ENGINES)
    assert FoundFile(reservations, config("workers")).read() == ENGINES
    FoundFile(reservations, config("workers")).keep({})
    assert FoundFile(reservations, config("workers")).read() == {}


def test_no_engines_are_kept_without_discovery():
    reservations = SeqReservations(None)
    file = FoundFile(reservations, config(fixed=("a",)))
    file.keep(ENGINES)
    assert file.read() == {}
    assert reservations.kept("found") is None


@pytest.mark.parametrize("damage", [lambda content: content[:-3], lambda content: content.replace(b"e", b"\xad")])
def test_damaged_content_is_read_as_no_engines(caplog, damage):
    reservations = SeqReservations(None)
    FoundFile(reservations, config("workers")).keep(ENGINES)
    reservations.keep("found", damage(reservations.kept("found")))
    assert FoundFile(reservations, config("workers")).read() == {}
    assert "damaged" in caplog.text
