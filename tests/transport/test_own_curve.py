"""Keys for endpoints of kvbus's own ZMTP: where libsodium is installed, and where it is not."""

import subprocess
import sys

import pytest

from kvbus.transport import own_curve
from kvbus.transport.curve import Curve, KeyFileError, generate
from kvbus.transport.own_curve import Keys, serves
from kvbus.transport.sockets import PLAIN, PeerPolicy

PAIR = generate()
WITH_KEYS = PeerPolicy(curve=Curve(*PAIR))


@pytest.fixture
def fresh():
    """What is installed is looked up anew, before and after."""
    own_curve.installed.cache_clear()
    yield
    own_curve.installed.cache_clear()


def test_own_zmtp_serves_keys_where_libsodium_is_installed(fresh):
    assert serves(PLAIN)
    assert serves(WITH_KEYS)


@pytest.mark.parametrize("missing", ["kvbus.transport.zmtp.curve", "kvbus.transport.zmtp.sealing"])
def test_without_libsodium_it_serves_what_has_no_keys(fresh, monkeypatch, missing):
    monkeypatch.delitem(sys.modules, "kvbus.transport.zmtp.curve", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    assert serves(PLAIN)
    assert not serves(WITH_KEYS)


def test_an_endpoint_without_keys_has_no_mechanism():
    keys = Keys(None, bind=True)
    assert keys.mechanism is None
    keys.allow(frozenset(), [])


def test_who_dials_needs_the_key_of_the_peer():
    assert Keys(Curve(*PAIR, server=generate()[0]), bind=False).mechanism is not None
    with pytest.raises(KeyFileError, match="public key is missing"):
        Keys(Curve(*PAIR), bind=False)


def test_kvbus_runs_without_libsodium():
    code = (
        "import sys; sys.modules['nacl'] = None\n"
        "import kvbus.daemon.daemon, kvbus.outputs.zmq.driver\n"
        "from kvbus.transport import own_curve\n"
        "assert not own_curve.installed()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
