"""Labs that tests of one module share: starting workers is what takes time."""

import pytest

import gpipe_lab as gl


@pytest.fixture(scope="module")
def lab_of():
    """lab_of(P): a lab of P ranks on the CPU."""
    made = {}

    def get(num_ranks):
        if num_ranks not in made:
            made[num_ranks] = gl.Lab(num_ranks, device="cpu")
        return made[num_ranks]

    yield get
    for lab in made.values():
        lab.close()
