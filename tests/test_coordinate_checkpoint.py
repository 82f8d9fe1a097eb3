"""Checkpoints of stage 2 on disk, by Orbax and by Grain's handler for it."""

import grain
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1

from tests.coordination_helpers import coordinated, layout_of

NEEDS = [1, 2, 3, 9, 5, 6, 7]


def pipeline():
    return coordinated(layout_of(1), NEEDS, window=3)


def rest(iterator):
    return [
        (int(e["index"][0]), e["sparsecore"].limits["t0"].max_ids_per_partition)
        for e in iterator
    ]


def advanced(count):
    iterator = iter(pipeline())
    for _ in range(count):
        next(iterator)
    return iterator


def test_grains_own_handler(tmp_path):
    iterator = advanced(4)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(4, args=grain.checkpoint.CheckpointSave(iterator))
        manager.wait_until_finished()
        restored = iter(pipeline())
        manager.restore(4, args=grain.checkpoint.CheckpointRestore(restored))
    assert rest(restored) == rest(iterator) == [(4, 9), (5, 9), (6, 9)]


def test_orbax_saves_the_iterator_itself(tmp_path):
    iterator = advanced(4)
    ocp_v1.save_checkpointables(tmp_path / "step", {"data": iterator})
    restored = iter(pipeline())
    ocp_v1.load_checkpointables(tmp_path / "step", {"data": restored})
    assert rest(restored) == rest(iterator) == [(4, 9), (5, 9), (6, 9)]
