"""What is rare in a model and must be right all the same: backwards that cannot be split, absent gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl

M = 4
MODES = ["never", "always", "except_last"]


def batch(rows=8, width=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2)]


def linear():
    return nn.Linear(6, 6).double()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class OwnFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))

    def forward(self, x):
        return Product.apply(x, self.weight)


@pytest.mark.parametrize("make", [gl.zero_bubble_h1, gl.zero_bubble_v])
def test_the_trace_says_which_backwards_were_not_split(lab_of, make):
    torch.manual_seed(0)
    layers = [linear(), OwnFunction(), linear(), linear()]
    expected = one_process(layers)
    for mode in MODES:
        run = lab_of(2).run(make(2, M), layers, *batch(), loss_fn=F.mse_loss, checkpoint=mode)
        (stage,) = {stage for stage, _ in run.trace.unsplit}
        assert run.trace.unsplit == ((stage, "1.weight"),)
        assert run.trace.notes[0].startswith(f"Stage {stage}: I did the full backward of 1.weight")
        assert_equal(run.gradients(), expected)
    whole = lab_of(2).run(gl.gpipe(2, M), layers, *batch(), loss_fn=F.mse_loss)
    assert whole.trace.notes == (), "nothing was to be split"


def test_a_compiled_layer_under_a_split_backward(lab_of, capsys):
    torch.manual_seed(0)
    plain = [linear(), linear()]
    expected = one_process(plain)
    layers = [plain[0], torch.compile(plain[1], backend="eager")]
    run = lab_of(2).run(gl.zero_bubble_h1(2, M), layers, *batch(), loss_fn=F.mse_loss)
    assert_equal({n.replace("_orig_mod.", ""): g for n, g in run.gradients().items()}, expected)
    assert {name for _, name in run.trace.unsplit} <= {"1._orig_mod.weight"}
    assert capsys.readouterr().err == ""


def one_process(layers, inputs=None):
    """The gradients of plain torch on the same micro-batches; parameters without one are left out."""
    model = nn.Sequential(*copy.deepcopy(list(layers))).train()
    x, y = batch() if inputs is None else inputs
    for part, target in zip(x.chunk(M), y.chunk(M), strict=True):
        (F.mse_loss(model(part), target) / M).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(mine, theirs):
    assert set(mine) == set(theirs)
    for name, gradient in theirs.items():
        assert torch.allclose(mine[name], gradient, rtol=1e-11, atol=1e-14), name
