"""Gradients and loss equal one process's, whatever the schedule, P, M and checkpoint mode."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl
from gpipe_lab.engine.batch import microbatch_sizes
from gpipe_lab.engine.layer_state import layer_seed
from tests.comparing import distance, whole_batch
from tests.pairwise import pairwise

SCHEDULES = [gl.naive, gl.gpipe, gl.one_f_one_b]
SPLIT = [gl.zero_bubble_h1, gl.zero_bubble_h2, gl.zero_bubble_v, gl.dualpipe_v]
MODES = ["never", "always", "except_last", "every:2"]


class Residual(nn.Module):
    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.linear(x)))


def make_model(dropout=0.0, dtype=torch.float64):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), *[Residual(8, dropout) for _ in range(6)], nn.Linear(8, 3)]
    return nn.Sequential(*layers).to(dtype)


def make_batch(rows, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(rows, n, generator=generator, dtype=dtype) for n in (5, 3))


MAKERS = {
    **{make.__name__: make for make in (*SCHEDULES, *SPLIT)},
    "gpipe, first in first out": functools.partial(gl.gpipe, backward="fifo"),
    "interleaved by 2": functools.partial(gl.interleaved, num_chunks=2),
    "interleaved by 3": functools.partial(gl.interleaved, num_chunks=3),
}


def exists(setting):
    """Interleaved schedules have a multiple of P micro-batches, and the model has eight layers."""
    num_ranks, chunks = setting["num_ranks"], int(setting["make"][-1]) if "by" in setting["make"] else 1
    return chunks * num_ranks <= 8 and (chunks == 1 or setting["num_microbatches"] % num_ranks == 0)


# A step after another of the same shapes posts its receives ahead; in a strict one transfers meet one by one.
FACTORS = {
    "make": list(MAKERS),
    "num_ranks": [1, 2, 3, 4],
    "num_microbatches": [1, 2, 3, 4, 5, 6, 7, 8],  # of 13 rows: mostly uneven
    "mode": MODES,
    "strict": [False, True],
    "warmup": [False, True],
}


@pytest.mark.parametrize("setting", pairwise(FACTORS, exists), ids=lambda s: "-".join(map(str, s.values())))
def test_equal_to_one_process_in_float64(lab_of, setting):
    model = make_model()
    x, y = make_batch(13)
    loss, reference = whole_batch(model, x, y)
    num_ranks = setting["num_ranks"]
    run = lab_of(num_ranks).run(
        MAKERS[setting["make"]](num_ranks, setting["num_microbatches"]),
        model,
        x,
        y,
        loss_fn=F.mse_loss,
        checkpoint=setting["mode"],
        strict=setting["strict"],
        warmup=setting["warmup"],
    )
    assert distance(run.gradients(), reference) <= 1e-12
    assert run.loss == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("mode", ["every:1", "every:2"])
def test_every_schedule_keeps_every_kth_input(lab_of, mode):
    """Also those whose stages of several layers are recomputed whole, since their backward is split."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Residual(5) for _ in range(12)]).double()
    x = torch.randn(7, 5, dtype=torch.float64)
    _, reference = whole_batch(model, x, x)
    for name, make in MAKERS.items():
        run = lab_of(2).run(make(2, 4), model, x, x, loss_fn=F.mse_loss, checkpoint=mode, warmup=False)
        assert distance(run.gradients(), reference) <= 1e-12, name


def test_a_searched_schedule_runs(lab_of):
    model = make_model(dropout=0.2)
    x, y = make_batch(12)
    costs = gl.Costs(forward=[1, 1.5, 1], backward_input=1.3, backward_weight=0.7)
    schedule = gl.search(3, 6, costs, max_in_flight=4, effort=50_000)
    plain = lab_of(3).run(gl.gpipe(3, 6), model, x, y, loss_fn=F.mse_loss, warmup=False)
    run = lab_of(3).run(schedule, model, x, y, loss_fn=F.mse_loss, warmup=False)
    assert distance(run.gradients(), plain.gradients()) <= 1e-12


