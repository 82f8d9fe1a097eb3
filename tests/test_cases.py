"""Cases of the field from the raw batch to entries, with values worked out by hand.

Every entry is (row of the partition, sample of its SparseCore, gain); partition p of N
has the ids that leave p when divided by N, and row ``id // N`` is theirs.
"""

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
import pytest

from grain_sparsecore.config import PipelineConfig, TopologyConfig
from grain_sparsecore.config.job import Config
from grain_sparsecore.errors import ConfigError, InputError
from grain_sparsecore.interop import to_jax_tpu_embedding
from grain_sparsecore.kernels import KERNEL_VARIABLE, KERNELS
from grain_sparsecore.partition import partition_counts, required_per_sc
from grain_sparsecore.pipeline import sparsecore_pipeline
from grain_sparsecore.pipeline.compute import ComputeInputStats
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import StackedLayout, make_layout
from tests.feature_forms import all_forms, layout_of

Entry = tuple[int, int, float]


@pytest.fixture(params=KERNELS, autouse=True, scope="module")
def kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KERNEL_VARIABLE, request.param)
        yield


def prepare(element: dict[str, Any], layout: StackedLayout):
    return ComputeInputStats(layout).map(element)["sparsecore"]


def entries(batch, layout: StackedLayout) -> list[list[list[Entry]]]:
    """Of the only stack: [SparseCore][partition], in the order of the buffer."""
    (pointers,) = batch.row_pointers
    per_core = len(batch.embedding_ids) // len(pointers)
    result = []
    for core, ends in enumerate(pointers[:, : layout.topology.num_partitions]):
        start = core * per_core
        result.append([])
        for end in (core * per_core + ends).tolist():
            result[-1].append(
                [
                    (int(row), int(sample), round(float(gain), 6))
                    for row, sample, gain in zip(
                        batch.embedding_ids[start:end],
                        batch.sample_ids[start:end],
                        batch.gains[start:end],
                        strict=True,
                    )
                ]
            )
            start += -(-(end - start) // 8) * 8
    return result


def needs(batch, layout: StackedLayout) -> tuple[list[int], list[int], list[int]]:
    """Most ids and distinct ids of a partition, and slots of each SparseCore."""
    ((count, unique),) = partition_counts(batch, layout)
    (required,) = required_per_sc(batch, layout)
    return count.max(axis=0).tolist(), unique.max(axis=0).tolist(), required.tolist()


def forms(rows: list[list[Any]], dtype: Any = np.int64) -> list[dict[str, Any]]:
    """The rows in every form, beside labels that settle the number of samples."""
    label = np.zeros(len(rows), np.float32)
    return [{"f": form, "label": label} for form in all_forms(rows, dtype).values()]


class TestEntries:
    def test_empty_rows_shift_nothing(self):
        layout = layout_of()
        for element in forms([[], [1], [], [2, 3]]):
            batch = prepare(element, layout)
            assert entries(batch, layout) == [
                [[], [(0, 1, 1.0)]],
                [[(1, 1, 1.0)], [(1, 1, 1.0)]],
            ]
            assert needs(batch, layout) == ([1, 1], [1, 1], [8, 16])

    def test_all_empty_rows_have_the_shapes_of_any_batch(self):
        layout = layout_of()
        full = prepare({"f": np.arange(4)}, layout)
        for element in forms([[], [], [], []]):
            batch = prepare(element, layout)
            assert needs(batch, layout) == ([0, 0], [0, 0], [0, 0])
            assert batch.stats.tolist() == [[0, 0, 0]]
            assert batch.row_pointers.shape == full.row_pointers.shape
            assert not batch.row_pointers.any()

    def test_repeated_ids_of_a_sample_are_one_entry_and_add_up(self):
        layout = layout_of(FeatureSpec(name="f", table="t", weights="w"), batch_size=2)
        element = {"f": [[1, 1, 2], [3]], "w": [[0.5, 0.25, 1], [1]]}
        batch = prepare(element, layout)
        assert entries(batch, layout) == [
            [[(1, 0, 1.0)], [(0, 0, 0.75)]],
            [[], [(1, 0, 1.0)]],
        ]
        assert needs(batch, layout) == ([1, 1], [1, 1], [16, 8])

    def test_equal_ids_on_both_sides_of_a_sparsecore_stay_two(self):
        layout = layout_of()
        for element in forms([[], [3], [3], []]):
            assert entries(prepare(element, layout), layout) == [
                [[], [(1, 1, 1.0)]],
                [[], [(1, 0, 1.0)]],
            ]

    def test_mean_counts_repeated_ids_as_often_as_they_come(self):
        layout = layout_of(batch_size=2, combiner="mean")
        for element in forms([[1, 1, 2], []]):
            assert entries(prepare(element, layout), layout)[0] == [
                [(1, 0, 0.333333)],
                [(0, 0, 0.666667)],
            ]

    @pytest.mark.parametrize(
        ("combiner", "gains"),
        [
            ("sum", (1.0, 3.0)),
            ("mean", (0.25, 0.75)),
            ("sqrtn", (0.316228, 0.948683)),  # 1 and 3 over the root of 1 + 9
        ],
    )
    @pytest.mark.parametrize("dtype", [np.int8, np.uint64, np.float32, np.float64])
    def test_combiners_weigh(self, combiner, gains, dtype):
        spec = FeatureSpec(name="f", table="t", weights="w")
        layout = layout_of(spec, combiner=combiner, batch_size=2)
        for weights in all_forms([[1, 3], []], dtype).values():
            element = {"f": [[2, 5], []], "w": weights}
            (first, _) = entries(prepare(element, layout), layout)
            assert first == [[(1, 0, gains[0])], [(2, 0, gains[1])]]

    def test_ids_are_counted_once_per_sample(self):
        layout = layout_of(batch_size=2)
        for element in forms([[0, 0, 0, 2, 4, 1], [1, 1, 1, 3, 3, 5, 5, 7, 7, 0]]):
            batch = prepare(element, layout)
            assert needs(batch, layout) == ([3, 4], [3, 4], [16, 16])
            first, second = entries(batch, layout)
            assert first[0] == [(0, 0, 3.0), (1, 0, 1.0), (2, 0, 1.0)]
            assert [gain for _, _, gain in second[1]] == [3.0, 2.0, 2.0, 2.0]

    @pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint64])
    def test_padding_counts_for_nothing(self, dtype):
        spec = FeatureSpec(name="f", table="t", padding_id=0)
        layout = layout_of(spec, combiner="mean", batch_size=2)
        for element in forms([[5, 0, 0], [0, 0, 0]], dtype):
            batch = prepare(element, layout)
            assert entries(batch, layout) == [[[], [(2, 0, 1.0)]], [[], []]]
            assert needs(batch, layout) == ([0, 1], [0, 1], [8, 0])

    @pytest.mark.parametrize("turned", [False, True])
    def test_features_of_a_shared_table_follow_their_names(self, turned):
        specs = [FeatureSpec(name=name, table="t") for name in "ba"]
        layout = layout_of(*(specs[::-1] if turned else specs))
        element = {
            "b": np.array([[1], [2], [3], [4]]),
            "a": np.array([[10], [12], [13], [15]]),
        }
        if turned:
            element = dict(reversed(element.items()))
        batch = prepare(element, layout)
        assert entries(batch, layout) == [
            [[(1, 3, 1.0), (5, 0, 1.0), (6, 1, 1.0)], [(0, 2, 1.0)]],
            [[(2, 3, 1.0)], [(1, 2, 1.0), (6, 0, 1.0), (7, 1, 1.0)]],
        ]
        assert needs(batch, layout)[0] == [3, 3]

    def test_weights_of_one_feature_of_two(self):
        layout = layout_of(
            FeatureSpec(name="a", table="t", weights="w"),
            FeatureSpec(name="b", table="t"),
            batch_size=2,
        )
        element = {"a": [[2], [4]], "b": [[6], []], "w": [[0.5], [2]]}
        assert entries(prepare(element, layout), layout) == [
            [[(1, 0, 0.5), (3, 1, 1.0)], []],
            [[(2, 0, 2.0)], []],
        ]
        with pytest.raises(InputError, match="missing keys: the batch lacks 'w'"):
            prepare({"a": [[2], [4]], "b": [[6], []]}, layout)


