"""Tests for the core's description of a source.

Its fields have the names and defaults of the configuration, and the names of its states are public.
"""

from kvbus.config import Config, SourceConfig
from kvbus.config.limits import Limits
from kvbus.config.load import load
from kvbus.core.sequencing.phases import State
from kvbus.core.source_spec import SourceSpec
from kvbus.daemon.build import source_spec


def configured(**overrides):
    config = load(None, env={}, overrides={"sources": [{}], "outputs": [{}], **overrides})
    (stream,) = config.streams()
    return source_spec(config, stream)


def test_the_defaults_of_a_source_spec_are_those_of_the_configuration():
    assert SourceSpec("engine") == configured()


def test_each_field_of_a_source_spec_has_the_name_of_its_key():
    keys = Config.model_fields | Limits.model_fields | SourceConfig.model_fields
    made_by_kvbus = {"label", "rank", "shared", "numbered", "copied_below", "replay", "snapshot"}
    constant = {"replay_total_timeout", "reorder_grace"}
    of_the_client = {"compacted", "from_now", "attempts", "snapshot_timeout", "backfill_pause", "late_copies"}
    assert {*SourceSpec.__struct_fields__} - keys.keys() == made_by_kvbus | constant | of_the_client


def test_each_field_has_the_value_of_its_configuration_key():
    assert configured(
        sources=[{"replay_endpoint": "tcp://127.0.0.1:1", "snapshot_endpoint": "tcp://127.0.0.1:2"}],
        replay_timeout=3.0,
        probe_interval=4.0,
        reorder_batches=5,
        limits={"max_held_bytes": 6_000_000},
        on_lost="keep",
    ) == SourceSpec(
        "engine",
        replay=True,
        snapshot=True,
        replay_timeout=3.0,
        probe_interval=4.0,
        reorder_batches=5,
        max_held_bytes=6_000_000,
        on_lost="keep",
    )


def test_the_names_of_the_source_states_do_not_change():
    """``/sources`` shows the states, and ``kvbus_source_state`` has them as labels, so renaming a state breaks
    dashboards.
    """
    assert [*State] == ["connecting", "syncing", "live", "gap", "lost", "conflict"]


def test_a_source_with_a_replay_or_snapshot_endpoint_gets_requests():
    assert SourceSpec(replay=True, snapshot=False).requests_replay
    assert SourceSpec(replay=False, snapshot=True).requests_replay
    assert not SourceSpec(replay=False, snapshot=False).requests_replay