@pytest.mark.parametrize("make", SCHEDULES)
def test_equal_to_one_process_in_float32(lab_of, make):
    model = make_model(dtype=torch.float32)
    x, y = make_batch(16, torch.float32)
    _, reference = whole_batch(model, x, y)
    for mode in ("never", "always"):
        run = lab_of(4).run(make(4, 8), model, x, y, loss_fn=F.mse_loss, checkpoint=mode, warmup=False)
        assert distance(run.gradients(), reference) <= 1e-6  # float32 has 6e-8; sums of 8 parts differ


@pytest.mark.parametrize("early", [False, True])
def test_early_recompute_changes_nothing(lab_of, early):
    model = make_model(dropout=0.3)
    x, y = make_batch(12)
    plain = lab_of(4).run(gl.gpipe(4, 6), model, x, y, loss_fn=F.mse_loss, warmup=False)
    run = lab_of(4).run(
        gl.gpipe(4, 6), model, x, y, loss_fn=F.mse_loss, checkpoint="always", early=early, warmup=False
    )
    assert all(torch.equal(run.gradients()[n], g) for n, g in plain.gradients().items())


def with_keyed_dropout(model, x, y, num_microbatches, seed):
    """One process and plain torch: micro-batches one after another, each layer's randomness keyed."""
    model.zero_grad()
    sizes = microbatch_sizes(len(x), num_microbatches)
    total = 0.0
    for m, (part, target) in enumerate(zip(x.split(sizes), y.split(sizes), strict=True)):
        value = part
        for index, layer in enumerate(model):
            torch.manual_seed(layer_seed(seed, 0, index, m))
            value = layer(value)
        loss = F.mse_loss(value, target) * sizes[m] / len(x)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("make", SCHEDULES)
def test_dropout_equals_one_process_and_is_the_same_for_every_p(lab_of, make):
    model = make_model(dropout=0.5)
    x, y = make_batch(12)
    for num_microbatches, modes in ((1, MODES[:2]), (5, MODES)):
        loss, reference = with_keyed_dropout(model, x, y, num_microbatches, seed=7)
        bitwise = None
        for num_stages in (1, 2, 4):
            for mode in modes:
                run = lab_of(num_stages).run(
                    make(num_stages, num_microbatches),
                    model,
                    x,
                    y,
                    loss_fn=F.mse_loss,
                    checkpoint=mode,
                    seed=7,
                    warmup=False,
                )
                assert distance(run.gradients(), reference) <= 1e-12
                assert run.loss == pytest.approx(loss, rel=1e-12)
                bitwise = run if bitwise is None else bitwise
                assert run.loss == bitwise.loss
                for name, gradient in bitwise.gradients().items():
                    assert torch.equal(run.gradients()[name], gradient), (num_stages, mode, name)


def test_dropout_depends_on_the_seed_and_on_m(lab_of):
    model = make_model(dropout=0.5)
    x, y = make_batch(12)

    def loss(num_microbatches, seed):
        schedule = gl.gpipe(2, num_microbatches)
        return lab_of(2).run(schedule, model, x, y, loss_fn=F.mse_loss, seed=seed, warmup=False).loss

    assert len({loss(2, 0), loss(2, 1), loss(3, 0)}) == 3


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 12, 13])
def test_every_batch_size_is_weighted_by_true_sizes(lab_of, rows):
    model = make_model()
    x, y = make_batch(rows)
    loss, reference = whole_batch(model, x, y)
    for num_microbatches in range(1, min(rows, 6) + 1):
        run = lab_of(2).run(gl.gpipe(2, num_microbatches), model, x, y, loss_fn=F.mse_loss, warmup=False)
        assert distance(run.gradients(), reference) <= 1e-12
        assert run.loss == pytest.approx(loss, rel=1e-12)


TARGETS = torch.tensor([0, 1, 2, -100, -100, -100, 1, 2, 0, -100])
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "loss_fn",
    [
        F.cross_entropy,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
        nn.CrossEntropyLoss(label_smoothing=0.1),
    ],
    ids=["function", "module", "sum", "ignore_index", "class weights", "smoothing"],
)
def test_torch_losses_are_read(lab_of, loss_fn):
    model = make_model()
    x, _ = make_batch(10)
    targets = TARGETS.clamp(min=0) if getattr(loss_fn, "ignore_index", -100) == 1 else TARGETS
    loss, reference = whole_batch(model, x, targets, loss_fn)
    for num_microbatches in (1, 3, 4, 10):  # with 10, some micro-batches have nothing that counts
        run = lab_of(3).run(
            gl.one_f_one_b(3, num_microbatches), model, x, targets, loss_fn=loss_fn, warmup=False
        )
        assert distance(run.gradients(), reference) <= 1e-12
        assert run.loss == pytest.approx(loss, rel=1e-12)


