"""Pictures: what they say, how they are stored, and that their numbers are the traces' own."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import combinations

import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import PathPatch, Rectangle
from PIL import Image

import gpipe_lab as gl
from gpipe_lab.lab.run import Run
from gpipe_lab.plan import formulas
from gpipe_lab.plan.memory import CATEGORIES
from gpipe_lab.plan.ops import Kind, Op
from gpipe_lab.plan.trace import MEASURED, PACED
from gpipe_lab.view.cells import gaps, wants_arrows
from gpipe_lab.view.curves import bubbles, plot_bubble_curve
from gpipe_lab.view.gantt import plot_overlay, plot_schedule, plot_trace
from gpipe_lab.view.memory import chosen_ranks, plot_in_flight, plot_memory
from gpipe_lab.view.picture import alt_text, show
from gpipe_lab.view.style import CATEGORY_LOOKS, KINDS, WAITING, fitting_size, number, size_of
from gpipe_lab.view.tables import explain_error, held_at_once, summary_table

COSTS = gl.Costs(forward=10, backward=20)
MIB = 2**20


def run_like(schedule: gl.Schedule, costs: gl.Costs = COSTS, *, source: str = PACED) -> gl.Trace:
    """A trace as a run leaves it: lowered, with waits, with a device."""
    trace = gl.simulate(gl.lower(schedule), replace(costs, send=1.0))
    waits = [gl.Event(gap.rank, "wait", Op(Kind.F, 0, 0), gap.start_ms, gap.end_ms) for gap in gaps(trace)]
    return replace(trace, events=(*trace.events, *waits), source=source, device="CPU, gloo")


def memory_of(trace: gl.Trace, limit: int | None = None) -> gl.MemoryReport:
    size = gl.StageBytes(saved=3 * MIB, boundary=MIB, weights={"parameters": 4 * MIB, "gradients": 4 * MIB})
    return gl.simulate_memory(trace, [size] * trace.schedule.num_stages, limit_bytes=limit)


def split_gpipe(num_stages: int, num_microbatches: int) -> gl.Schedule:
    whole = gl.gpipe(num_stages, num_microbatches)
    rows = []
    for row in whole.ops:
        backwards = [op for op in row if op.kind is Kind.B]
        rows.append(
            (
                *(op for op in row if op.kind is Kind.F),
                *(op._replace(kind=Kind.I) for op in backwards),
                *(op._replace(kind=Kind.W) for op in backwards),
            )
        )
    return replace(whole, name="split", ops=tuple(rows))


def texts(figure) -> str:
    found = [text.get_text() for text in figure.texts]
    found += [key.get_label() for key in figure.artists]
    for axes in figure.axes:
        found += [text.get_text() for text in axes.texts]
        found += [label.get_text() for label in axes.get_yticklabels()]
    return "\n".join(found)


FIGURES = {
    "1x1": lambda: plot_trace(gl.simulate(gl.gpipe(1, 1), COSTS)),
    "2x2": lambda: plot_trace(gl.simulate(gl.gpipe(2, 2), COSTS)),
    "8x32": lambda: plot_trace(gl.simulate(gl.gpipe(8, 32), COSTS)),
    "measured": lambda: plot_trace(trace := run_like(gl.one_f_one_b(8, 32)), memory_of(trace)),
    "recompute": lambda: plot_trace(
        trace := run_like(gl.with_recompute(gl.gpipe(4, 8), "always")), memory_of(trace, 40 * MIB)
    ),
    "split": lambda: plot_trace(gl.simulate(split_gpipe(4, 4), COSTS)),
    "schedule": lambda: plot_schedule(gl.one_f_one_b(4, 8)),
    "overlay": lambda: plot_overlay([gl.simulate(gl.gpipe(4, 8), COSTS), run_like(gl.gpipe(4, 8))]),
    "memory": lambda: plot_memory(memory_of(gl.simulate(gl.gpipe(4, 8), COSTS), 50 * MIB)),
    "in flight": lambda: plot_in_flight(gl.one_f_one_b(4, 8)),
    "curve": lambda: plot_bubble_curve(measured=[run_like(gl.gpipe(4, 4))]),
    "laundry": lambda: plot_trace(
        gl.simulate(gl.forward_only(3, 4), gl.Costs(forward=30)),
        row_names=["wash", "dry", "fold"],
        unit="min",
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_small_opaque_described_and_outside_pyplot(name):
    import matplotlib.pyplot as plt

    figure = FIGURES[name]()
    png = figure.png()
    image = Image.open(BytesIO(png)).convert("RGBA")
    assert len(png) < 150_000
    assert image.getextrema()[3] == (255, 255), "opaque"
    assert image.getpixel((0, 0)) == (255, 255, 255, 255)
    assert len(alt_text(figure)) > 40
    assert any(character.isdigit() for character in alt_text(figure))
    assert plt.get_fignums() == []


def test_show_puts_alt_text_into_the_metadata_and_leaves_nothing_open(monkeypatch):
    import IPython.display
    import matplotlib.pyplot as plt

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, **kw: shown.append((data, kw)))
    figure = plot_trace(gl.simulate(gl.gpipe(4, 4), COSTS))
    show(figure)
    plain, _ = plt.subplots()
    plain.axes[0].set_title("a learner's own figure")
    show(plain)
    (data, options), (words, _), (_, plain_options), _ = shown
    assert options["raw"] and options["metadata"]["image/png"]["alt"] == alt_text(figure)
    assert data["text/plain"] == alt_text(figure)
    assert html.escape(alt_text(figure)) in words.data, "JupyterLab shows no alt text of a PNG"
    assert "learner's own figure" in plain_options["metadata"]["image/png"]["alt"]
    assert plt.get_fignums() == []


def test_a_picture_as_the_last_line_of_a_cell_displays_once(monkeypatch):
    import IPython.display
    from IPython.core.formatters import DisplayFormatter

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, **kw: shown.append(data))
    figure = plot_trace(gl.simulate(gl.gpipe(2, 2), COSTS))
    formatter = DisplayFormatter()
    formatter.ipython_display_formatter(figure)
    picture, words = shown
    assert set(picture) == {"image/png", "text/plain"} and figure.alt in html.unescape(words.data)


@pytest.mark.parametrize("name", FIGURES)
def test_what_a_cell_keeps_of_a_picture_stays_below_the_limit(name):
    data, metadata = FIGURES[name]()._repr_mimebundle_()
    assert len(json.dumps({"data": data, "metadata": metadata})) < 195_000


def test_importing_the_package_does_not_import_matplotlib():
    code = "import sys, gpipe_lab; assert 'matplotlib' not in sys.modules and 'ipywidgets' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_title_says_what_ran():
    trace = replace(run_like(gl.with_recompute(gl.gpipe(4, 4), "always")), overran=3)
    said = texts(plot_trace(trace))
    for part in (
        "gpipe, P = 4, M = 4",
        "measured, paced on CPU, gloo",
        f"makespan {number(trace.makespan_ms)} ms",
        f"bubble {100 * trace.bubble_fraction:.1f} %",
        f"useful {100 * trace.useful_fraction:.1f} %",
        "3 operations overran their pace",
        "waiting for a message",
        "recompute (R)",
    ):
        assert part in said
    assert "M = 4, recompute" in said
    assert "1 operation overran its pace" in texts(plot_trace(replace(trace, overran=1)))
    assert "overran" not in texts(plot_trace(replace(trace, overran=0)))
    assert "recompute" not in texts(plot_trace(run_like(gl.gpipe(4, 4))))
    assert plot_trace(trace, title="The price").alt.startswith("Gantt chart. The price; gpipe, P = 4")
    titled = texts(plot_trace(trace, title="The price"))
    assert "The price" in titled and "gpipe, P = 4, M = 4" in titled


def test_alt_text_has_the_main_numbers():
    trace = gl.simulate(gl.gpipe(4, 4), COSTS)
    alt = plot_trace(trace, memory_of(trace, 30 * MIB)).alt
    for part in (
        "P = 4, M = 4",
        "simulated",
        "210 ms",
        "42.9 %",
        "rank 0 57.1 %",
        "20 MiB at F3",
        "Limit 30 MiB",
    ):
        assert part in alt


def test_numbers_stand_in_cells_only_where_they_fit():
    assert fitting_size(["0", "9"], [20, 20], (8, 6)) == 8
    assert fitting_size(["10", "31"], [9.5, 9.5], (8, 6)) == 6
    assert fitting_size(["10", "31"], [4, 4], (8, 6)) is None


def test_arrows_are_left_out_where_dense():
    assert wants_arrows(gl.simulate(gl.gpipe(4, 4)), "auto")
    assert not wants_arrows(gl.simulate(gl.gpipe(8, 32)), "auto")
    assert not wants_arrows(gl.simulate(gl.gpipe(1, 4)), "auto")
    assert not wants_arrows(gl.simulate(gl.gpipe(4, 4)), False)


def test_the_peak_is_tied_to_the_operation_that_caused_it():
    trace = gl.simulate(gl.gpipe(3, 4), COSTS)
    figure = plot_trace(trace, memory_of(trace))
    outlines = [p for p in figure.axes[0].patches if isinstance(p, Rectangle) and not p.get_fill()]
    last_forward = {e.rank: e for e in trace.computations if e.op.kind is Kind.F and e.op.microbatch == 3}
    assert "memory peak of its rank" in texts(figure)
    assert all(outline.get_linestyle() not in ("-", "solid") for outline in outlines), "no critical path"
    assert [outline.get_x() for outline in outlines] == [last_forward[rank].start_ms for rank in range(3)]
    assert len(figure.axes) == 4
    assert "peak 20 MiB at F3" in texts(figure)


def test_memory_of_many_ranks_shows_the_first_the_last_and_the_highest():
    report = memory_of(gl.simulate(gl.one_f_one_b(8, 8)))
    assert chosen_ranks(report, None) == (0, 7)
    assert chosen_ranks(report, [2, 5]) == (2, 5)
    with pytest.raises(gl.InputError, match="ranks are among"):
        chosen_ranks(report, [9])


def test_bubble_gaps_add_up_to_the_bubble():
    trace = gl.simulate(gl.one_f_one_b(4, 8), COSTS)
    idle = sum(gap.end_ms - gap.start_ms for gap in gaps(trace))
    assert idle / (trace.makespan_ms * 4) == pytest.approx(trace.bubble_fraction)


@pytest.mark.parametrize("by", ["rank", "trace"])
def test_overlay_names_every_row_and_every_end(by):
    traces = [gl.simulate(gl.gpipe(2, 3), COSTS), run_like(gl.gpipe(2, 3))]
    figure = plot_overlay(traces, ["simulated", "measured"], by=by)
    said = texts(figure)
    assert "end of simulated" in said and "end of measured" in said
    assert said.count("rank 0") == said.count("rank 1") == (1 if by == "rank" else 2)
    fills = [artist for artist in figure.axes[0].get_children() if isinstance(artist, PathPatch)]
    assert len(fills) == 2 * 2 + 1, "forward and backward of both, and the waits"


def test_overlay_and_rows_refuse_what_does_not_match():
    trace = gl.simulate(gl.gpipe(2, 3))
    with pytest.raises(gl.InputError, match="one label for each"):
        plot_overlay([trace], ["a", "b"])
    with pytest.raises(gl.InputError, match="by is"):
        plot_overlay([trace], by="stage")
    with pytest.raises(gl.InputError, match="one entry per rank"):
        plot_trace(trace, row_names=["only one"])


def test_bubble_curve_groups_measurements_and_names_the_needed_m():
    runs = [run_like(gl.gpipe(4, 4), gl.Costs(forward=f, backward=20)) for f in (9, 10, 13)]
    spread = bubbles(runs)[4, 4]
    shares = sorted(run.bubble_fraction for run in runs)
    assert (spread.lowest, spread.middle, spread.highest) == tuple(shares)
    figure = plot_bubble_curve([4, 8], [1, 8, 64], measured=runs)
    assert "M ≥ 7" in texts(figure) and "M ≥ 28" in texts(figure)
    assert "87.5 % at M = 1" in figure.alt
    assert "Measured, median and spread: P = 4, M = 4" in figure.alt
    assert "large mark with bar: measured, paced, median and spread" in texts(figure)
    single = plot_bubble_curve([4, 8], [1, 8, 64], measured=runs[:1])
    assert "large mark: measured, paced, one run each" in texts(single)
    assert "Measured, one run each: P = 4" in single.alt and "median" not in texts(single) + single.alt
    with pytest.raises(gl.InputError):
        plot_bubble_curve([0])


@pytest.mark.parametrize("stages", [[8], [2, 4, 8]])
def test_the_labels_of_the_bubble_curve_cover_no_mark_and_no_other_label(stages):
    many = [1, 2, 4, 8, 16, 32, 64, 128]
    runs = [run_like(gl.gpipe(p, m)) for p in stages for m in many]
    figure = plot_bubble_curve(stages, many, measured=runs)
    figure.canvas.draw()
    axes = figure.axes[0]
    labels = [t.get_window_extent() for t in axes.texts if t.get_text().startswith("M ≥")]
    assert len(labels) == 2 * len(stages)
    radius = 5.5 * figure.dpi / 72
    for (_, m), spread in bubbles(runs).items():
        x, y = axes.transData.transform((m, spread.middle))
        assert not any(
            box.x0 < x + radius and x - radius < box.x1 and box.y0 < y + radius and y - radius < box.y1
            for box in labels
        )
    assert not any(a.overlaps(b) for a, b in combinations(labels, 2))


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("name", gl.SCHEDULES)
def test_the_legend_names_the_letter_of_every_kind_in_the_picture_and_of_no_other(name, mode):
    schedule = gl.SCHEDULES[name](2, 4)
    if mode == "always" and any(op.kind in (Kind.I, Kind.W) for row in schedule.ops for op in row):
        pytest.skip("a split backward is not recomputed")
    schedule = gl.with_recompute(schedule, mode)
    kinds = {op.kind.value for row in schedule.ops for op in row}
    said = texts(plot_schedule(schedule)) + texts(plot_trace(gl.simulate(schedule, COSTS)))
    assert set(re.findall(r"\(([A-Z])\)", said)) == kinds


def test_kinds_stay_apart_without_colour():
    def grey(color: str) -> float:
        red, green, blue = to_rgb(color)
        return 0.299 * red + 0.587 * green + 0.114 * blue

    forward, backward = KINDS[Kind.F], KINDS[Kind.B]
    assert abs(grey(forward.face) - grey(backward.face)) > 0.3
    assert KINDS[Kind.R].hatch and KINDS[Kind.W].hatch and WAITING.hatch
    assert abs(grey(KINDS[Kind.I].face) - grey(KINDS[Kind.W].face)) > 0.25
    for look in KINDS.values():
        assert abs(grey(look.ink) - grey(look.face)) > 0.4, "numbers are legible"


@pytest.mark.parametrize("make", [gl.naive, gl.gpipe, gl.one_f_one_b, gl.forward_only])
def test_summary_predicts_what_is_simulated(make):
    schedule = make(4, 6)
    trace = gl.simulate(schedule, COSTS)
    table = summary_table(trace, [run_like(schedule) for _ in range(3)])
    assert list(table.columns) == ["predicted", "simulated", PACED, "lowest", "highest"]
    assert table["predicted"].tolist() == pytest.approx(table["simulated"].tolist(), abs=0.01)
    assert table.loc["peak in flight", "simulated"] == max(gl.peak_in_flight(schedule))
    assert held_at_once(trace) == gl.peak_in_flight(schedule)


@pytest.mark.parametrize("name", ["naive", "gpipe", "one_f_one_b", "interleaved", "zero_bubble_h1"])
@pytest.mark.parametrize("mode", ["never", "always"])
def test_every_closed_form_stands_in_the_table_and_is_right(name, mode):
    schedule = gl.with_recompute(gl.SCHEDULES[name](4, 8), mode)
    costs = gl.Costs(forward=3, backward=5, backward_input=3, backward_weight=2)
    table = summary_table(gl.simulate(schedule, costs))
    if name == "zero_bubble_h1" and mode == "always":
        assert table["predicted"].isna().all()  # no formula is known
    else:
        assert list(table["predicted"]) == pytest.approx(list(table["simulated"]), abs=0.011)


def test_summary_with_recompute_and_where_no_formula_holds():
    always = gl.simulate(gl.with_recompute(gl.gpipe(4, 8), "always"), COSTS)
    table = summary_table(always)
    assert table["predicted"].tolist() == pytest.approx(table["simulated"].tolist(), abs=0.01)
    assert table.loc["makespan (ms)", "predicted"] == formulas.pipeline_ms(4, 8, 10, 30)
    unequal = gl.simulate(gl.gpipe(2, 4), gl.Costs(forward=[1, 3], backward=2))
    assert summary_table(unequal)["predicted"].isna().all()
    assert "predicted" not in summary_table(unequal, predicted=False)


@dataclass(frozen=True)
class Altered:
    """Operation times with a change for some of them."""

    change: dict[Op, float]
    send: float = 0.0
    scale: float = 1.0

    def duration_ms(self, op: Op, schedule: gl.Schedule) -> float:
        return COSTS.duration_ms(op, schedule) * self.scale + self.change.get(op, 0.0)

    def delay_ms(self, op: Op, schedule: gl.Schedule) -> float:
        return self.send


@pytest.mark.parametrize(
    ("costs", "source", "cause"),
    [
        (Altered({}, scale=1.25), MEASURED, "computation"),
        (Altered({Op(Kind.F, 1, 0): 15.0}), MEASURED, "imbalance"),
        (Altered({}, send=2.0), MEASURED, "communication and launch"),
        (Altered({Op(Kind.B, 0, 0): 9.0}), PACED, "pace missed"),
    ],
)
def test_error_explained_finds_the_cause_and_adds_up(costs, source, cause):
    schedule = gl.gpipe(4, 4)
    simulated = gl.simulate(schedule, COSTS)
    measured = replace(gl.simulate(schedule, costs), source=source)
    explained = explain_error(measured, simulated)
    gap = measured.makespan_ms - simulated.makespan_ms
    assert gap > 1
    assert sum(explained.parts_ms.values()) == pytest.approx(gap)
    assert explained.parts_ms[cause] == pytest.approx(gap)
    assert explained.frame().loc["total", "ms"] == pytest.approx(gap, abs=0.01)
    assert cause in str(explained) and f"{gap:+.1f} ms" in str(explained)


@pytest.mark.parametrize("make", [gl.gpipe, gl.naive])
def test_error_explained_takes_contention_out_of_computation(make):
    schedule = make(4, 4)
    simulated = gl.simulate(schedule, COSTS)
    measured = replace(gl.simulate(schedule, Altered({}, scale=1.5)), source=MEASURED)
    whole = explain_error(measured, simulated).parts_ms
    parts = explain_error(measured, simulated, contention=1.4).parts_ms
    gap = measured.makespan_ms - simulated.makespan_ms
    assert sum(parts.values()) == pytest.approx(gap)
    assert parts["contention"] + parts["computation"] == pytest.approx(whole["computation"])
    if make is gl.naive:
        assert parts["contention"] == 0, "one rank at a time has no company"
    else:
        assert 0 < parts["contention"] < 0.4 * simulated.makespan_ms
    assert explain_error(measured, simulated, contention=9.0).parts_ms["computation"] >= 0
    assert explain_error(simulated, simulated, contention=2.0).parts_ms["contention"] == 0
    paced = replace(measured, source=PACED)
    assert "contention" not in explain_error(paced, simulated, contention=1.4).parts_ms
    with pytest.raises(gl.InputError, match="contention"):
        explain_error(measured, simulated, contention=0)


def test_error_explained_refuses_traces_of_different_schedules():
    with pytest.raises(gl.InputError, match="same operations"):
        explain_error(gl.simulate(gl.gpipe(2, 4)), gl.simulate(gl.gpipe(2, 3)))


def test_sizes_read_as_people_write_them():
    assert [size_of(n) for n in (0, 512, 1023, 1536, 20 * MIB, 3 * 2**30)] == [
        "0 B",
        "512 B",
        "1023 B",
        "1.5 KiB",
        "20 MiB",
        "3 GiB",
    ]
    assert [number(x) for x in (14.0, 3.25, 333.3, 1170.0)] == ["14", "3.25", "333", "1,170"]


def test_the_delay_of_simulated_messages_is_not_taken_for_computation():
    from gpipe_lab.view.tables import explain_error

    schedule = gl.gpipe(3, 4)
    slow, quick = (gl.simulate(schedule, gl.Costs(send=send)) for send in (3.0, 1.0))
    explained = explain_error(slow, quick)
    assert explained.parts_ms["computation"] == explained.parts_ms["imbalance"] == 0
    assert explained.parts_ms["communication and launch"] == slow.makespan_ms - quick.makespan_ms > 0


def test_a_backward_that_was_not_split_is_said():
    trace = run_like(gl.zero_bubble_h1(3, 4))
    words = alt_text(plot_trace(trace))
    assert "not split" not in words
    words = alt_text(plot_trace(replace(trace, unsplit=((1, "2.weight"),))))
    assert "not split: stage 1" in words and "2.weight" in words


def test_a_schedule_in_the_place_of_its_trace_is_refused_with_what_draws_it():
    with pytest.raises(gl.InputError, match="a trace, simulated or measured") as caught:
        gl.plot_trace(gl.gpipe(2, 2))
    assert "gl.plot_schedule(schedule)" in caught.value.remedy


def test_pictures_are_methods_of_what_they_show():
    schedule = gl.gpipe(2, 2)
    trace = gl.simulate(schedule, COSTS)
    memory = memory_of(trace)
    assert schedule.plot().alt == gl.plot_schedule(schedule).alt
    assert trace.plot(memory=memory).alt == gl.plot_trace(trace, memory).alt
    assert memory.plot().alt == gl.plot_memory(memory).alt
    run = Run(loss=0.0, trace=trace, memory=memory, bytes_sent={}, makespans_ms=(1.0,))
    assert run.plot(title="mine").alt == gl.plot_trace(trace, memory, title="mine").alt


def test_every_category_of_memory_has_a_look_of_its_own():
    assert list(CATEGORY_LOOKS) == list(CATEGORIES)
    assert len({look[1:] for look in CATEGORY_LOOKS.values()}) == len(CATEGORIES)
