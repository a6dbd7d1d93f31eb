"""Tests for CURVE keys of kvbus's own ZMTP endpoints, with libsodium installed and without it."""

import subprocess
import sys

import pytest

from kvbus.transport.curve import Curve, KeyFileError, generate
from kvbus.transport.zmtp_keys import Keys

PAIR = generate()


def test_an_endpoint_without_keys_has_no_mechanism():
    keys = Keys(None, bind=True)
    assert keys.mechanism is None
    keys.allow(frozenset(), [])


def test_a_connecting_endpoint_needs_the_public_key_of_its_peer():
    assert Keys(Curve(*PAIR, server=generate()[0]), bind=False).mechanism is not None
    with pytest.raises(KeyFileError, match="public key is missing"):
        Keys(Curve(*PAIR), bind=False)


def test_kvbus_runs_without_libsodium():
    code = (
        "import sys; sys.modules['nacl'] = None\n"
        "import kvbus.daemon.daemon, kvbus.parts.outputs.zmq\n"
        "from kvbus.transport.zmtp_keys import Keys\n"
        "assert Keys(None, bind=True).mechanism is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
