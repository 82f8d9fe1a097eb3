import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_sparsecore.features import read_features
from grain_sparsecore.features.zero_rows import settle_zero_rows
from grain_sparsecore.kernels import load_kernel, runnable_kernels
from grain_sparsecore.partition import partition_batch
from grain_sparsecore.specs import FeatureSpec, Topology
from tests.feature_forms import layout_of, read
from tests.reference import row_gains


class TestZeroTotals:
    @pytest.mark.parametrize(
        ("combiner", "row", "zero"),
        [
            ("mean", [0.0, 0.0], True),
            ("mean", [1.0, -1.0], True),
            ("mean", [-0.0], True),
            ("mean", [0.0, 1e-45], False),
            ("mean", [1e-45], False),
            ("mean", [1.0, 1e-10, -1.0], True),  # 1 + 1e-10 is 1 in float32
            ("mean", [1.0, *[2.0**-24] * 9, -1.0], True),  # each a tie, to even
            ("mean", [1.0, -1.0, 1e-10], False),
            ("mean", [3e38, 3e38, -3e38], True),  # the running sum stays infinite
            ("mean", [3e38, -3e38, 3e38], False),
            ("mean", [3e38, -3e38, 1e-45], True),  # 3e38 / 1e-45 overflows
            ("mean", [1.0, -1.0, 1e-45], True),
            ("mean", [3e38], False),
            ("sqrtn", [2e19], True),  # its square overflows
            ("sqrtn", [-2e19], True),
            ("sqrtn", [1.8e19], False),
            ("sqrtn", [1.5e19] * 2, True),
            ("sqrtn", [1.0, -1.0], False),
            ("sqrtn", [0.0], True),
            ("sqrtn", [2.0**-75] * 9, True),  # its square vanishes in float32
            ("sqrtn", [-(2.0**-75)], True),
            ("sqrtn", [np.nextafter(np.float32(2.0**-75), np.float32(1))], False),
            ("sum", [0.0], False),
            ("sum", [1.0, -1.0], False),
        ],
    )
    def test_rows_that_would_divide_by_zero_are_counted(self, combiner, row, zero):
        ids = [list(range(len(row))), [1], []]
        reading = read(ids, [row, [1.0], []], combiner=combiner)
        assert reading.counts["zero_weight_rows"] == int(zero)

    @pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
    def test_their_gain_is_zero(self, combiner):
        layout = layout_of(
            FeatureSpec(name="f", table="t", weights="w"), combiner=combiner
        )
        batch = {"f": [[1, 2], [3], [], [4]], "w": [[0, 0], [2.0], [], [0]]}
        features, counters, samples = read_features(batch, layout)
        partitioned = partition_batch(
            features, layout, counters=counters, num_samples=samples
        )
        real = partitioned.sample_ids < 4
        assert sorted(partitioned.gains[real].tolist()) == [0, 0, 0, 1]

    def test_samples_without_ids_are_not_counted(self):
        assert (
            read([[], [], []], [[], [], []], combiner="mean").counts["zero_weight_rows"]
            == 0
        )

    @given(
        st.lists(
            st.lists(
                st.sampled_from(
                    [
                        0.0,
                        1.0,
                        -1.0,
                        0.1,
                        -0.1,
                        1e-8,
                        2.0**24,
                        1e-45,
                        3e38,
                        -3e38,
                        2e19,
                        1e12,
                    ]
                ),
                max_size=6,
            ),
            max_size=8,
        ),
        st.sampled_from(["mean", "sqrtn"]),
    )
    @settings(max_examples=200)
    def test_the_count_equals_a_running_sum(self, rows, combiner):
        count = 0
        for row in rows:
            total = np.float32(0)
            with np.errstate(over="ignore", invalid="ignore"):
                for weight in map(np.float32, row):
                    if combiner == "mean":
                        total = np.float32(total + weight)
                    else:
                        square = np.float64(weight) ** 2
                        total = np.float32(np.float64(total) + square)
                divisor = total if combiner == "mean" else np.sqrt(total)
                with np.errstate(divide="ignore"):
                    gains = [np.float32(weight) / divisor for weight in row]
            fine = 0 < abs(divisor) < np.inf and np.isfinite(gains).all()
            count += bool(row) and not fine
        splits = np.cumsum([0, *map(len, rows)])
        flat = np.array([w for row in rows for w in row], np.float32)
        ids = np.arange(flat.size, dtype=np.int32)
        weights, counted = settle_zero_rows(ids, flat, splits, combiner)
        assert counted == count
        assert weights is flat


ONE_PARTITION = Topology(
    global_device_count=1, local_device_count=1, num_sc_per_device=1
)


