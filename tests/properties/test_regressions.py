"""Tests that repeat failed runs of the random worlds, as the soak program printed them.

Some were shortened by hand for readability.
"""

from __future__ import annotations

from tests.properties.world import Setup, World


def test_an_old_snapshot_is_not_requested_for_ever() -> None:
    """If an engine behind a proxy restarts and its snapshot does not fill a gap, kvbus soon stops requesting it.

    An earlier version requested the snapshot again and again.
    """
    world = World(Setup(engines=("snapshot",), buffer_steps=3))
    world.connect(0)
    world.publish(0, [("remove", 1, "GPU")], 5)
    world.live_batch(0, 0, "lost")
    world.answer(0, 1)
    world.restart_behind_a_proxy(0)
    world.quiescence()


def test_an_engine_that_answered_no_probe_has_to_prove_its_epoch_later() -> None:
    """With ``on_lost: keep``, kvbus got no answer after a reconnection, and continued the old epoch.

    But the engine had begun a new epoch, in which it had no block and published no batch. kvbus must still notice this
    epoch.
    """
    world = World(Setup(on_lost="keep"))
    world.publish(0, [("chain", 5, "GPU")], 4)
    world.connect(0)
    world.answer(0, 11)
    world.restart_engine(0)
    world.connect(0)
    world.time_passes(3.0)
    world.answers_are_lost(0)
    world.quiescence()


def test_a_source_whose_cpu_blocks_were_refused_stays_partial_after_a_gpu_clear() -> None:
    world = World(Setup(max_blocks=5))
    world.publish(0, [("chain", 2, "GPU"), ("chain", 3, "GPU")], 2)
    world.publish(0, [("chain", 7, "CPU"), ("chain", 4, "GPU")], 3)
    world.publish(0, [("clear",), ("chain", 2, "CPU")], 3)
    world.quiescence()
    assert world.relay.sources[0].partial


def test_the_index_holds_max_blocks_after_a_skipped_seq() -> None:
    world = World(Setup(max_blocks=5, bytes_hashes=True, buffer_steps=10))
    world.publish(0, [("chain", 5, "GPU"), ("store", 4, "GPU"), ("remove", 5, "GPU")], 4)
    world.skip_a_number(0)
    world.publish(0, [("chain", 6, "GPU"), ("remove", 5, "GPU")], 2)
    world.publish(0, [("store", 5, "GPU"), ("chain", 4, "GPU"), ("remove", 1, "GPU")], 3)
    world.quiescence()
    world.publish(0, [("store", 5, "GPU")], 5)
    world.quiescence()


def test_trimmed_batches_before_waiting_live_batches_do_not_count_as_missing() -> None:
    """When kvbus connects, batches that the engine's replay buffer has already dropped do not count as lost.

    An older version of kvbus counted them if the oldest batch of the replay buffer had also arrived live.
    """
    world = World(Setup(buffer_steps=3))
    world.publish(0, [("chain", 3, "GPU")], 7)
    world.connect(0)
    world.publish(0, [("chain", 2, "GPU")], 3)
    world.all_live_batches(0)
    world.quiescence()
    assert world.relay.sources[0].stats.missing == 0


def test_a_restart_whose_batches_fill_a_gap_of_the_old_epoch_is_noticed() -> None:
    """kvbus must notice a restart even if the new epoch passes the last seq of the old epoch before kvbus notices it.

    The engine is behind a proxy, so the restart does not break the connection.
    """
    world = World(Setup())
    world.publish(0, [("chain", 3, "GPU")], 5)
    world.connect(0)
    world.answer(0, 20)
    world.restart_behind_a_proxy(0)
    world.publish(0, [("chain", 2, "GPU")], 7)
    for _ in range(6):
        world.live_batch(0, 0, "lost")
    world.quiescence()
    assert world.relay.sources[0].stats.restarts == 1


def test_a_restart_whose_batch_has_the_next_expected_seq_is_noticed() -> None:
    """The last batch that kvbus delivered is from a new epoch, but kvbus took it for the next batch of the old epoch.

    kvbus must notice this by a replay that begins before that batch. If the replay began with it, kvbus would compare
    the batch with itself.
    """
    world = World(Setup())
    world.publish(0, [("chain", 3, "GPU")], 5)
    world.connect(0)
    world.answer(0, 20)
    world.restart_behind_a_proxy(0)
    world.publish(0, [("chain", 2, "GPU")], 6)
    for _ in range(5):
        world.live_batch(0, 0, "lost")
    world.live_batch(0, 0, "once")
    world.quiescence()
    assert world.relay.sources[0].stats.restarts == 1


def test_a_foreign_batch_with_the_next_expected_seq_is_corrected() -> None:
    world = World(Setup())
    world.publish(0, [("chain", 3, "GPU")], 5)
    world.connect(0)
    world.answer(0, 20)
    world.stranger(0, 5, 7)
    world.quiescence()
    assert world.relay.sources[0].stats.restarts == 1


