"""Exercises grade rightly, progress is kept, predictions never block, the doctor tells the machine."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpipe_lab import check, claim, claims, doctor, hint, predict, progress, solution, track
from gpipe_lab.course import exercise, kept, strict
from gpipe_lab.course.chapters import NOTEBOOKS, chapters, read_chapter
from gpipe_lab.course.exercise import Answer, Exercise, Mismatch, over, source_of
from gpipe_lab.course.exercises import all_exercises, ch04, ch05, find
from gpipe_lab.course.publish import clean
from gpipe_lab.plan.errors import InputError
from gpipe_lab.plan.memory import StageBytes, simulate_memory
from gpipe_lab.plan.recompute import with_recompute
from gpipe_lab.plan.schedules import gpipe
from gpipe_lab.plan.simulate import simulate
from gpipe_lab.plan.validate import validate
from tests.mutants import MUTANTS

EXERCISES = {name: e for name, e in all_exercises().items() if not e.on_ranks}  # those are in tests/dist
PAIRS = [(name, mutant) for name in EXERCISES for mutant in MUTANTS[name]]


@pytest.fixture(autouse=True)
def kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Progress in a file of the test's own."""
    path = tmp_path / "progress.json"
    monkeypatch.setenv("GPIPE_LAB_PROGRESS", str(path))
    return path


# Every exercise.


def test_every_chapter_has_two_exercises() -> None:
    count = Counter(exercise.chapter for exercise in all_exercises().values())
    assert {chapter for chapter, number in count.items() if number >= 2} >= {f"{n:02}" for n in range(14)}


@pytest.mark.parametrize("name", EXERCISES)
def test_solution_passes(name: str) -> None:
    result = check(name, find(name).solution)
    assert result, repr(result)
    assert result.status == "passed"


@pytest.mark.parametrize("name", EXERCISES)
def test_starter_is_not_done(name: str) -> None:
    result = check(name, find(name).starter)
    assert result.status == "not done yet"
    assert not result


@pytest.mark.parametrize(("name", "mutant"), PAIRS)
def test_mutant_fails(name: str, mutant: str) -> None:
    result = check(name, MUTANTS[name][mutant])
    assert result.status == "failed"
    assert result.counterexample is not None
    assert result.counterexample.given in repr(result)


@pytest.mark.parametrize("name", EXERCISES)
def test_hints_and_solution_can_be_shown(name: str) -> None:
    exercise = find(name)
    assert len(set(exercise.hints)) == 3
    assert len(MUTANTS[name]) >= 3
    namespace: dict[str, Any] = {}
    exec(exercise.solution_source, namespace)  # pastes into a cell as it is, under the learner's name
    assert check(name, namespace[exercise.starter.__name__])
    assert "<details>" in solution(name)._repr_html_()
    assert exercise.solution_source not in repr(solution(name))


def test_the_case_of_the_text_on_checkpointing() -> None:
    """8 layers, a/b = 4, M = 16: k = 4, and the ledger agrees on the bytes of every k that divides 8."""
    assert ch05.solution(8, 1, 4, 16) == 4
    for every in (1, 2, 4, 8):
        schedule = with_recompute(gpipe(1, 16), f"every:{every}", layers_per_stage=8)
        report = simulate_memory(simulate(schedule), [StageBytes(saved=8 * 4, boundary=1)])
        # The ledger counts a segment's input once, as boundary; the exercise counts it in both places.
        assert report.peak_bytes(0) + 1 == ch05.peak_bytes(8, 1, 4, 16, every)


def test_random_schedules_are_valid_and_varied() -> None:
    schedules = [ch04.random_schedule(seed) for seed in range(60)]
    for schedule in schedules:
        validate(schedule)
    assert {schedule.num_ranks for schedule in schedules} == {1, 2, 3, 4}
    assert len({schedule.ops for schedule in schedules}) > 50


# How answers are graded.


@over(n=(3, 1, 2))
def doubles(answer: Answer, n: int) -> Mismatch | None:
    """twice the number comes back"""
    got = answer(n)
    return None if got == 2 * n else Mismatch(2 * n, got)


def unfinished(n: int) -> int:
    raise NotImplementedError


DOUBLE = Exercise(
    name="99-double",
    statement="Double it.",
    starter=unfinished,
    solution=lambda n: 2 * n,
    properties=(doubles,),
    hints=("a", "b", "c"),
)