def gains_of(kernel, ids, weights, combiner) -> tuple[dict, int]:
    """(sample, id) -> gain of a batch on one partition; samples counted."""
    layout = layout_of(
        FeatureSpec(name="f", table="t", weights="w"),
        combiner=combiner,
        topology=ONE_PARTITION,
    )
    features, counters, _ = read_features({"f": ids, "w": weights}, layout)
    done = load_kernel(kernel)(features, layout)
    real = done.sample_ids < len(ids)
    keys = zip(
        done.sample_ids[real].tolist(), done.embedding_ids[real].tolist(), strict=True
    )
    return dict(zip(keys, done.gains[real].tolist(), strict=True)), counters[0, 5]


@pytest.mark.parametrize("kernel", runnable_kernels())
class TestSumsOfGains:
    def test_a_sample_whose_repeated_id_overflows_gets_gain_zero(self, kernel):
        gains, count = gains_of(
            kernel,
            [[7, 7, 8], [7, 8], [7, 7], [7, 7]],
            [[3e38, 3e38, 2], [3e38, 3e38], [-3e38, -3e38], [1e38, 2e38]],
            "sum",
        )
        largest = float(np.float32(3e38))
        assert gains == {
            (0, 7): 0,
            (0, 8): 0,
            (1, 7): largest,
            (1, 8): largest,
            (2, 7): 0,
            (3, 7): float(np.float32(1e38) + np.float32(2e38)),
        }
        assert count == 2

    def test_order_counts_and_other_ids_do_not(self, kernel):
        gains, count = gains_of(
            kernel,
            [[7, 7, 7], [7, 7, 7], [7, 8, 7, 8]],
            [[3e38, 3e38, -3e38], [3e38, -3e38, 3e38], [2e38, 3e38, -1e38, -3e38]],
            "sum",
        )
        largest = float(np.float32(3e38))
        rest = float(np.float32(2e38) - np.float32(1e38))
        assert gains == {(0, 7): 0, (1, 7): largest, (2, 7): rest, (2, 8): 0}
        assert count == 1

    def test_a_mean_whose_weights_cancel_out(self, kernel):
        # The weights add up to 1, and those of id 7 to 4e38.
        row = [2e38, -2e38, 2e38, -2e38, 1]
        gains, count = gains_of(
            kernel, [[7, 8, 7, 8, 9], [7, 8]], [row, [1, 3]], "mean"
        )
        assert gains == {
            (0, 7): 0,
            (0, 8): 0,
            (0, 9): 0,
            (1, 7): 0.25,
            (1, 8): 0.75,
        }
        assert count == 1
        # Small weights, over a divisor of 2 ** -125.
        row = [2.0**2, -(2.0**2), 2.0**2, -(2.0**2), 2.0**-125]
        gains, count = gains_of(kernel, [[7, 8, 7, 8, 9]], [row], "mean")
        assert set(gains.values()) == {0}
        assert count == 1
        gains, count = gains_of(kernel, [[1, 2, 3, 4, 5]], [row], "mean")
        assert gains[0, 1] == 2.0**127
        assert count == 0

    def test_the_input_is_not_changed(self, kernel):
        weights = np.full((4, 2), 3e38, np.float32)
        gains, count = gains_of(kernel, np.ones((4, 2), np.int32), weights, "sum")
        assert set(gains.values()) == {0}
        assert count == 4
        assert (weights == np.float32(3e38)).all()

    @given(st.data())
    @settings(max_examples=60)
    def test_gains_equal_running_sums(self, kernel, data):
        combiner = data.draw(st.sampled_from(["sum", "mean", "sqrtn"]))
        pair = st.tuples(
            st.integers(0, 2),
            st.sampled_from([1.0, -1.0, 2.0**-125, 3e38, -3e38, 2e38, 1e30, 4.0, -4.0]),
        )
        rows = data.draw(st.lists(st.lists(pair, max_size=6), min_size=1, max_size=4))
        expected, zero = {}, 0
        for sample, row in enumerate(rows):
            weights = [np.float32(weight) for _, weight in row]
            gains = row_gains(len(row), weights, combiner)
            sums: dict = {}
            with np.errstate(over="ignore"):
                for (id_, _), gain in zip(row, gains, strict=True):
                    sums[sample, id_] = sums.get((sample, id_), np.float32(0)) + gain
            if not np.isfinite(list(sums.values())).all():
                sums = dict.fromkeys(sums, 0)
                zero += 1
            elif combiner != "sum" and row and not np.any(gains):
                zero += 1
            expected.update(sums)
        ids = [[id_ for id_, _ in row] for row in rows]
        gains, count = gains_of(
            kernel, ids, [[weight for _, weight in row] for row in rows], combiner
        )
        assert gains == expected
        assert count == zero