def test_a_restart_after_a_snapshot_without_delivered_batches_is_noticed() -> None:
    world = World(Setup(engines=("snapshot",)))
    world.publish(0, [("store", 7, "GPU"), ("chain", 5, "GPU")], 2)
    world.quiescence()
    world.restart_behind_a_proxy(0)
    world.quiescence()
    assert world.relay.sources[0].stats.restarts == 1


def test_a_late_batch_of_the_old_epoch_in_a_new_gap_is_corrected() -> None:
    """A late batch of the old epoch must not stay in the new epoch as if it were one of its batches.

    The engine restarted, and sent no batch 2 in the new epoch. So kvbus first accepts batch 2 of the old epoch, which
    arrives late, as the missing batch. It must notice the error and become exact.
    """
    world = World(Setup(on_lost="keep"))
    world.connect(0)
    world.publish(0, [("chain", 6, "GPU"), ("store", 2, "CPU")], 4)
    world.restart_behind_a_proxy(0)
    world.publish(0, [("store", 2, "GPU"), ("chain", 6, "GPU")], 2)
    world.live_batch(0, 0, "once")
    world.skip_a_number(0)
    world.live_batch(0, 2, "once")
    world.publish(0, [("remove", 2, "CPU"), ("chain", 3, "GPU"), ("clear",)], 3)
    world.quiescence()


def test_a_restart_after_a_snapshot_with_batch_0_is_counted_once() -> None:
    world = World(Setup(engines=("snapshot",)))
    world.publish(0, [("store", 2, "GPU"), ("chain", 5, "CPU")], 1)
    world.quiescence()
    world.restart_engine(0)
    world.publish(0, [("remove", 5, "CPU")], 2)
    world.quiescence()
    assert world.relay.sources[0].stats.restarts == 1


def test_a_batch_with_only_removals_has_folded_hashes_for_dynamo() -> None:
    """For Dynamo, kvbus must send byte hashes as integers, also in a batch that it otherwise relays unchanged."""
    world = World(Setup(outputs=("dynamo",), bytes_hashes=True))
    world.publish(0, [("chain", 6, "CPU")], 2)
    world.publish(0, [("remove", 1, "CPU")], 2)
    world.quiescence()


def test_an_orphan_of_a_refused_parent_keeps_its_source_partial() -> None:
    """A child on the CPU was dropped, because the full index had refused its parent on the GPU.

    The source must stay partial after a clear of the GPU, because the child is still missing on the CPU.
    """
    world = World(Setup(orphans="drop", duplicates="ignore", max_blocks=5))
    world.publish(0, [("store", 5, "CPU"), ("store", 1, "GPU"), ("chain", 3, "GPU"), ("chain", 7, "CPU")], 4)
    world.publish(0, [("chain", 4, "GPU"), ("remove", 3, "GPU")], 1)
    world.publish(0, [("chain", 6, "GPU"), ("store", 3, "CPU"), ("remove", 7, "GPU"), ("store", 4, "CPU")], 4)
    world.publish(0, [("remove", 2, "CPU"), ("remove", 1, "CPU"), ("clear",)], 5)
    world.quiescence()


def test_a_clear_of_the_cpu_does_not_end_partial() -> None:
    """A clear of the CPU does not show that the engine's GPU is empty, so the source stays partial.

    The clear was the first event that kvbus got from an engine without a replay. The engine still had a block on the
    GPU, which kvbus did not know.
    """
    world = World(Setup(engines=("deaf",)))
    world.publish(0, [("store", 7, "GPU")], 1)
    world.connect(0)
    world.publish(0, [("clear", None, "CPU")], 2)
    world.quiescence()
    assert world.relay.sources[0].partial


def test_a_removed_block_with_copies_leaves_room_in_the_index() -> None:
    """One removal deleted a block with copies.

    Then a copy and a new block were stored, and kvbus wrongly refused the new block because of a full index.
    """
    world = World(Setup(max_blocks=5, block_size=2, duplicates="ignore"))
    world.publish(0, [("chain", 2, "GPU"), ("remove", 2, "GPU"), ("chain", 3, "GPU"), ("tail", 2, "GPU")], 1)
    world.publish(0, [("store", 6, "GPU"), ("store", 6, "GPU"), ("store", 2, "CPU")], 3)
    world.publish(0, [("remove", 6, "GPU"), ("chain", 3, "GPU"), ("store", 2, "GPU")], 1)
    world.quiescence()


def test_kvbus_is_exact_again_after_a_conflict_of_two_publishers() -> None:
    """A second publisher causes a conflict of limited duration. kvbus is exact again when only one publisher is
    left.
    """
    world = World(Setup())
    world.connect(0)
    source = world.relay.sources[0]
    for n in range(40):
        world.publish(0, [("chain", 3, "GPU")], 1)
        world.stranger(0, n, 7)
        world.all_live_batches(0)
        world.answer(0, 100)
        world.time_passes(0.1)
    assert source.state == "conflict"
    assert source.partial
    assert source.stats.rejected["conflict"] > 20
    assert source.stats.restarts == 5
    assert source.stats.replays < 30
    assert not any(router.blocks for router in world.routers.values())
    world.quiescence()
    assert source.state == "live"
    assert not source.partial
