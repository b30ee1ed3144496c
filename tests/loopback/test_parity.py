"""Over emulated streams, for every schedule, mode and kind of message: gradients of one process."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl
from tests.comparing import distance, whole_batch

from .running import run

WIDTH = 6
MODES = ("never", "always", "except_last", "every:1")
SCHEDULES = {name: make for name, make in gl.SCHEDULES.items() if name != "forward_only"}


class Begin(nn.Module):
    """From rows to a nesting of every kind of tensor that NCCL or a flat message might stumble over."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.linear(x)
        return {
            "value": y,
            "across": y.t().contiguous().t(),  # strides of another order
            "nothing": y[:, :0],
            "counts": (x.detach() * 4).to(torch.int16),
            "mask": x.detach() > 0,
            "scale": x.detach().sigmoid().bfloat16(),
            "name": "begin",
        }


class Go(nn.Module):
    """Another width at every boundary, so that each message has a shape of its own."""

    def __init__(self, width, to):
        super().__init__()
        self.linear = nn.Linear(width, to)

    def forward(self, parts):
        y = torch.tanh(self.linear(parts["value"])) + parts["nothing"].sum()
        return {**parts, "value": y, "nothing": y[:, :0], "across": parts["across"] * 1.5, "name": "go"}


class End(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, WIDTH)

    def forward(self, parts):
        y = self.linear(parts["value"]) + parts["across"] * parts["scale"].double()
        y = y + parts["nothing"].sum()
        return torch.where(parts["mask"], y, parts["counts"].double() / 8 * y)


def make_model(*, tied):
    torch.manual_seed(0)
    widths = [WIDTH, 8, 5, 9, 4, 7, WIDTH]
    layers = [Begin(), *(Go(a, b) for a, b in pairwise(widths)), End(WIDTH)]
    if tied:
        layers[-1].linear.weight = layers[0].linear.weight
    return nn.Sequential(*layers).double()


def make_batch(rows):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(rows, WIDTH, generator=generator).double() for _ in range(2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_one_process(name, mode):
    schedule = SCHEDULES[name](2, 4)
    x, y = make_batch(19)  # two sizes of micro-batches, so two signatures
    tied_alone = MODES.index(mode) % 2 == 1  # every pair of options meets, for every schedule
    for num_replicas, tied in ((1, tied_alone), (2, not tied_alone)):
        model = make_model(tied=tied)
        loss, reference = whole_batch(model, x, y)
        options = {"num_replicas": num_replicas, "checkpoint": mode, "seed": num_replicas + 2 * tied}
        found = run(schedule, model, x, y, steps=2, **options)
        assert distance(found.gradients, reference) <= 1e-12, options
        assert found.losses == pytest.approx([loss] * 2, abs=1e-12)
        assert found.heard[-1] == 0


@pytest.mark.parametrize("seed", range(4))
def test_wider_pipelines_under_many_interleavings(seed):
    x, y = make_batch(24)
    model = make_model(tied=True)
    _, reference = whole_batch(model, x, y)
    for make in (gl.gpipe, gl.one_f_one_b, gl.zero_bubble_h1):
        found = run(make(8, 8), model, x, y, seed=seed, checkpoint=MODES[seed], hoist=seed)
        assert distance(found.gradients, reference) <= 1e-12


def with_noise():
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(4)
        for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.Tanh())
    ]
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("mode", MODES)
def test_masks_statistics_and_updates_are_the_same_for_every_pipeline(mode):
    """Three steps of AdamW with clipping; random layers are keyed, and statistics move once a step."""
    x, y = make_batch(24)

    def train(schedule, **options):
        optimizer = lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01)  # noqa: E731
        return run(schedule, with_noise(), x, y, steps=3, optimizer=optimizer, max_norm=0.5, **options)

    one = train(gl.gpipe(1, 4))
    for make in (gl.gpipe, gl.one_f_one_b, gl.interleaved, gl.zero_bubble_v):
        found = train(make(2, 4), checkpoint=mode, seed=5)
        assert distance_of(found.weights, one.weights) <= 1e-10
        assert found.losses == pytest.approx(one.losses, abs=1e-12)


def distance_of(state, reference):
    floating = {name: value for name, value in reference.items() if value.is_floating_point()}
    assert set(state) == set(reference)
    return distance({name: state[name] for name in floating}, floating)


def test_bfloat16_throughout():
    """Weights, messages and gradients of sixteen bits, summed in float32 over ties and replicas."""
    x, y = make_batch(16)
    x, y = x.bfloat16(), y.bfloat16()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]).bfloat16()
    one = run(gl.gpipe(1, 8), model, x, y)
    for make in (gl.gpipe, gl.one_f_one_b, gl.zero_bubble_h1):
        found = run(make(4, 8), model, x, y, seed=2)
        assert all(g.dtype is torch.bfloat16 for g in found.gradients.values())
        assert distance(found.gradients, one.gradients) <= 2**-8
    wide = run(gl.gpipe(2, 4), model, x, y, num_replicas=2)
    assert distance(wide.gradients, one.gradients) <= 2**-7


def test_forward_only_gives_the_loss_and_outputs_of_one_process():
    x, y = make_batch(19)
    model = make_model(tied=False)
    found = run(gl.forward_only(4, 8), model, x, y, steps=2)
    with torch.no_grad():
        output = model(x)
    assert torch.allclose(found.run.outputs(), output, rtol=0, atol=1e-12)
    assert found.losses[-1] == pytest.approx(F.mse_loss(output, y).item(), abs=1e-12)
