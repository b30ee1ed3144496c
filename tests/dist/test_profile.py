"""Layers measured one by one, and cuts made from what was measured."""

import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl


class Slow(nn.Module):
    """A layer that takes its time without computing much."""

    def __init__(self, ms):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.ms = ms

    def forward(self, x):
        import time

        time.sleep(self.ms / 1000)
        return self.linear(x)


def test_counts_are_exact(lab_of):
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    profile = lab_of(2).profile(model, torch.randn(5, 8), torch.randn(5, 4), loss_fn=F.mse_loss)
    first, tanh, last = profile.layers
    assert [layer.name for layer in profile.layers] == ["0", "1", "2"]
    assert (first.parameters, tanh.parameters, last.parameters) == (8 * 32 + 32, 0, 32 * 4 + 4)
    assert first.flops == 2 * (2 * 5 * 8 * 32)  # forward, and the weight's gradient: the input needs none
    assert last.flops == 3 * (2 * 5 * 32 * 4)
    assert tanh.saved_bytes == first.output_bytes == 5 * 32 * 4
    assert last.saved_bytes == 5 * 32 * 4 + 2 * 5 * 4 * 4  # its input; for the loss its output and the target
    assert all(layer.forward_ms > 0 and layer.backward_ms > 0 for layer in profile.layers)
    assert list(profile.frame()["name"]) == ["0", "1", "2"]


def test_cuts_differ_by_what_they_balance(lab_of):
    """Embedding: heavy in parameters, almost free in time. Head and loss: heavy in both."""
    model = gl.gpt(6, width=64, num_heads=4, vocabulary=2000, length=32)
    ids = torch.randint(0, 2000, (4, 32), generator=torch.Generator().manual_seed(0))
    profile = lab_of(2).profile(model, ids, ids, loss_fn=gl.next_token_loss)
    by = {name: profile.sizes(4, name) for name in ("parameters", "flops", "time", "memory")}
    assert all(sum(sizes) == 8 and min(sizes) >= 1 for sizes in by.values())
    assert by["parameters"][0] == 1  # the embedding alone
    assert by["flops"][0] > 1
    assert by["flops"][-1] == 1  # the head alone
    slow = nn.Sequential(Slow(1), Slow(1), Slow(1), Slow(12), Slow(1))
    assert lab_of(2).profile(slow, torch.randn(2, 8)).sizes(2, "time") in ([3, 2], [4, 1])


def test_memory_counts_what_is_in_flight(lab_of):
    model = [nn.Linear(8, 8) for _ in range(8)]
    profile = lab_of(2).profile(model, torch.randn(512, 8))
    assert profile.sizes(4, "memory") == [2, 2, 2, 2]
    early, *_, late = profile.sizes(4, "memory", schedule=gl.one_f_one_b(4, 8))
    assert early < late  # the first stage holds four micro-batches, the last one


def test_a_run_may_be_cut_by_what_is_measured(lab_of):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    x = torch.randn(12, 8)
    reference = lab_of(2).run(gl.gpipe(2, 4), model, x, x, loss_fn=F.mse_loss)
    for by in ("parameters", "flops", "time", "memory", [1, 5]):
        run = lab_of(2).run(gl.gpipe(2, 4), model, x, x, loss_fn=F.mse_loss, partition=by)
        assert run.loss == reference.loss