def test_loss_weight_and_sum(lab_of):
    model = make_model()
    x, y = make_batch(10)
    mask = (torch.arange(10) % 3 == 0).double()

    def masked_mean(output, target):
        y, mask = target
        return ((output - y).square().mean(1) * mask).sum() / mask.sum()

    loss, reference = whole_batch(model, x, (y, mask), masked_mean)
    run = lab_of(2).run(
        gl.gpipe(2, 4),
        model,
        x,
        (y, mask),
        loss_fn=masked_mean,
        loss_weight=lambda target: target[1].sum(),
        warmup=False,
    )
    assert distance(run.gradients(), reference) <= 1e-12
    assert run.loss == pytest.approx(loss, rel=1e-12)

    def summed(output, target):
        return (output - target).square().sum()

    loss, reference = whole_batch(model, x, y, summed)
    run = lab_of(2).run(gl.gpipe(2, 4), model, x, y, loss_fn=summed, loss_reduction="sum", warmup=False)
    assert distance(run.gradients(), reference) <= 1e-12
    assert run.loss == pytest.approx(loss, rel=1e-12)


def test_a_batch_with_nothing_that_counts_has_no_gradient(lab_of):
    model = make_model()
    x, _ = make_batch(6)
    run = lab_of(2).run(
        gl.gpipe(2, 3), model, x, torch.full((6,), -100), loss_fn=F.cross_entropy, warmup=False
    )
    assert run.loss == 0.0
    assert all(g.abs().max() == 0 for g in run.gradients().values())