def test_the_smallest_counterexample_is_named() -> None:
    result = check(DOUBLE, lambda n: 2 * n + (n > 1))
    assert (
        repr(result) == "99-double: failed\ntwice the number comes back: fails at n=2\nexpected 4\ngot      5"
    )
    assert result.counterexample is not None
    assert result.counterexample.case == {"n": 2}
    assert "twice the number" in result._repr_html_()


def test_a_starter_that_is_a_whole_program_is_not_done_and_says_what_fails() -> None:
    def faulty(n: int) -> int:
        return n

    exercise = replace(DOUBLE, starter=faulty)
    namespace: dict[str, Any] = {}
    exec(compile(source_of(faulty), "starter", "exec"), namespace)
    result = check(exercise, faulty)
    assert (result.status, bool(result)) == ("not done yet", False)
    assert "the starter as given" in repr(result)
    assert "twice the number comes back: fails at n=1" in repr(result)
    assert check(exercise, namespace["faulty"]).status == "failed"  # without a source, it is an answer
    assert check(exercise, lambda n: n).status == "failed"


@pytest.mark.parametrize("unset", [NotImplemented, ...])
def test_a_placeholder_returned_is_not_done(unset: object) -> None:
    assert check(DOUBLE, lambda n: unset).status == "not done yet"


def with_dots(n: int) -> None:
    """Double it."""
    ...


def with_a_value_left_open(n: int) -> None:
    doubled = ...
    if doubled is not ...:
        raise AssertionError


def with_a_raise_that_is_not_reached(n: int) -> None:
    if n < 0:
        raise NotImplementedError("fill in")


def without_return(n: int) -> None:
    """Dots in a text or in a type... are no marker."""
    numbers: tuple[int, ...] = (n, n)
    sum(numbers)


@pytest.mark.parametrize("unfinished", [with_dots, with_a_value_left_open, with_a_raise_that_is_not_reached])
def test_nothing_returned_by_an_unfinished_function_is_not_done(unfinished: Any) -> None:
    assert check(DOUBLE, unfinished).status == "not done yet"


def test_a_forgotten_return_is_named() -> None:
    namespace: dict[str, Any] = {}
    exec("def typed(n):\n    2 * n", namespace)  # a function without a source, too
    for forgetful in (without_return, namespace["typed"]):
        result = check(DOUBLE, forgetful)
        assert result.status == "failed"
        assert "your function returned None; is a `return` missing?" in repr(result)
        assert "fails at n=1" in repr(result)


def test_an_exception_shows_the_line_that_raised_it() -> None:
    def broken(n: int) -> int:
        return n // (n - n)

    result = check(DOUBLE, broken)
    assert result.status == "failed"
    assert "ZeroDivisionError" in repr(result)
    assert "return n // (n - n)" in repr(result)


def test_an_answer_of_the_wrong_type_is_a_wrong_answer() -> None:
    assert check("03-gpipe", lambda num_stages, num_microbatches: "F0 B0").status == "failed"
    assert check("04-held", lambda schedule, costs: 3).status == "failed"
    assert check("04-held", lambda schedule: []).status == "failed"
    assert check("00-finish-time", lambda minutes, num_loads: "soon").status == "failed"


def test_text_is_escaped_in_html() -> None:
    page = check(DOUBLE, lambda n: "<script>")._repr_html_()
    assert "<script>" not in page


def test_hints_come_one_after_another_and_then_stay() -> None:
    assert [hint(DOUBLE).number for _ in range(5)] == [1, 2, 3, 3, 3]
    assert hint(DOUBLE, 2).text == "b"


@pytest.mark.parametrize(
    "call", [lambda: check("17-x", len), lambda: check("03-gpipe", 3), lambda: hint(DOUBLE, 4)]
)
def test_wrong_use_is_refused(call: Any) -> None:
    with pytest.raises(InputError):
        call()


# Progress.


def test_what_passes_is_recorded_and_can_be_reset(kept_apart: Path) -> None:
    check("00-finish-time", find("00-finish-time").starter)
    assert not progress().passed
    check("00-finish-time", find("00-finish-time").solution)
    assert list(progress().passed) == ["00-finish-time"]
    assert "[x] 00-finish-time" in repr(progress())
    assert "[ ] 03-gpipe" in repr(progress())
    assert json.loads(kept_apart.read_text())["passed"].keys() == {"00-finish-time"}
    assert list(kept_apart.parent.iterdir()) == [kept_apart]  # no half-written file is left
    assert not progress(reset=True).passed
    assert not kept_apart.exists()
    progress(reset=True)