class TestSizes:
    @pytest.mark.parametrize(
        ("batch_size", "numbers"),
        [(3, "sizes: 2 and 4."), (1, "sizes: 2."), (0, "sizes: 2."), (-4, "sizes: 2.")],
    )
    def test_a_batch_divides_over_the_local_sparsecores(self, batch_size, numbers):
        with pytest.raises(ConfigError) as info:
            layout_of(batch_size=batch_size)
        text = str(info.value)
        assert f"batch_size={batch_size} (samples per host)" in text
        assert "1 local devices * 2 SparseCores = 2; the nearest legal" in text
        assert text.endswith(numbers)

    @pytest.mark.parametrize(
        ("devices", "cores", "text"),
        [
            (3, 2, "global_device_count=3 * num_sc_per_device=2 = 6 partitions"),
            (1, 3, "global_device_count=1 * num_sc_per_device=3 = 3 partitions"),
        ],
    )
    def test_partitions_are_a_power_of_two(self, devices, cores, text):
        with pytest.raises(ConfigError) as info:
            Topology(
                global_device_count=devices,
                local_device_count=1,
                num_sc_per_device=cores,
            )
        assert text in str(info.value)
        assert "is not a power of two; the nearest are " in str(info.value)

    def test_the_batch_size_is_that_of_a_host(self):
        # Two hosts of four samples, so that the global batch is eight.
        topology = Topology(
            global_device_count=2, local_device_count=1, num_sc_per_device=2
        )
        layout = layout_of(topology=topology)
        batch = prepare({"f": np.arange(4)}, layout)
        assert batch.num_valid_samples.tolist() == [4]
        with pytest.raises(InputError) as info:
            prepare({"f": np.arange(8)}, layout)
        assert "8 samples, but batch_size=4 per host" in str(info.value)

    @pytest.mark.parametrize(
        "value", [np.int64(5), np.array(5), 5, b"5", "5", None, np.zeros((2, 1, 1))]
    )
    def test_what_is_no_batch_of_rows_is_named(self, value):
        with pytest.raises(InputError, match=r"feature 'f' \(table 't'\), ids 'f'"):
            prepare({"f": value}, layout_of())

    @pytest.mark.parametrize(
        ("policy", "valid"), [("drop", [4, 4]), ("pad", [4, 4, 2])]
    )
    def test_ten_records_in_batches_of_four(self, policy, valid):
        config = Config(
            topology=TopologyConfig(
                num_sc_per_device=2, global_device_count=1, local_device_count=1
            ),
            tables=(TableSpec(name="t", vocabulary_size=64, embedding_dim=8),),
            features=(FeatureSpec(name="f", table="t"),),
            pipeline=PipelineConfig(batch_size=4, on_partial_batch=policy),
        )
        records = [{"f": np.array([i]), "label": np.float32(i)} for i in range(10)]
        batches = grain.MapDataset.source(records).batch(4)
        elements = list(sparsecore_pipeline(batches, config))
        buffers = [element["sparsecore"] for element in elements]
        assert [int(b.num_valid_samples.sum()) for b in buffers] == valid
        shapes = {tuple(b.embedding_ids["t"].shape) for b in buffers}
        assert len(shapes) == 1
        assert [element["label"].shape for element in elements] == [(4,)] * len(valid)
        last = np.sort(buffers[-1].embedding_ids["t"][buffers[-1].gains["t"] == 1])
        # Records 4 to 7, or 8 and 9; two partitions halve the ids.
        assert last.tolist() == ([2, 2, 3, 3] if policy == "drop" else [4, 4])

    def test_leading_and_flat_buffers_hold_the_same(self):
        topology = Topology(
            global_device_count=2, local_device_count=2, num_sc_per_device=2
        )
        layout = make_layout(
            [TableSpec(name="t", vocabulary_size=64, embedding_dim=8)],
            [FeatureSpec(name="f", table="t")],
            topology=topology,
            batch_size=8,
        )
        config = Config(
            topology=TopologyConfig(
                num_sc_per_device=2, global_device_count=2, local_device_count=2
            ),
            tables=[t.spec for t in layout.stacks[0].tables],
            features=[f.spec for f in layout.features],
            pipeline=PipelineConfig(batch_size=8),
        )
        source = grain.MapDataset.source([{"f": np.arange(8 * 3).reshape(8, 3)}])
        (element,) = sparsecore_pipeline(source, config, layout=layout)
        flat = to_jax_tpu_embedding(element["sparsecore"])
        leading = to_jax_tpu_embedding(
            element["sparsecore"], has_leading_dimension=True
        )
        assert flat.num_minibatches.shape == (2,)
        assert leading.num_minibatches.shape == (2, 1)
        for name in ("lhs_row_pointers", "lhs_embedding_ids", "lhs_sample_ids"):
            one = getattr(flat.sparse_dense_matmul_input, name)["t"]
            two = getattr(leading.sparse_dense_matmul_input, name)["t"]
            assert (one.ndim, two.ndim) == (1, 2)
            assert len(two) == 2
            np.testing.assert_array_equal(one, np.asarray(two).ravel())
