"""The backward in two parts: the same gradients, and no matrix product or convolution done twice."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gpipe_lab.engine.device import CpuDevice
from gpipe_lab.engine.ledger import Ledger
from gpipe_lab.engine.models import Block
from gpipe_lab.engine.stage import Stage, StepContext
from tests.layers import OwnFunction


class ByHand(nn.Module):
    """A product that does not go through a linear layer: all of its backward comes at once."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x):
        return x @ self.weight


class Scaled(nn.Module):
    """A linear layer whose weight is computed, so its gradient has further to go."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return F.linear(x, self.weight * self.scale)


CASES = {
    "linear": ([nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6, bias=False)], (5, 6)),
    "linear with a frozen bias": ([nn.Linear(6, 6)], (5, 6)),
    "attention": ([Block(8, 2), Block(8, 2)], (3, 4, 8)),
    "conv1d": ([nn.Conv1d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv1d(6, 4, 3, stride=2)], (3, 4, 11)),
    "conv2d": ([nn.Conv2d(4, 8, 3, padding=1, groups=2), nn.GELU(), nn.Conv2d(8, 4, 1)], (2, 4, 7, 7)),
    "conv3d": ([nn.Conv3d(2, 3, 2, dilation=2)], (2, 2, 5, 5, 5)),
    "conv2d, padding by name": ([nn.Conv2d(4, 4, 3, padding="same")], (2, 4, 5, 5)),
    "norms": ([nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6)], (5, 6)),
    "by hand": ([ByHand(6), nn.Linear(6, 6)], (5, 6)),
    "computed weight": ([Scaled(6), nn.Linear(6, 6)], (5, 6)),
    "no weights": ([nn.Tanh()], (5, 6)),
    "multihead attention": ([nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)], (3, 4, 8)),
}


def run(stage, x, given, *, split, segments=None):
    """(gradient of the input, gradients of the weights, FLOPs of the backward and of its second part)."""
    for p in stage.layers.parameters():
        p.grad = None
    stage.forward(0, x, [True], StepContext(), defer_weights=split, segments=segments)
    with FlopCounterMode(display=False) as first:
        if segments is not None:
            stage.recompute(0, 0)
        (gradient,) = stage.backward(0, 0, [given])
    with FlopCounterMode(display=False) as second:
        if split:
            stage.backward_weight(0)
    flops = first.get_total_flops(), second.get_total_flops()
    return gradient, [p.grad for p in stage.layers.parameters()], flops


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_flops_are_those_of_the_whole_backward(name):
    torch.manual_seed(0)
    layers, shape = CASES[name]
    stage = Stage(0, [layer.double() for layer in layers], 0, CpuDevice(), Ledger(0))
    if "frozen" in name:
        stage.layers[0].bias.requires_grad_(False)
    x = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        given = torch.randn_like(nn.Sequential(*stage.layers)(x))
    whole, weights, (flops, none) = run(stage, x, given, split=False)
    for segments in (None, [range(len(layers))]):
        halves, split_weights, (first, second) = run(stage, x, given, split=True, segments=segments)
        assert torch.allclose(halves, whole, rtol=1e-12)
        for mine, theirs in zip(split_weights, weights, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.allclose(mine, theirs, rtol=1e-12)
        if segments is None:
            assert first + second == flops and none == 0
    assert stage.ledger.totals["deferred"] == stage.ledger.totals["saved"] == 0


UNSPLIT = {
    "linear": set(),
    "attention": set(),
    "conv1d": set(),
    "norms": set(),
    "no weights": set(),
    "by hand": {"0.weight"},
    "computed weight": {"0.weight"},
    "conv2d, padding by name": {"0.weight"},
    "multihead attention": {"0.self_attn.in_proj_weight", "0.self_attn.out_proj.weight"},
}


def whole_names(layers, x, *, segments=None, repeats=1):
    """The weights of `layers` whose gradients a split backward did not put off."""
    stage = Stage(0, layers, 0, CpuDevice(), Ledger(0))
    for _ in range(repeats):
        stage.begin(training=True)
        stage.layers.zero_grad()  # as the engine does: earlier steps' gradients are set aside
        for m in range(2):
            output = stage.forward(m, x, [True], StepContext(), segments=segments, defer_weights=True)
            if segments is not None:
                stage.recompute(m, 0)
            stage.backward(m, 0, [torch.ones_like(output.tree)])
            stage.backward_weight(m)
    names = {id(p): name for name, p in stage.layers.named_parameters()}
    return {names[id(weight)] for weight in stage.unsplit}


@pytest.mark.parametrize("name", UNSPLIT)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_is_not_split_is_known(name, checkpointed):
    layers, shape = CASES[name]
    segments = [range(len(layers))] if checkpointed else None
    layers = [layer.double() for layer in layers]
    x = torch.randn(shape, dtype=torch.float64)
    for repeats in (1, 2):
        assert whole_names(layers, x, segments=segments, repeats=repeats) == UNSPLIT[name]


def test_a_function_of_ones_own_is_not_split():
    assert whole_names([OwnFunction(6), nn.Linear(6, 6)], torch.randn(5, 6)) == {"0.weight"}


def test_ties_within_a_stage_are_split():
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    assert whole_names([first, second], torch.randn(5, 6)) == set()


def test_the_first_part_leaves_half_of_a_linear_layer_to_the_second():
    stage = Stage(0, [nn.Linear(8, 8)], 0, CpuDevice(), Ledger(0))
    x = torch.randn(4, 8)
    _, _, (first, second) = run(stage, x, torch.randn(4, 8), split=True)
    assert first == second == 2 * 4 * 8 * 8


def test_what_is_put_off_is_counted_until_it_is_done():
    ledger = Ledger(0)
    stage = Stage(0, [nn.Linear(8, 8)], 0, CpuDevice(), ledger)
    stage.forward(0, torch.randn(4, 8), [True], StepContext(), defer_weights=True)
    assert ledger.totals["saved"] == 4 * 8 * 4
    stage.backward(0, 0, [torch.randn(4, 8)])
    assert ledger.totals["saved"] == 0
    assert ledger.totals["deferred"] == 2 * 4 * 8 * 4  # the layer's input and its output's gradient
    stage.backward_weight(0)
    assert ledger.totals["deferred"] == 0


def test_autocast_is_respected():
    torch.manual_seed(0)
    stage = Stage(0, [nn.Linear(8, 8)], 0, CpuDevice(), Ledger(0))
    x, given = torch.randn(4, 8), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole, weights, _ = run(stage, x, given.bfloat16(), split=False)
        halves, split_weights, _ = run(stage, x, given.bfloat16(), split=True)
    assert torch.allclose(halves, whole, rtol=0.02, atol=0.02)
    for mine, theirs in zip(split_weights, weights, strict=True):
        assert mine.dtype == theirs.dtype == torch.float32
        assert torch.allclose(mine, theirs, rtol=0.02, atol=0.05)
