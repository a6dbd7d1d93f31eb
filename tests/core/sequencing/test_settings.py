"""A sequencer's settings are the configuration's; its states are public names."""

from kvbus.config.load import load
from kvbus.core.sequencing.settings import Settings, State
from kvbus.daemon.build import source_spec


def configured(**overrides):
    config = load(None, env={}, overrides={"sources": [{}], "outputs": [{}], **overrides})
    (stream,) = config.streams()
    return source_spec(config, stream).settings


def test_the_defaults_are_those_of_the_configuration():
    assert Settings(replay=configured().replay) == configured()


def test_each_comes_from_its_key():
    assert configured(
        sources=[{"replay_endpoint": "tcp://127.0.0.1:1", "snapshot_endpoint": "tcp://127.0.0.1:2"}],
        replay_timeout=3.0,
        probe_interval=4.0,
        reorder_batches=5,
        limits={"max_held_bytes": 6_000_000},
        on_lost="keep",
    ) == Settings(
        replay=True,
        snapshot=True,
        replay_timeout=3.0,
        probe_interval=4.0,
        reorder_batches=5,
        reorder_bytes=6_000_000,
        trust_unverified=True,
    )


def test_the_states_are_public():
    """``/sources`` shows them, and ``kvbus_source_state`` has them as labels: renaming one breaks dashboards."""
    assert [*State] == ["connecting", "syncing", "live", "gap", "lost", "conflict"]


def test_somebody_can_be_asked():
    assert Settings(replay=True, snapshot=False).asks
    assert Settings(replay=False, snapshot=True).asks
    assert not Settings(replay=False, snapshot=False).asks