def test_the_first_pass_is_kept(kept_apart: Path) -> None:
    kept_apart.write_text(json.dumps({"passed": {"00-finish-time": "2020-01-01T00:00:00"}}))
    check("00-finish-time", find("00-finish-time").solution)
    assert progress().passed["00-finish-time"] == "2020-01-01T00:00:00"


def test_the_map_counts_what_was_predicted_and_claimed(kept_apart: Path) -> None:
    first = progress().chapters[0]
    assert first.claims[0].name in first.claim_names
    begins = f"* 00 · {first.title}: {first.minutes_in_words}; predictions 0 of "
    assert repr(progress()).startswith(begins)
    prediction = predict(first.predictions[0], "How many?", default=1)
    assert not progress().kept.predicted  # the default is nobody's prediction
    prediction.value = 3
    claim(first.claims[0].name, "two are two", formula="2", predicted=2, measured=2)
    found = progress()
    assert list(found.kept.predicted) == [first.predictions[0]]
    assert list(found.kept.claimed) == [first.claims[0].name]
    counts = f"predictions 1 of {len(first.predictions)}, claims 1 of {len(first.claim_names)}"
    assert counts in repr(found) and "the short path" in repr(found)
    assert f"1 of {len(first.claim_names)}" in found._repr_html_()
    assert not progress(reset=True).kept.claimed


def test_every_exercise_is_on_the_map() -> None:
    shown = repr(progress())
    assert all(f"[ ] {name}" in shown for name in all_exercises())


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"passed": 3}', '{"passed": ["x"]}'])
def test_a_damaged_file_counts_as_empty(kept_apart: Path, damage: str) -> None:
    kept_apart.write_text(damage)
    assert not progress().passed
    assert check("00-finish-time", find("00-finish-time").solution)
    assert list(progress().passed) == ["00-finish-time"]


def test_a_place_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPIPE_LAB_PROGRESS", str(tmp_path / "file" / "progress.json"))
    result = check("00-finish-time", find("00-finish-time").solution)
    assert result
    assert "not recorded" in repr(result)


def test_a_headless_run_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GPIPE_LAB_PROGRESS")
    monkeypatch.chdir(tmp_path)
    assert check("00-finish-time", find("00-finish-time").solution)
    assert list(tmp_path.iterdir()) == []


# Predictions.


def test_a_prediction_serves_its_default_without_blocking(capsys: pytest.CaptureFixture[str]) -> None:
    guess = predict("test-default", "How long do ten loads take?", 900, "min")
    assert guess.value == 900
    assert capsys.readouterr().out == "How long do ten loads take? Your prediction: 900 min (default)\n"
    assert guess.versus(360) == "the default was 900 min, measured: 360 min (150% too high)"
    assert guess.versus(900.1, "simulated") == "the default was 900 min, simulated: 900.1 min"
    assert guess.versus(-1) == "the default was 900 min, measured: -1 min (too high)"


def test_a_typed_number_outlives_a_second_run_of_the_cell() -> None:
    predict("test-typed", "How much?", 1.0).value = 0.3
    again = predict("test-typed", "How much?", 1.0)
    assert again.value == 0.3
    assert again.versus(0.6) == "you said 0.3, measured: 0.6 (50% too low)"


def test_the_box_commits_what_is_typed() -> None:
    from gpipe_lab.course.predict import _box

    guess = predict("test-box", "How much?", 1.0, "ms")
    number = _box(guess).children[1].children[0]
    number.value = 4.5
    assert guess.value == 4.5


@pytest.mark.parametrize("default", [float("nan"), float("inf"), "ten", None, True])
def test_a_default_is_a_finite_number(default: Any) -> None:
    with pytest.raises(InputError):
        predict("test-bad", "How much?", default)


# The progress bar.


