"""Mixed precision: bf16 crosses the boundaries, float32 stays in the weights and their gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl
from tests.comparing import distance


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]).to(dtype)


def make_batch(rows=16):
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(rows, 16, generator=generator) for _ in range(2))


@pytest.mark.parametrize("mode", ["never", "always", "every:1"])
def test_autocast_is_the_same_in_the_forward_and_in_the_recompute(lab_of, mode):
    x, y = make_batch()
    plain = lab_of(1).run(
        gl.gpipe(1, 4), make_model(), x, y, loss_fn=F.mse_loss, warmup=False, autocast=torch.bfloat16
    )
    run = lab_of(4).run(
        gl.gpipe(4, 4),
        make_model(),
        x,
        y,
        loss_fn=F.mse_loss,
        warmup=False,
        autocast=torch.bfloat16,
        checkpoint=mode,
    )
    assert run.loss == plain.loss
    for name, gradient in plain.gradients().items():
        assert gradient.dtype == torch.float32
        assert torch.equal(run.gradients()[name], gradient)


def test_autocast_halves_the_bytes_between_stages(lab_of):
    x, y = make_batch()
    full = lab_of(4).run(gl.gpipe(4, 4), make_model(), x, y, loss_fn=F.mse_loss, warmup=False)
    half = lab_of(4).run(
        gl.gpipe(4, 4), make_model(), x, y, loss_fn=F.mse_loss, warmup=False, autocast=torch.bfloat16
    )
    assert half.bytes_sent == {link: size // 2 for link, size in full.bytes_sent.items()}


def test_a_cast_decides_what_crosses_where_autocast_leaves_float32(lab_of):
    """A residual stream stays float32 under autocast; a Cast at its end makes it bf16, both ways."""
    from gpipe_lab.engine.models import Block, Cast

    torch.manual_seed(0)
    blocks = [Block(16, 2), Block(16, 2)]
    x = torch.randn(4, 3, 16)
    half = {"loss_fn": F.mse_loss, "autocast": torch.bfloat16, "warmup": False}
    plain = lab_of(2).run(gl.gpipe(2, 2), nn.Sequential(*blocks), x, x, **half)
    model = nn.Sequential(blocks[0], Cast(torch.bfloat16), blocks[1])
    run = lab_of(2).run(gl.gpipe(2, 2), model, x, x, partition=[2, 1], **half)
    assert plain.bytes_sent == {(0, 1): 4 * 3 * 16 * 4, (1, 0): 4 * 3 * 16 * 4}
    assert run.bytes_sent == {link: size // 2 for link, size in plain.bytes_sent.items()}
    assert {g.dtype for g in run.gradients().values()} == {torch.float32}
    assert run.loss == pytest.approx(plain.loss, rel=0.05)


class Residual(nn.Module):
    """A block as in a ResNet."""

    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm(self.conv(x)))


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("make", [gl.gpipe, gl.zero_bubble_h1, gl.zero_bubble_v])
def test_autocast_of_a_convolutional_network_is_torchs(lab_of, make, mode):
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Residual(8), Residual(8), head)
    x, y = torch.randn(8, 3, 8, 8), torch.arange(8) % 5
    half = {"loss_fn": F.cross_entropy, "autocast": torch.bfloat16, "checkpoint": mode, "warmup": False}
    run = lab_of(2).run(make(2, 4), model, x, y, **half)
    loss = 0.0
    for part, target in zip(x.split(2), y.split(2), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            one = F.cross_entropy(model(part), target) / 4
        one.backward()
        loss += one.item()
    assert run.loss == pytest.approx(loss, rel=1e-6)
    assert distance(run.gradients(), {name: p.grad for name, p in model.named_parameters()}) < 1e-5


def test_gradients_of_bf16_weights_are_summed_in_float32(lab_of):
    """Over 64 micro-batches, rounding once is closer to the truth than rounding 64 times."""
    x, y = (t.bfloat16() for t in make_batch(64))
    model = make_model(torch.bfloat16)
    truth = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for part, target in zip(x.split(1), y.split(1), strict=True):
        model.zero_grad()
        (F.mse_loss(model(part), target) / 64).backward()
        for name, parameter in model.named_parameters():
            truth[name] += parameter.grad.double()
    model.zero_grad()
    for part, target in zip(x.split(1), y.split(1), strict=True):
        (F.mse_loss(model(part), target) / 64).backward()
    rounded_often = {name: p.grad for name, p in model.named_parameters()}
    run = lab_of(2).run(gl.gpipe(2, 64), make_model(torch.bfloat16), x, y, loss_fn=F.mse_loss, warmup=False)
    assert all(g.dtype == torch.bfloat16 for g in run.gradients().values())
    assert distance(run.gradients(), truth) < 0.004  # half of bf16's last bit
    assert distance(run.gradients(), truth) < distance(rounded_often, truth) / 2


def test_float16_is_refused(lab_of):
    x, y = make_batch()
    with pytest.raises(gl.InputError, match="bfloat16"):
        lab_of(2).run(
            gl.gpipe(2, 2), make_model(), x, y, loss_fn=F.mse_loss, warmup=False, autocast=torch.float16
        )
    with pytest.raises(gl.InputError, match="bfloat16"):
        lab_of(2).run(
            gl.gpipe(2, 2), make_model(torch.float16), x.half(), y.half(), loss_fn=F.mse_loss, warmup=False
        )
