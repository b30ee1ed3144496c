"""What papers published against what is predicted here: agreements are held, misses have their reason."""

import re

import pytest

import gpipe_lab as gl
from gpipe_lab.plan.data import read
from gpipe_lab.planner.published import GOOD, comparisons


@pytest.fixture(scope="module")
def rows():
    return comparisons()


def errors(rows, table, quantity, *, of=""):
    found = {
        row.case: row.error
        for row in rows
        if row.table.startswith(table)
        and row.quantity == quantity
        and row.error is not None
        and of in row.case
    }
    assert found
    return found


def test_zero_bubble_s_rates_follow_from_its_profiled_times(rows):
    found = errors(rows, "Zero Bubble", "bubble rate")
    for name in ("m = 24, 1F1B", "ZB-H1", "ZB-H2"):
        (error,) = [e for case, e in found.items() if case.endswith(name)]
        assert abs(error) < 5e-4  # four digits are published
    (interleaved,) = [e for case, e in found.items() if case.endswith("1F1B-I")]
    assert abs(interleaved) < 0.04


def test_zero_bubble_s_memory_follows_from_the_shapes(rows):
    found = errors(rows, "Zero Bubble", "peak memory")
    assert len(found) == 8
    assert max(map(abs, found.values())) < 0.09
    assert max(abs(e) for case, e in found.items() if case.startswith("28.3B")) < 0.05


def test_gpipe_s_transformers_have_the_published_parameters_and_memory(rows):
    assert max(map(abs, errors(rows, "GPipe 1", "parameters").values())) < 0.004
    memory = errors(rows, "GPipe 1", "model memory", of="Transformer")
    assert len(memory) == 5
    off = {case: e for case, e in memory.items() if abs(e) > 0.01}
    assert [case for case in off] == ["Transformer Naive-1, L=3"]
    (row,) = [row for row in rows if row.case in off and row.quantity == "model memory"]
    assert "exchanged" in row.why


def test_gpipe_s_activations_per_accelerator_do_not_grow_with_k(rows):
    found = errors(rows, "GPipe 1", "peak activations")
    assert len(found) == 4 and all(-0.16 < e < 0 for e in found.values())  # working space is not predicted
    assert max(found.values()) - min(found.values()) < 0.02


def test_gpipe_s_speeds_with_many_microbatches_follow_the_bubble(rows):
    assert max(map(abs, errors(rows, "GPipe 2", "speed-up", of="M = 32").values())) < 0.08
    assert max(map(abs, errors(rows, "GPipe 3", "speed-up").values())) < 0.05


def test_what_papers_measured_is_compared_and_not_a_formula_with_itself(rows):
    predicted = [row for row in rows if row.predicted is not None]
    good = [row for row in predicted if abs(row.error) <= GOOD]
    assert (len(good), len(predicted)) == (22, 41)
    assert {row.table for row in rows} == {"Zero Bubble", "GPipe 1", "GPipe 2", "GPipe 3", "torchgpipe"}


def evaluate(formula, letters):
    """The value of a formula as papers write it: "(p-1)(F+B-2W)", with a number for each letter."""
    spelled = re.sub(r"(?<=[\d)])(?=[A-Za-z(])", "*", formula)
    assert re.fullmatch(r"[\d\s.()+*/A-Za-z-]+", spelled) is not None, formula
    return float(eval(spelled, {"__builtins__": {}}, dict(letters)))


@pytest.mark.parametrize(("p", "m"), [(4, 12), (2, 8), (6, 12)])
def test_published_formulas_are_what_is_simulated(p, m):
    forward, inputs, weights, v = 3.0, 3.0, 2.0, 2
    letters = {"p": p, "m": m, "F": forward, "B": inputs, "W": weights, "v": v, "M": 1}
    built = {
        "GPipe": gl.gpipe(p, m),
        "1F1B": gl.one_f_one_b(p, m),
        "Interleaved (v chunks)": gl.interleaved(p, m, v),
        "ZB-H1": gl.zero_bubble_h1(p, m),
        "ZB-H2": gl.zero_bubble_h2(p, m),
    }
    rows = {row["schedule"]: row for row in read("tables/schedule_formulas")[1]}
    assert set(built) == set(rows) - {"DualPipe"}  # of which a formula is for what overlaps
    for name, schedule in built.items():
        chunks = schedule.num_stages // p
        parts = {"backward_input": inputs, "backward_weight": weights}
        costs = gl.Costs(forward=forward / chunks, backward=(inputs + weights) / chunks, **parts)
        longest = max(row.ends[-1] - row.starts[0] for row in gl.simulate(schedule, costs).rows)
        bubble = longest - m * (forward + inputs + weights)
        assert bubble == pytest.approx(evaluate(rows[name]["bubble_time"], letters)), name
        held = max(gl.peak_in_flight(schedule)) / chunks
        assert held == pytest.approx(evaluate(rows[name]["peak_activation"], letters)), name


def test_every_miss_and_every_gap_has_its_reason(rows):
    for row in rows:
        if row.predicted is None:
            assert row.why.startswith("cannot be predicted without")
        else:
            assert bool(row.why) == (abs(row.error) > GOOD), row


def test_one_call_gives_the_table_and_the_picture(rows):
    found = gl.published()
    frame = found.frame()
    assert len(frame) == len(rows)
    assert list(frame.columns) == [
        "table", "case", "quantity", "unit", "published", "predicted", "error (%)", "why",
    ]  # fmt: skip
    assert len(found.frame(predicted_only=True)) == frame["predicted"].notna().sum()
    picture = found.plot()
    assert "within 5" in picture.alt and "cannot be predicted" in picture.alt
    assert len(picture.png()) > 10_000
    assert repr(gl.published()).startswith("Predicted over published: ")


def test_zero_bubble_s_shapes_have_the_parameters_of_their_names():
    for row in read("tables/zero_bubble_profile")[1]:
        hidden = int(row["hidden"])
        count = int(row["layers"]) * 12 * hidden**2 + 2 * int(row["vocab"]) * hidden
        assert count == pytest.approx(float(row["model"].removesuffix("B")) * 1e9, rel=0.1)