def test_a_headless_loop_is_tracked_without_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track((1, 2, 4))) == [1, 2, 4]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("broken", [False, True])
def test_a_live_loop_moves_a_bar(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    widgets = pytest.importorskip("ipywidgets")
    bar = widgets.IntProgress(max=3)
    monkeypatch.setattr("gpipe_lab.course.mode.live", lambda: True)
    monkeypatch.setattr("gpipe_lab.course.loops._bar", lambda length: bar)
    seen = []
    for item in track((1, 2, 4), label=lambda M: f"M = {M}"):
        seen.append((item, bar.value, bar.description))
        if broken and item == 2:
            break
    assert seen == [(1, 0, "M = 1"), (2, 1, "M = 2"), (4, 2, "M = 4")][: len(seen)]
    gc.collect()  # a loop that was left ends its generator
    assert (bar.value, bar.bar_style) == ((1, "danger") if broken else (3, "success"))


# Claims.


def test_the_table_of_claims_is_shown_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpipe_lab.course.claims._claims", {})
    long = "the finish times of a staircase give the very same number, however many words it takes " * 2
    claim("a", long, formula="T (M + P - 1)", predicted=4, measured=4)
    claim("b", "short", formula="2", predicted=2, simulated=2.5, measured=3, paced=True, timed=True)
    table = claims()
    for shown in (table._repr_html_(), repr(table)):
        assert long.strip() in shown
        assert "..." not in shown and "None" not in shown and "NaN" not in shown
    assert table["simulated"].tolist() == ["", 2.5]
    assert table["paced"].tolist() == ["no", "yes"]


# The doctor.


def test_doctor_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    report = doctor(num_ranks=2, device="cpu")
    printed = capsys.readouterr().out
    assert printed == report.line + "\n"
    assert printed.count("\n") == 1
    assert (report.kind, report.backend, report.num_ranks) == ("cpu", "gloo", 2)
    assert report.reason in printed
    assert report.torch in printed
    assert not report.strict  # there is no notebook here


def test_doctor_says_when_runs_are_paced() -> None:
    few = doctor(num_ranks=1, device="cpu")
    many = doctor(num_ranks=few.cores + 1, device="cpu")
    assert (few.paced, many.paced) == (False, True)
    assert f"runs of {many.num_ranks} ranks are best paced" in many.line
    assert "runs of 1 rank can go unpaced" in few.line
    assert few.contention is None and "all at once" not in few.line


@pytest.mark.dist
def test_doctor_times_one_worker_alone_against_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = 2 * doctor(num_ranks=1, device="cpu").cores
    report = doctor(num_ranks=ranks, device="cpu", contention=True)
    assert report.contention is not None and report.contention > 1.2  # two workers on each core
    assert f"{report.contention:.2f} times as long" in report.line
    monkeypatch.setattr("gpipe_lab.Lab", None)  # measured once
    assert doctor(num_ranks=ranks, device="cpu", contention=True).contention == report.contention


def test_doctor_refuses_an_unknown_device() -> None:
    with pytest.raises(InputError):
        doctor(device="tpu")


def test_nothing_is_watched_outside_a_notebook() -> None:
    assert not strict.enable()


# The package.


def test_importing_the_course_is_light() -> None:
    code = (
        "import sys, gpipe_lab as gl, gpipe_lab.course.exercises as e; e.all_exercises();"
        "[getattr(gl, name) for name, module in gl._LAZY.items() if '.course.' in module];"
        "heavy = {'torch', 'ipywidgets', 'IPython', 'pandas', 'matplotlib', 'numpy'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_printed_between_two_tables_stays_there_and_pieces_of_one_stream_are_joined() -> None:
    nbformat = pytest.importorskip("nbformat")
    said = [nbformat.v4.new_output("stream", text=text) for text in ("one\n", "t", "wo\n")]
    table = nbformat.v4.new_output("display_data", data={"text/plain": "table"})
    cell = nbformat.v4.new_code_cell("1", outputs=[said[0], table, *said[1:], table])
    clean(nbformat.v4.new_notebook(cells=[cell]))
    told = [output.get("text") or output["data"]["text/plain"] for output in cell.outputs]
    assert told == ["one\n", "table", "two\n", "table"]


def test_published_notebooks_lose_what_changes_from_run_to_run() -> None:
    nbformat = pytest.importorskip("nbformat")
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "VBox()"}
    shown = nbformat.v4.new_output("display_data", data=view)
    kept = nbformat.v4.new_output("stream", text="180\n")
    cell = nbformat.v4.new_code_cell(
        "1", outputs=[shown, kept], metadata={"execution": {"x": "1"}, "tags": ["a"]}
    )
    book = nbformat.v4.new_notebook(
        cells=[cell], metadata={"widgets": {}, "language_info": {"name": "python", "version": "3"}}
    )
    clean(book)
    assert book.cells[0].outputs == [kept]
    assert book.cells[0].metadata == {"tags": ["a"]}
    assert set(book.metadata) == {"kernelspec", "language_info"}
    nbformat.validate(book)


# The record of progress, kept safe.


def test_a_damaged_record_is_set_aside_and_said(kept_apart: Path) -> None:
    kept_apart.write_text('{"passed": {"00-finish')
    found = check("00-finish-time", find("00-finish-time").solution)
    (aside,) = kept_apart.parent.glob("*.damaged-*")
    assert aside.read_text() == '{"passed": {"00-finish' and aside.name in repr(found)
    assert list(progress().passed) == ["00-finish-time"]


def test_notebooks_that_record_at_once_lose_nothing(kept_apart: Path) -> None:
    code = (
        "import sys; from gpipe_lab.course.kept import PREDICTED, record\n"
        "for number in range(30): assert record(PREDICTED, f'{sys.argv[1]}-{number}') == ''"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, name]) for name in ("a", "b")]
    assert [process.wait(60) for process in both] == [0, 0]
    assert len(progress().kept.predicted) == 60


