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


class Picks(nn.Module):
    """The most likely classes: whole numbers, through which nothing can be differentiated."""

    def forward(self, x):
        return x.argmax(1)


class Looks(nn.Module):
    """An argmax and an embedding in one layer: it takes floats that need a gradient and gives none back."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 6).double()

    def forward(self, x):
        return self.table(x.argmax(1))


class Both(nn.Module):
    """Two branches with weights of their own, and a mask."""

    def __init__(self):
        super().__init__()
        self.left, self.right = linear(), linear()

    def forward(self, x):
        return self.left(x), self.right(x), x > 0


class Uses(nn.Module):
    """Differentiates through some of its inputs only."""

    def __init__(self, *names):
        super().__init__()
        self.names = names
        self.linear = linear()

    def forward(self, value):
        left, right, mask = value
        values = {"left": left, "right": right}
        used = sum(v if name in self.names else v.detach() for name, v in values.items())
        return self.linear(used) * mask


ABSENT = {
    "an integer stage": lambda: [linear(), Picks(), nn.Embedding(6, 6).double(), linear()],
    "argmax and embedding together": lambda: [linear(), linear(), Looks(), linear()],
    "at the end": lambda: [linear(), linear(), linear(), Looks()],
    "one of two outputs": lambda: [linear(), Both(), Uses("left"), linear()],
    "none of two outputs": lambda: [linear(), Both(), Uses(), linear()],
    "a frozen first stage": lambda: [linear().requires_grad_(False), linear(), linear(), linear()],
    "a frozen layer after trained ones": lambda: [linear(), linear().requires_grad_(False), Looks(), linear()],
}


@pytest.mark.parametrize("name", ABSENT)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_the_loss_does_not_reach_has_no_gradient(lab_of, name, num_ranks):
    torch.manual_seed(0)
    layers = ABSENT[name]()
    expected = one_process(layers)
    assert len(expected) < sum(1 for layer in layers for _ in layer.parameters())
    schedules = [gl.gpipe(num_ranks, M), gl.one_f_one_b(num_ranks, M), gl.zero_bubble_h1(num_ranks, M)]
    if num_ranks == 2:
        schedules += [gl.zero_bubble_v(2, M), gl.interleaved(2, M, num_chunks=2)]
    for schedule in schedules:
        for mode, strict in (("never", False), ("never", True), ("always", False), ("except_last", False)):
            run = lab_of(num_ranks).run(
                schedule, layers, *batch(), loss_fn=F.mse_loss, checkpoint=mode, strict=strict, warmup=False
            )
            assert_equal(run.gradients(), expected)


class Sometimes(nn.Module):
    """Differentiates through its input for some micro-batches only; which ones hangs on the data."""

    def __init__(self, first):
        super().__init__()
        self.first = first
        self.linear = linear()

    def forward(self, x):
        passes = bool(x[0, 0] < 0) == self.first
        return self.linear(x if passes else x.detach())


@pytest.mark.parametrize("first", [True, False])
def test_gradients_that_are_there_for_some_microbatches_only(lab_of, first):
    torch.manual_seed(0)
    layers = [nn.Identity(), linear(), nn.Identity(), Sometimes(first)]
    expected = one_process(layers)
    for make in (gl.gpipe, gl.one_f_one_b):
        run = lab_of(4).run(make(4, M), layers, *batch(), loss_fn=F.mse_loss, repeats=2)
        assert_equal(run.gradients(), expected)


def test_micro_batches_that_do_not_count_give_zeros(lab_of):
    layers = [linear(), linear()]
    x = batch()[0]
    targets = torch.full((8,), -100)
    targets[6:] = 2
    for mode in MODES:
        run = lab_of(2).run(gl.gpipe(2, M), layers, x, targets, loss_fn=F.cross_entropy, checkpoint=mode)
        whole = nn.Sequential(*copy.deepcopy(layers))
        F.cross_entropy(whole(x), targets).backward()
        assert_equal(run.gradients(), {name: p.grad for name, p in whole.named_parameters()})


@pytest.mark.parametrize("frozen", [True, False])
def test_a_tied_weight_without_gradients_stays_without(lab_of, frozen):
    first, last = linear(), linear()
    last.weight = first.weight
    first.weight.requires_grad_(not frozen)
    layers = [first, linear(), last, Looks()]
    expected = one_process(layers)
    run = lab_of(4).run(gl.gpipe(4, M), layers, *batch(), loss_fn=F.mse_loss)
    assert_equal(run.gradients(), expected)
    pipe = lab_of(4).pipeline(layers, loss_fn=F.mse_loss, optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))
    pipe.step(gl.gpipe(4, M), *batch())
    assert torch.equal(pipe.state_dict()["0.weight"], first.weight), "weight decay moves what has a gradient"


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
