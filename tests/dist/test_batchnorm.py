"""Batch norm: normalised by micro-batch, running statistics of the batch, committed once a step."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl


def make_model(momentum=0.1):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)
    ).double()


def make_batch(seed=0, rows=10):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, 5, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, 3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("mode", ["never", "always", "except_last", "every:1"])
def test_running_statistics_are_those_of_the_whole_batch(lab_of, mode, momentum):
    frozen = functools.partial(torch.optim.SGD, lr=0.0)
    model = make_model(momentum)
    pipe = lab_of(2).pipeline(model, loss_fn=F.mse_loss, optimizer=frozen)
    for step in range(3):
        x, y = make_batch(step)
        pipe.step(gl.gpipe(2, 4), x, y, checkpoint=mode)
        model(x)
        pipe.evaluate(x, y)
    mine, theirs = pipe.state_dict(), model.state_dict()
    assert int(mine["1.num_batches_tracked"]) == 3
    for name in ("1.running_mean", "1.running_var"):
        assert torch.allclose(mine[name], theirs[name], rtol=1e-12), name


class Twice(nn.Module):
    """One norm, used twice in a forward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x):
        return self.norm(x) + self.norm(2 * x + 1)


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("as_layers", [False, True])
def test_a_norm_used_twice_moves_twice_a_step(lab_of, mode, as_layers):
    """Within a layer, and as two layers of a stage; one process's statistics of its inputs' two uses."""
    norm = nn.BatchNorm1d(2).double()
    model = nn.Sequential(norm, norm, nn.Linear(2, 1)) if as_layers else nn.Sequential(Twice(), nn.Flatten())
    model, x = model.double(), make_batch()[0]
    x = x[:, :, 0, 0] if as_layers else x
    y = torch.zeros(len(x), *model(x[:2]).shape[1:], dtype=torch.float64)
    expected, uses = copy.deepcopy(model), []
    layer = next(m for m in expected.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    layer.register_forward_pre_hook(lambda _, inputs: uses.append(inputs[0]))
    pipe = lab_of(1).pipeline(model, loss_fn=F.mse_loss)
    pipe.step(gl.gpipe(1, 2), x, y, checkpoint=mode, update=False)
    copied = copy.deepcopy(layer)  # what one process does on each use's inputs, of all micro-batches at once
    for part in x.chunk(2):
        expected(part)
    first, second = torch.cat(uses[0::2]), torch.cat(uses[1::2])
    copied(first), copied(second)
    mine = pipe.state_dict()
    name = next(key for key in mine if key.endswith("running_var")).removesuffix("running_var")
    assert torch.equal(mine[f"{name}num_batches_tracked"], copied.num_batches_tracked)
    assert torch.allclose(mine[f"{name}running_mean"], copied.running_mean, rtol=1e-12)
    assert torch.allclose(mine[f"{name}running_var"], copied.running_var, rtol=1e-12)


def test_evaluation_uses_the_running_statistics(lab_of):
    model = make_model()
    x, y = make_batch()
    pipe = lab_of(2).pipeline(model, loss_fn=F.mse_loss)
    pipe.step(gl.gpipe(2, 2), x, y, update=False)
    model.load_state_dict(pipe.state_dict())
    model.eval()
    assert torch.allclose(pipe.predict(x, num_microbatches=3), model(x), rtol=1e-12)
