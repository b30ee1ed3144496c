"""Models of many shapes: several outputs, skips, control flow, compiled layers, changing lengths."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl
from tests.comparing import distance

MODES = ["never", "always", "every:1"]


def reference(model, x, y, loss_fn=F.mse_loss):
    model.zero_grad()
    loss_fn(model(x), y).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Fans(nn.Module):
    """Any number of outputs, each of which the next layer uses."""

    def __init__(self, num_outputs):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(5, 5) for _ in range(num_outputs))

    def forward(self, value):
        x = sum(value) if isinstance(value, tuple) else value
        return tuple(torch.tanh(linear(x)) for linear in self.linears)


class Sum(nn.Module):
    def forward(self, value):
        return sum(value)


@pytest.mark.parametrize("num_outputs", [1, 2, 3, 4])
def test_one_to_four_outputs(lab_of, num_outputs):
    torch.manual_seed(0)
    model = nn.Sequential(*[Fans(num_outputs) for _ in range(3)], Sum()).double()
    x, y = torch.randn(8, 5, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
    expected = reference(model, x, y)
    for mode in MODES:
        run = lab_of(4).run(
            gl.one_f_one_b(4, 4), model, x, y, loss_fn=F.mse_loss, checkpoint=mode, warmup=False
        )
        assert distance(run.gradients(), expected) <= 1e-12
        assert run.bytes_sent[0, 1] == num_outputs * 8 * 5 * 8


class Carries(nn.Module):
    """A layer that hands the first layer's output on for a skip three stages later."""

    def __init__(self, first=False):
        super().__init__()
        self.first = first
        self.linear = nn.Linear(5, 5)

    def forward(self, value):
        x, skip = (value, None) if self.first else value
        y = torch.tanh(self.linear(x))
        return y, y if self.first else skip


class Joins(nn.Module):
    def forward(self, value):
        x, skip = value
        return x + skip


def test_a_skip_over_stages_is_carried(lab_of):
    torch.manual_seed(0)
    model = nn.Sequential(Carries(first=True), Carries(), Carries(), Joins()).double()
    x, y = torch.randn(8, 5, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
    expected = reference(model, x, y)
    for mode in MODES:
        run = lab_of(4).run(gl.gpipe(4, 4), model, x, y, loss_fn=F.mse_loss, checkpoint=mode)
        assert distance(run.gradients(), expected) <= 1e-12


class Skips(nn.Module):
    """A forward of its own, which a list of its children would lose."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        return self.b(self.a(x)) + x


def test_a_model_with_a_forward_of_its_own_is_refused_with_a_remedy(lab_of):
    x = torch.randn(4, 5)
    with pytest.raises(gl.InputError, match=r"nn.Sequential\(\*layers\)"):
        lab_of(2).run(gl.gpipe(2, 2), Skips(), x, x, loss_fn=F.mse_loss, warmup=False)


class Decides(nn.Module):
    """Control flow that hangs on the data: nothing is traced, so it runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        for _ in range(1 + int(x.sum() > 0)):
            x = torch.tanh(self.linear(x))
        return x


def test_control_flow_that_hangs_on_data(lab_of):
    torch.manual_seed(0)
    model = nn.Sequential(*[Decides() for _ in range(4)]).double()
    x, y = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    model.zero_grad()
    for part, target in zip(x.split(1), y.split(1), strict=True):
        (F.mse_loss(model(part), target) / 4).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    for mode in MODES:
        run = lab_of(2).run(gl.gpipe(2, 4), model, x, y, loss_fn=F.mse_loss, checkpoint=mode, warmup=False)
        assert distance(run.gradients(), expected) <= 1e-12


def test_compiled_layers(lab_of):
    torch.manual_seed(0)
    plain = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double() for _ in range(2)]
    x, y = torch.randn(8, 5, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
    expected = reference(nn.Sequential(*plain), x, y)
    compiled = [torch.compile(layer, backend="eager") for layer in plain]
    for mode in MODES:
        run = lab_of(2).run(gl.gpipe(2, 4), compiled, x, y, loss_fn=F.mse_loss, checkpoint=mode, warmup=False)
        mine = {name.replace("_orig_mod.", ""): g for name, g in run.gradients().items()}
        assert distance(mine, expected) <= 1e-12


def test_lengths_that_change_from_step_to_step(lab_of):
    """Shapes are agreed on when they are new, and known again when they come back."""
    model = gl.gpt(2, width=16, num_heads=2, vocabulary=13, length=20)
    one = lab_of(1).pipeline(model, loss_fn=gl.next_token_loss)
    four = lab_of(4).pipeline(model, loss_fn=gl.next_token_loss)
    for length in (20, 7, 20, 12, 7):
        ids = torch.randint(0, 13, (6, length), generator=torch.Generator().manual_seed(length))
        losses = []
        for num_stages, pipe in ((1, one), (4, four)):
            pipe.zero_grad()
            losses.append(pipe.step(gl.one_f_one_b(num_stages, 4), ids, ids, update=False).loss)
        assert losses[0] == losses[1]
        assert distance(four.gradients(), one.gradients()) == 0


class Norms(nn.Module):
    """Passes on only part of what it computes from; the rest gets no gradient."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        return self.used(x)


def test_a_weight_that_is_never_used_has_no_gradient(lab_of):
    model = nn.Sequential(Norms(), Norms()).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    run = lab_of(2).run(gl.gpipe(2, 2), model, x, x, loss_fn=F.mse_loss, warmup=False)
    assert set(run.gradients()) == {f"{i}.used.{name}" for i in (0, 1) for name in ("weight", "bias")}


class Transposed(nn.Module):
    """An output that lies transposed in memory, as after a permute."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        return self.linear(x).t().contiguous().t()


class SeesStrides(nn.Module):
    """Gives another result where its input lies in memory in another way."""

    def forward(self, x):
        return x * (1.0 if x.stride() == (1, len(x)) else 2.0)


def test_strides_cross_a_boundary(lab_of):
    torch.manual_seed(0)
    model = nn.Sequential(Transposed(), SeesStrides()).double()
    x, y = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    for mode in MODES:
        run = lab_of(2).run(gl.gpipe(2, 2), model, x, y, loss_fn=F.mse_loss, checkpoint=mode, warmup=False)
        assert distance(run.gradients(), reference(model, x, y)) <= 1e-12, mode
