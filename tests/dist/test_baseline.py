"""The step without a pipeline, as the course times it."""

import pytest
import torch
from torch import nn

from gpipe_lab.course.measure import plain_steps_ms

pytestmark = pytest.mark.dist


def test_plain_steps_are_timed_and_leave_the_model_alone(lab_of):
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    before = model.weight.detach().clone()
    (times,) = lab_of(1).launch(plain_steps_ms, model, x, x, nn.functional.mse_loss, 3)
    assert len(times) == 3 and min(times) > 0
    assert torch.equal(model.weight, before) and model.weight.grad is None


def test_as_many_threads_as_told(lab_of):
    class Threads(nn.Linear):
        def forward(self, x):
            assert torch.get_num_threads() == 2
            return super().forward(x)

    x = torch.ones(2, 4)
    lab_of(1).launch(plain_steps_ms, Threads(4, 4), x, x, nn.functional.mse_loss, 1, 2)
