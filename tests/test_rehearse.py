"""What needs no compiler; test_rehearse_compiler.py has the rest."""

import math
import random

import pytest

from grain_sparsecore.chips import FoundFor
from grain_sparsecore.errors import ConfigError, MissingExtraError
from grain_sparsecore.limits import Limits
from grain_sparsecore.program import Program
from grain_sparsecore.rehearse import Caps, with_caps
from grain_sparsecore.rehearse.caps import (
    CapsSearch,
    fit_together,
    largest,
    most_of_any_batch,
)
from grain_sparsecore.rehearse.compiler import Outcome
from grain_sparsecore.rehearse.installation import check_libtpu
from grain_sparsecore.rehearse.reasons import explain, explain_timeout
from grain_sparsecore.rehearse.topologies import (
    check_topology,
    from_devices,
    sparsecores,
)
from tests.rehearse_helpers import (
    TOO_LARGE_TABLES,
    TOO_MANY_IDS,
    TOO_MANY_UNIQUE,
    TOO_SHORT_BUFFER,
    ChipModel,
    layout_of,
    limits_of,
    stack_limits,
)

PINS = ('libtpu==0.0.42.*; extra == "tpu"', 'requests; extra == "tpu"')


@pytest.mark.parametrize(
    ("name", "count"),
    [("v6e:2x2", 2), ("v6e:16x16", 2), ("v5p:2x2x1", 4), ("tpu7x:2x2x1", 2)],
)
def test_sparsecores_follow_from_the_name(name, count):
    assert sparsecores(name) == count


@pytest.mark.parametrize("name", ["", "v6e", "v6e-8", "v6e:", "v6e:2x", "v6e:2x2 "])
def test_names_of_another_form_are_shown_examples(name):
    with pytest.raises(ConfigError, match=r"of the form kind:AxB .*v6e:2x2"):
        sparsecores(name)


@pytest.mark.parametrize("name", ["v5e:2x2", "v4:2x2x1", "v9x:2x2"])
def test_kinds_without_known_sparsecores_are_refused(name):
    with pytest.raises(ConfigError, match=r"no kind .*known: tpu7x, v5p, v6e\."):
        sparsecores(name)


def test_stacks_for_another_topology_are_refused():
    named = from_devices(
        "v6e:4x4", device_kind="TPU v6 lite", device_count=16, host_count=4
    )
    assert named.topology == layout_of(devices=16, hosts=4).topology
    # How the devices are spread over hosts is no matter.
    check_topology(layout_of(devices=16, hosts=8).topology, named)
    with pytest.raises(ConfigError, match=r"num_sc_per_device=4, but v6e:4x4 has 2"):
        check_topology(layout_of(devices=16, cores=4).topology, named)
    with pytest.raises(ConfigError, match=r"global_device_count=8, but v6e:4x4 has 16"):
        check_topology(layout_of(devices=8).topology, named)


def test_the_libtpu_that_jax_pins_is_accepted():
    check_libtpu(installed="0.0.42.1", jax="0.10.2", requirements=PINS)
    check_libtpu(installed="0.0.42", jax="0.10.2", requirements=PINS)
    check_libtpu(installed="1.2", jax="0.10.2", requirements=("numpy>=2",))


def test_a_missing_libtpu_names_the_line_that_installs_it():
    with pytest.raises(MissingExtraError) as caught:
        check_libtpu(installed=None, jax="0.10.2", requirements=PINS)
    assert str(caught.value) == (
        "rehearsing needs libtpu, the TPU compiler (Linux on x86-64): "
        "pip install 'grain_sparsecore[tpu]' 'jax[tpu]==0.10.2'."
    )


@pytest.mark.parametrize("installed", ["0.0.4", "0.0.420.1", "0.0.50.1"])
def test_another_libtpu_names_both_versions_and_the_line(installed):
    with pytest.raises(MissingExtraError) as caught:
        check_libtpu(installed=installed, jax="0.10.2", requirements=PINS)
    assert str(caught.value) == (
        f"libtpu {installed} is installed, but jax 0.10.2 works only with libtpu "
        "0.0.42.*: pip install 'grain_sparsecore[tpu]' 'jax[tpu]==0.10.2'."
    )


def test_too_many_unique_ids_are_explained():
    refusal = explain(TOO_MANY_UNIQUE, stack_limits(16384, 16384), "stack 'item'")
    assert refusal.text.startswith(
        "stack 'item': max_unique_ids_per_partition=16384 needs 590,848 bytes of the "
        "SparseCore's shared memory, which has 262,144: about 7,264 would be the "
        "most, so the limit is 2.25 times too high. Lower pipeline.batch_size,"
    )
    assert refusal.unique_ids_at_most == 7264


