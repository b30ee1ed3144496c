"""The calculator: what one rank holds and sends, by method."""

from typing import NamedTuple

import pytest

import gpipe_lab as gl
from gpipe_lab.course.exercises import ch01
from gpipe_lab.planner.sharing import METHODS, share


class Shape(NamedTuple):
    """Blocks of 12h² parameters, 34·s·b·h bytes each with fused attention (Korthikanti et al. 2022)."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    sequence: int = 32768

    @property
    def parameters(self):
        return 12 * self.layers * self.hidden**2

    def layer_saved_bytes(self, microbatch_size, *, fused_attention=True):
        scores = 0 if fused_attention else 5 * self.heads * self.sequence**2
        return microbatch_size * (34 * self.sequence * self.hidden + scores)

    def boundary_bytes(self, microbatch_size):
        return 2 * microbatch_size * self.sequence * self.hidden


MODEL = Shape()


def test_activations_of_a_7b_at_32k_tokens():
    assert share(MODEL, "one device", 1).activations == pytest.approx(146e9, rel=0.001)
    whole = share(MODEL, "one device", 1, fused_attention=False)
    assert whole.activations == pytest.approx(5.64e12, rel=0.001)


@pytest.mark.parametrize(
    ("method", "stage"), [("data parallel", 0), ("ZeRO-1", 1), ("ZeRO-2", 2), ("fully sharded", 3)]
)
@pytest.mark.parametrize("num_ranks", [1, 2, 64])
def test_zero_cuts_one_more_at_each_stage(method, stage, num_ranks):
    found = share(MODEL, method, num_ranks)
    state = found.parameters + found.gradients + found.optimizer
    assert state == pytest.approx(ch01.state_solution(MODEL.parameters, num_ranks, stage))
    assert found.activations == share(MODEL, "one device", 1).activations  # whole


@pytest.mark.parametrize(
    ("method", "name"), [("data parallel", "data"), ("tensor parallel", "tensor"), ("pipeline", "pipeline")]
)
def test_bytes_sent_are_those_of_the_exercise(method, name):
    sent = share(MODEL, method, 8).sent
    assert sent == pytest.approx(ch01.solution(name, MODEL.layers, MODEL.hidden, MODEL.sequence, 8))


@pytest.mark.parametrize("method", METHODS)
def test_one_rank_is_one_device(method):
    assert share(MODEL, method, 1)._replace(method="") == share(MODEL, "one device", 1)._replace(method="")


def test_only_cuts_of_the_model_shrink_everything():
    one = share(MODEL, "one device", 1)
    for method in ("tensor + sequence parallel", "pipeline"):
        assert share(MODEL, method, 4).held == pytest.approx(one.held / 4)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_tensor_parallelism_leaves_ten_of_34_parts_whole(num_ranks):
    """Korthikanti et al. 2022, §4.1: s·b·h·(10 + 24/t + 5·a·s/(h·t)) bytes a layer."""
    s, h, a = MODEL.sequence, MODEL.hidden, MODEL.heads
    linear = MODEL.layers * s * h * (10 + 24 / num_ranks)
    assert share(MODEL, "tensor parallel", num_ranks).activations == pytest.approx(linear)
    scores = MODEL.layers * 5 * a * s * s / num_ranks
    whole = share(MODEL, "tensor parallel", num_ranks, fused_attention=False)
    assert whole.activations == pytest.approx(linear + scores)
    assert whole.sent == share(MODEL, "tensor + sequence parallel", num_ranks).sent


def test_a_70b_in_32_parts_holds_more_than_a_card_without_sequence_parallelism():
    table = gl.share_table(gl.MODELS["llama3-70b"], 32)
    assert round(table.loc["tensor parallel", "held (GB)"]) == 92
    assert table.loc["tensor parallel", "fits 80 GB"] == "no"
    assert table.loc["tensor + sequence parallel", "fits 80 GB"] == "yes"


def test_a_table_says_what_fits():
    table = gl.share_table(MODEL, 8, card_gb=80)
    assert list(table.index) == list(METHODS)
    assert table.loc["pipeline", "fits 80 GB"] == "yes" and table.loc["fully sharded", "fits 80 GB"] == "no"


def test_the_calculator_follows_its_controls():
    calculator = gl.Calculator({"a": MODEL, "b": Shape(layers=1)}, "a")
    before = calculator.table.value
    calculator.model.value = "b"
    assert calculator.table.value != before
    calculator.num_ranks.slider.value = 1
    assert calculator.frame().loc["pipeline"].equals(calculator.frame().loc["one device"])


def test_misfits_are_refused():
    with pytest.raises(gl.InputError, match="a method is one of"):
        share(MODEL, "magic", 2)
    with pytest.raises(gl.InputError, match="num_ranks"):
        share(MODEL, "pipeline", 0)