def test_a_cell_that_changes_folder_starts_no_second_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(kept.FILE_VARIABLE, raising=False)
    before = kept.file_path()
    monkeypatch.chdir(tmp_path)
    assert kept.file_path() == before and before.is_absolute()
    monkeypatch.setenv(kept.FILE_VARIABLE, "~/progress.json")
    assert kept.file_path() == Path.home() / "progress.json"


def test_a_copy_of_a_chapter_is_none_of_the_course(tmp_path: Path) -> None:
    source = NOTEBOOKS / "00_laundry.ipynb"
    for name in ("00_laundry.ipynb", "00_laundry-Copy1.ipynb", "00_laundry (1).ipynb"):
        shutil.copy(source, tmp_path / name)
    (found,) = chapters(tmp_path)
    assert found.path.name == "00_laundry.ipynb"


def test_claims_are_counted_before_a_chapter_has_been_saved_with_outputs(tmp_path: Path) -> None:
    notebook = json.loads((NOTEBOOKS / "03_micro_batches.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = []
    path = tmp_path / "03_micro_batches.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    assert len(read_chapter(path).claim_names) == 5


# Answers that do not behave.


def forever(*args: int) -> int:
    while True:
        pass


def leaves(*args: int) -> int:
    sys.exit("enough")


def recursive(*args: int) -> int:
    return recursive(*args)


def talkative(*args: int) -> int:
    print("x" * 1_000_000)
    return find("00-finish-time").solution(*args)


@pytest.mark.parametrize(
    "answer, told",
    [(forever, "no end after 0.3 s"), (leaves, "SystemExit: enough"), (recursive, "RecursionError")],
)
def test_an_answer_that_does_not_return_is_a_counterexample(
    answer: Answer, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exercise, "LIMIT_S", 0.3)
    began = time.monotonic()
    found = check("00-finish-time", answer)
    assert found.status == "failed" and told in found.detail and "fails at" in found.detail
    assert time.monotonic() - began < 5


def test_what_an_answer_prints_is_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("00-finish-time", talkative)
    said = capsys.readouterr().out
    assert len(said) < 2 * exercise.PRINTED_CHARS and said.count("left out") == 1


def test_exercises_work_where_python_drops_docstrings() -> None:
    code = (
        "import gpipe_lab as gl; from gpipe_lab.course.exercises import find\n"
        "e = find('00-finish-time'); print(bool(gl.check(e, e.solution)), gl.check(e, min).status)"
    )
    command = [sys.executable, "-OO", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "failed"]


def test_the_default_can_be_ones_own_prediction_too() -> None:
    from gpipe_lab.course.predict import _box

    guess = predict("test-agree", "How long?", 600, "ms")
    number, _, commit, said = _box(guess).children[1].children
    assert guess.is_default and said.value == ""
    commit.click()
    assert not guess.is_default and "you said 600 ms" in said.value
    assert guess.versus(600).startswith("you said 600 ms")
    number.value = float("nan")
    assert guess.value == 600 and "finite" in said.value
    _, _, _, reopened = _box(predict("test-agree", "How long?", 600, "ms")).children[1].children
    assert "you said 600 ms" in reopened.value
    with pytest.raises(InputError, match="finite"):
        guess.value = float("inf")


class OlderShell(InteractiveShell):
    """IPython before it could raise for failed commands by itself."""

    def has_trait(self, name: str) -> bool:
        return name != "system_raise_on_error" and super().has_trait(name)


@pytest.mark.parametrize("kind", [InteractiveShell, OlderShell])
def test_a_shell_command_that_fails_raises_whatever_the_version_of_ipython(kind: type) -> None:
    shell = kind()
    strict.raise_on_failed_commands(shell)
    shell.system("true")
    with pytest.raises(subprocess.CalledProcessError):
        shell.system("exit 3")


def test_chapters_that_are_not_there_are_said_to_be_absent(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="beside the package"):
        chapters(tmp_path / "notebooks")