def test_too_many_ids_are_explained():
    refusal = explain(TOO_MANY_IDS, stack_limits(65536, 7192), "stack 'item'")
    assert refusal.text.startswith(
        "stack 'item': max_unique_ids_per_partition=7192 leaves 2,208 of 262,144 bytes "
        "of the SparseCore's shared memory, too little for the 786,432 bytes of "
        "max_ids_per_partition=65536: lower one of the two."
    )
    assert refusal.unique_ids_at_most == 7191


def test_what_a_device_lacks_is_explained():
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent "
        "error. Ran out of memory in memory space hbm. Used 56.66G of 31.24G hbm. "
        "Exceeded hbm capacity by 25.42G."
    )
    text = explain(message, None, "all 4 stacks").text
    assert text.startswith("all 4 stacks: a device would need 56.66G of memory and has")


def test_too_large_tables_are_explained():
    for limits in (stack_limits(8, 8), None):
        text = explain(TOO_LARGE_TABLES, limits, "stack 'item'").text
        assert text.startswith(
            "stack 'item': a device would need 47.68G of memory and has 31.25G."
        )


def test_a_short_buffer_is_explained():
    text = explain(TOO_SHORT_BUFFER, stack_limits(8192, 8192, 128), "stack 'item'").text
    assert text.startswith(
        "stack 'item': buffer_size_per_device=128 is too short: with "
        "max_ids_per_partition=8192 the compiler reads 1024 slots at a time from 128."
    )


@pytest.mark.parametrize("limits", [stack_limits(8, 8), None])
def test_other_messages_are_quoted_in_part(limits):
    text = explain("INTERNAL:\n  oh no " + 1000 * "x", limits, "stack 'item'").text
    assert text.startswith(
        "stack 'item': the compiler refused it and said: INTERNAL: oh"
    )
    assert len(text) < 400


def test_a_compilation_that_was_given_up_is_explained():
    text = explain_timeout(60.0, stack_limits(7192, 700), "stack 'item'").text
    assert "not compiled within 60 s at max_ids_per_partition=7192, max_uni" in text
    assert "within 60 s. Raise" in explain_timeout(60.0, None, "all stacks").text