class Twist(nn.Module):
    """Passes several tensors of different kinds, nested."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value):
        if isinstance(value, torch.Tensor):
            value = {"x": value, "extra": (torch.arange(len(value)), value > 0), "n": 3}
        positions, mask = value["extra"]
        x = value["x"] + torch.tanh(self.linear(value["x"])) * mask * (positions[:, None] % 2 + value["n"])
        return {"x": x, "extra": (positions, mask), "n": value["n"]}


class Untwist(nn.Module):
    def forward(self, value):
        return value["x"]


def test_nested_integer_and_boolean_values_cross(lab_of):
    torch.manual_seed(0)
    model = nn.Sequential(*[Twist(5) for _ in range(4)], Untwist()).double()
    x, _ = make_batch(4)
    y = torch.zeros(4, 5, dtype=torch.float64)
    for num_stages in (1, 2, 3, 4):
        for mode in MODES:
            run = lab_of(num_stages).run(
                gl.gpipe(num_stages, 1), model, x, y, loss_fn=F.mse_loss, checkpoint=mode
            )
            _, reference = whole_batch(model, x, y)
            assert distance(run.gradients(), reference) <= 1e-12


def test_token_ids_as_first_input_and_checkpointing(lab_of):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), Residual(8), Residual(8), nn.Linear(8, 11)).double()
    ids = torch.randint(0, 11, (6,))
    loss, reference = whole_batch(model, ids, ids, F.cross_entropy)
    for mode in MODES:
        run = lab_of(4).run(
            gl.gpipe(4, 3), model, ids, ids, loss_fn=F.cross_entropy, checkpoint=mode, warmup=False
        )
        assert distance(run.gradients(), reference) <= 1e-12
        assert run.loss == pytest.approx(loss, rel=1e-12)


class InPlace(nn.Module):
    def forward(self, x):
        return x.add_(1.0).mul_(2.0)


@pytest.mark.parametrize("first", [nn.ReLU(inplace=True), InPlace()], ids=["relu", "custom"])
def test_a_stage_may_start_with_a_layer_that_works_in_place(lab_of, first):
    torch.manual_seed(0)
    model = nn.Sequential(first, nn.Linear(5, 8), first, nn.Linear(8, 8), first, nn.Linear(8, 3)).double()
    x, y = make_batch(8)
    kept = x.clone()
    _, reference = whole_batch(model, x.clone(), y)
    for mode in MODES:
        run = lab_of(3).run(gl.gpipe(3, 4), model, x, y, loss_fn=F.mse_loss, checkpoint=mode, repeats=2)
        assert distance(run.gradients(), reference) <= 1e-12, mode
    assert torch.equal(x, kept)


def test_a_frozen_first_stage_sends_no_gradients(lab_of):
    model = make_model()
    for layer in model[:4]:
        layer.requires_grad_(False)
    x, y = make_batch(8)
    model.zero_grad()
    F.mse_loss(model(x), y).backward()
    reference = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for mode in MODES:
        run = lab_of(4).run(gl.one_f_one_b(4, 4), model, x, y, loss_fn=F.mse_loss, checkpoint=mode)
        assert distance(run.gradients(), reference) <= 1e-12
        assert (1, 0) not in run.bytes_sent and (2, 1) not in run.bytes_sent
        assert (3, 2) in run.bytes_sent


def test_bytes_sent_equal_the_formula(lab_of):
    """2·M·m·width·8 bytes over each boundary and step: outputs one way, their gradients the other."""
    model = make_model()
    x, y = make_batch(12)
    run = lab_of(4).run(gl.gpipe(4, 6), model, x, y, loss_fn=F.mse_loss, warmup=False)
    each = 12 * 8 * 8
    expected = {link: each for stage in range(3) for link in ((stage, stage + 1), (stage + 1, stage))}
    assert run.bytes_sent == expected


def test_forward_calls_by_checkpoint_mode(lab_of):
    """2M, 2M-1 and M forward computations of a stage for always, except_last and never."""
    model = make_model()
    x, y = make_batch(12)
    for mode, expected in (("always", 12), ("except_last", 11), ("never", 6)):
        run = lab_of(2).run(gl.gpipe(2, 6), model, x, y, loss_fn=F.mse_loss, checkpoint=mode, warmup=False)
        for rank in range(2):
            events = [e for e in run.trace.computations if e.rank == rank]
            assert sum(e.op.kind in (gl.Kind.F, gl.Kind.R) for e in events) == expected


def test_a_schedule_of_several_stages_on_a_rank(lab_of):
    """The looped placement 0 1 0 1, written by hand: values pass within a rank as between ranks."""
    model = make_model()
    x, y = make_batch(8)
    _, reference = whole_batch(model, x, y)
    parse = gl.Op.parse
    rows = (
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    )
    schedule = gl.Schedule("looped", 2, (0, 1, 0, 1), tuple(tuple(map(parse, r.split())) for r in rows))
    run = lab_of(2).run(schedule, model, x, y, loss_fn=F.mse_loss)
    assert distance(run.gradients(), reference) <= 1e-12
    both = gl.Schedule(
        "both on one rank",
        1,
        (0, 0, 1),
        (tuple(map(parse, "0F0 1F0 1B0 0B0".split())), tuple(map(parse, "2F0 2B0".split()))),
    )
    for mode in ("never", "always"):
        run = lab_of(2).run(both, model, x, y, loss_fn=F.mse_loss, checkpoint=mode)
        assert distance(run.gradients(), reference) <= 1e-12


def test_factories_give_the_same_model_for_every_p(lab_of):
    from gpipe_lab.engine.models import gpt, next_token_loss

    model = gpt(3, width=16, num_heads=2, vocabulary=13, length=6, dropout=0.1)
    ids = torch.randint(0, 13, (4, 6), generator=torch.Generator().manual_seed(0))
    runs = [
        lab_of(p).run(gl.gpipe(p, 2), model, ids, ids, loss_fn=next_token_loss, seed=3, warmup=False)
        for p in (1, 2, 3, 4)
    ]
    for run in runs[1:]:
        assert run.loss == runs[0].loss
        assert all(torch.equal(run.gradients()[n], g) for n, g in runs[0].gradients().items())


def test_forward_only_gives_the_outputs(lab_of):
    model = make_model()
    x, y = make_batch(7)
    run = lab_of(3).run(gl.forward_only(3, 4), model, x, y, loss_fn=F.mse_loss, warmup=False)
    with torch.no_grad():
        assert torch.allclose(run.outputs(), model(x), rtol=1e-12)
    assert run.loss == pytest.approx(F.mse_loss(model(x), y).item(), rel=1e-12)
    assert run.gradients() == {}
