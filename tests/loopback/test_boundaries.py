"""Messages that hang on data and steps that are given up: transfers matched by order, memory poisoned.

The layers look at their numbers, so the host may wait here.
"""

import pytest
import torch

import gpipe_lab as gl
from gpipe_lab.engine.rank_pipeline import StepRefused
from tests.comparing import distance
from tests.dist.test_boundaries import M, batch, dropping, identity, masking, refusing, sum_of_squares

from .running import run


def gradients(model, x):
    for part in x.split(2):
        (sum_of_squares(model(part), part) / M).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("make", [gl.gpipe, gl.one_f_one_b, gl.zero_bubble_h1])
@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("model", [masking, dropping])
def test_structures_and_shapes_that_hang_on_data(make, mode, model):
    for seed in range(3):
        x = batch(seed, masked=(1, 2)[: seed + 1])
        found = run(
            make(4, M),
            model(),
            x,
            x,
            loss_fn=sum_of_squares,
            may_wait=True,
            checkpoint=mode,
            steps=2,
            seed=seed,
        )
        assert distance(found.gradients, gradients(model(), x)) <= 1e-12


@pytest.mark.parametrize("make", [gl.gpipe, gl.one_f_one_b, gl.zero_bubble_h1])
@pytest.mark.parametrize("refused", range(M))
def test_a_step_that_is_given_up_comes_to_its_end_on_all_ranks(make, refused):
    x = batch(0)
    x[2 * refused] = 100.0
    for seed in range(3):
        with pytest.raises(StepRefused):
            run(make(4, M), identity(refusing()), x, x, loss_fn=sum_of_squares, may_wait=True, seed=seed)


def test_a_steady_step_has_no_announcement():
    x = batch(0)
    found = run(
        gl.gpipe(4, M), masking(), x, torch.zeros_like(x), loss_fn=sum_of_squares, may_wait=True, steps=3
    )
    assert found.heard[0] > 0 and found.heard[1:] == [0, 0]