@pytest.mark.parametrize("seed", range(200))
def test_largest_comes_close_with_few_compilations(seed):
    rng = random.Random(seed)
    upper = math.ceil(10 ** rng.uniform(1, 8))
    best = math.ceil(10 ** rng.uniform(0, 8))
    precision = rng.choice([16, 128])
    knows = rng.random() < 0.5
    tried = []

    def compiles(value):
        tried.append(value)
        if value <= best:
            return None
        # A bound may be loose, but never wrong.
        return rng.randint(best, value - 1) if knows else value - 1

    found = largest(upper, compiles, lower=1, precision=precision)
    assert found is not None
    assert found <= best
    assert found == upper or found > best - max(2 * best // precision, 16) - 8
    assert found in tried
    assert sum(value <= best for value in tried) <= 8
    assert len(tried) < 200


def test_largest_of_nothing_is_none():
    assert largest(1000, lambda value: value - 1, lower=1, precision=16) is None
    assert largest(1, lambda value: 0, lower=1, precision=16) is None


def search(chip, layout, limits):
    program = Program.of(layout, limits)
    (stack,) = program.stacks
    return CapsSearch(chip, program, stack, topology="v6e:2x2").run()


def test_no_batch_needs_more_than_rows_and_samples():
    layout = layout_of({"item": 1000}, samples=64)
    program = Program.of(layout, limits_of(layout, 1, 1, 16))
    # 8 partitions of 128 rows; 8 samples on each SparseCore.
    assert most_of_any_batch(program, program.stacks[0]) == (1024, 128)


@pytest.mark.parametrize("ratio", [1, 3, 40])
@pytest.mark.parametrize("samples", [512, 16_384])
def test_caps_lie_on_the_edge_of_what_the_chip_holds(ratio, samples):
    chip = ChipModel()
    layout = layout_of({"item": 1_000_000}, samples=samples)
    caps = search(chip, layout, limits_of(layout, 10 * ratio, 10, 64))
    ids, unique = caps.max_ids_per_partition, caps.max_unique_ids_per_partition
    assert chip.holds(ids, unique)
    # Neither can grow by more than the precision of the search.
    assert not chip.holds(round(ids * 1.2), unique) or ids == 125_000 * samples // 8
    assert not chip.holds(max(ids, round(unique * 1.03) * ratio), round(unique * 1.03))
    assert caps.compiled == sum(o.fits for o in chip.outcomes) <= 6
    assert caps.refused == len(chip.outcomes) - caps.compiled < 100
    assert caps.seconds == len(chip.outcomes)
    assert "max_unique_ids_per_partition" in caps.reason


def test_caps_of_a_small_table_are_all_that_a_batch_can_need():
    chip = ChipModel()
    layout = layout_of({"item": 1000})
    caps = search(chip, layout, limits_of(layout, 1, 1, 16))
    assert (caps.max_ids_per_partition, caps.max_unique_ids_per_partition) == (
        1024,
        128,
    )
    assert (caps.compiled, caps.refused, caps.reason) == (2, 0, "")


def test_caps_keep_the_buffers_within_the_memory_of_the_device():
    chip = ChipModel(heap=5000)
    layout = layout_of({"item": 1_000_000}, samples=1024)
    caps = search(chip, layout, limits_of(layout, 1, 1, 16))
    assert 4500 < caps.max_ids_per_partition < 5000
    assert "a device would need 47.68G" in caps.reason


@pytest.mark.parametrize("ratio", [1, 40])
def test_what_takes_too_long_is_tried_again_far_below(ratio):
    chip = ChipModel(patience=3000)
    layout = layout_of({"item": 1_000_000}, samples=16_384)
    caps = search(chip, layout, limits_of(layout, 10 * ratio, 10, 64))
    ids, unique = caps.max_ids_per_partition, caps.max_unique_ids_per_partition
    assert 1400 < ids <= 3000
    assert unique >= 1400 // ratio
    given_up = [outcome for outcome in chip.outcomes if outcome.timed_out]
    # Each takes the whole time limit, so there are few.
    assert 1 <= len(given_up) <= 12
    assert "not compiled within 60 s" in caps.reason


def test_a_stack_that_fits_with_no_limits_says_why():
    layout = layout_of({"item": 1000})
    with pytest.raises(
        ConfigError, match=r"no limits at all fit on v6e:2x2: stack 'it"
    ):
        search(ChipModel(total=100), layout, limits_of(layout, 1, 1, 16))


def own_caps(**ids_and_unique):
    return {
        name: Caps(
            max_ids_per_partition=ids,
            max_unique_ids_per_partition=unique,
            compiled=1,
            refused=0,
            cached=0,
            seconds=1.0,
            reason="",
        )
        for name, (ids, unique) in ids_and_unique.items()
    }


class SharedMemoryOfADevice:
    """Holds so many ids over all stacks."""

    def __init__(self, ids):
        self.ids = ids

    def compile(self, program, topology):
        need = sum(stack.max_ids_per_partition for stack in program.stacks)
        fits = need <= self.ids
        return Outcome(fits=fits, error="" if fits else TOO_LARGE_TABLES)


@pytest.mark.parametrize(
    ("memory", "item", "user"),
    [
        (5000, (4096, 700), (640, 600)),
        (4736, (4096, 700), (640, 600)),
        (4735, (2048, 700), (320, 320)),
        # No stack is taken what the data needs.
        (400, (256, 256), (100, 100)),
        (168, (64, 64), (100, 100)),
    ],
)
def test_stacks_share_the_memory_of_the_device(memory, item, user):
    layout = layout_of({"item": 100_000, "user": 100_000})
    plain = limits_of(layout, 10, 5, 64).to_plain()
    plain["user"]["max_ids_per_partition"] = 100
    program = Program.of(layout, Limits.from_plain(plain))
    told = []
    caps = fit_together(
        SharedMemoryOfADevice(memory),
        program,
        own_caps(item=(4096, 700), user=(640, 600)),
        topology="v6e:2x2",
        on_probe=told.append,
    )
    for name, (ids, unique) in (("item", item), ("user", user)):
        assert caps[name].max_ids_per_partition == ids
        assert caps[name].max_unique_ids_per_partition == unique
    assert [outcome.fits for outcome in told] == (len(told) - 1) * [False] + [True]


def test_stacks_that_do_not_fit_together_say_so():
    layout = layout_of({"item": 100_000, "user": 100_000})
    program = Program.of(layout, limits_of(layout, 100, 10, 64))
    caps = own_caps(item=(4096, 700), user=(640, 600))
    with pytest.raises(ConfigError) as caught:
        fit_together(SharedMemoryOfADevice(150), program, caps, topology="v6e:2x2")
    assert str(caught.value).startswith(
        "the stacks do not fit together on v6e:2x2 at the limits that the data needs: "
        "all 2 stacks in one program: a device would need 47.68G"
    )


def test_caps_join_what_is_in_a_limits_file():
    caps = own_caps(user=(16, 8), item=(24, 8))
    contents = {"format": "limits", "caps": {"old": {}}}
    found_for = FoundFor(topology="v6e:2x2", device_kind="TPU v6 lite", libtpu="0.1")
    assert with_caps(contents, caps, found_for) == {
        "format": "limits",
        "caps_found_for": {
            "topology": "v6e:2x2",
            "device_kind": "TPU v6 lite",
            "libtpu": "0.1",
        },
        "caps": {
            "item": {"max_ids_per_partition": 24, "max_unique_ids_per_partition": 8},
            "user": {"max_ids_per_partition": 16, "max_unique_ids_per_partition": 8},
        },
    }
    assert contents["caps"] == {"old": {}}
