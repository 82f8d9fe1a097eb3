"""What is said where hosts would run different TPU programs."""

import importlib.metadata

import pytest

from grain_sparsecore.errors import HostMismatchError
from grain_sparsecore.same_program import check_programs

ONE, TWO, NONE = "0123456789abcdef" * 4, "fedcba9876543210" * 4, "0" * 64


@pytest.mark.parametrize("text", [ONE, NONE])
def test_equal_programs_and_no_programs_are_the_same(text):
    check_programs([text], step=1)
    check_programs([text] * 3, step=1)


@pytest.mark.parametrize(
    ("programs", "who"),
    [
        ([ONE, NONE], "host 1 of 2 lacks"),
        ([NONE, ONE, NONE], "hosts 0 and 2 of 3 lack"),
        # Whoever has none is told first: the others cannot be compared with it.
        ([ONE, TWO, NONE], "host 2 of 3 lacks"),
    ],
)
def test_hosts_without_the_extra_are_named_with_the_line_that_installs_it(
    programs, who
):
    with pytest.raises(HostMismatchError) as error:
        check_programs(programs, step=1)
    assert str(error.value) == (
        f"{who} jax-tpu-embedding, which the others have, so it cannot be told whether "
        "all would run the same TPU program. Install it on every host, pip install "
        "'grain_sparsecore[sparsecore]', or on none."
    )


def test_hosts_with_another_program_are_named():
    with pytest.raises(HostMismatchError) as error:
        check_programs([ONE, ONE, TWO, TWO], step=7)
    jax, lookup = map(importlib.metadata.version, ("jax", "jax-tpu-embedding"))
    assert str(error.value) == (
        "in step 7 hosts 2 and 3 would run another TPU program than host 0 "
        "(fedcba9876543210 on host 2, 0123456789abcdef on host 0). Install the same "
        "versions of jax and jax-tpu-embedding on all of them; here they are jax "
        f"{jax} and jax-tpu-embedding {lookup}."
    )
