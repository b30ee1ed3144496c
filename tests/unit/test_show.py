"""python -m gpipe_lab show: a verdict and an exit code for a schedule, and a picture of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

import gpipe_lab as gl
from gpipe_lab.__main__ import INVALID, USAGE, VALID, main
from gpipe_lab.view.gantt import plot_schedule

TORCH_1F1B_LAST_RANK = "0F0,0F1,0B0,0B1\n1F1,1B0,1F2,1B1\n"  # no 1F0, as torch itself lists it


def test_a_schedule_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "gpipe", "4", "8"]) == VALID
    said = capsys.readouterr().out
    assert "gpipe, P = 4, M = 8" in said and gl.gpipe(4, 8).grid() in said
    assert "makespan 33 ms, bubble 27.3%" in said
    assert "by rank: 8 8 8 8" in said and "verdict: can run" in said


def without_numbers(grid: str) -> set[str]:
    return set(grid) - set("0123456789 \n")


@pytest.mark.parametrize("name", gl.SCHEDULES)
def test_every_symbol_of_a_grid_is_explained_beside_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", name, "4", "8"])
    _, *rest = capsys.readouterr().out.splitlines()
    grid, key = "\n".join(rest[:4]), rest[4]
    explained = {word[0] for word in key.removeprefix("key: ").split(" with ")[0].split(", ") if word}
    assert without_numbers(grid) - {"."} == explained and "a dot is" in key


@pytest.mark.parametrize("name", gl.SCHEDULES)
def test_every_name_and_its_csv_get_the_same_verdict(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", name, "2", "4"]) == VALID
    by_name = capsys.readouterr().out.splitlines()
    path = tmp_path / f"{name}.csv"
    gl.to_csv(gl.SCHEDULES[name](2, 4), path)
    assert main(["show", str(path)]) == VALID
    assert capsys.readouterr().out.splitlines()[1:] == by_name[1:]


def test_a_schedule_that_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "listed.csv"
    path.write_text(TORCH_1F1B_LAST_RANK)
    assert main(["show", str(path)]) == INVALID
    said = capsys.readouterr().out
    assert "rule:" in said and "no 1F0" in said and ">>" in said
    assert said.rstrip().endswith("cannot run")


@pytest.mark.parametrize("arguments", [
    ["gpipe"], ["gpipe", "4"], ["gpipe", "4", "8", "2", "9"], ["interleaved", "4"],
    ["gpipe", "4", "8", "--forward", "-1"], ["gpipe", "4", "8", "--backward", "nan"],
    ["gpipe", "2", "2", "-o", "."], ["gpipe", "2", "2", "-o", "a.pdf"], ["gpipe", "2", "2", "-o", "a.jpg"],
    ["gpipe", "2", "2", "-o", "noending"], ["gpipe", "2", "2", "--png", "-o", "a.svg"],
    ["gpipe", "2", "2", "--text", "-o", "a.PNG"], ["good.csv", "99", "77"], ["binary.csv"],
    ["gpipe", "2", "2", "-o", "/proc/a.svg"],
])  # fmt: skip
def test_what_cannot_be_followed_is_told_in_a_line(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    gl.to_csv(gl.gpipe(2, 2), "good.csv")
    Path("binary.csv").write_bytes(b"\xff\xfe0\x00F\x00")
    before = sorted(tmp_path.iterdir())
    assert main(["show", *arguments]) == USAGE
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_numbers_of_which_no_schedule_can_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "gpipe", "0", "8"]) == INVALID
    assert "rule:" in capsys.readouterr().out


def test_a_reader_that_has_seen_enough_may_go() -> None:
    command = f"{sys.executable} -m gpipe_lab show gpipe 8 512 | head -n 1"
    root = Path(gl.__file__).parents[1]
    done = subprocess.run(["sh", "-c", command], cwd=root, capture_output=True, text=True)
    assert done.stdout.startswith("gpipe, P = 8") and done.stderr == ""


def test_p_counts_ranks_where_a_rank_holds_several_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "zero_bubble_v", "3", "8"]) == VALID
    assert capsys.readouterr().out.startswith("zero_bubble_v, P = 3 (6 stages), M = 8\n")


def test_no_folder_to_write_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "gpipe", "2", "2", "--svg", "-o", str(tmp_path / "none" / "a.svg")]) == USAGE
    said = capsys.readouterr()
    assert "no folder" in said.err and said.out == ""


def test_nothing_to_look_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "no_such.csv"]) == USAGE
    assert "no_such.csv" in capsys.readouterr().err
    with pytest.raises(SystemExit) as refused:
        main(["draw"])
    assert refused.value.code == USAGE


@pytest.mark.parametrize("chosen", [["--svg", "-o", "a.svg"], ["-o", "a.svg"], ["-o", "a.SVG"], ["--svg"]])
def test_svg(
    chosen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["show", "gpipe", "2", "2", *chosen]) == VALID
    (path,) = tmp_path.iterdir()
    assert path.name == (chosen[-1] if "-o" in chosen else "gpipe.svg")
    assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert f"drawn in {path.name}" in capsys.readouterr().out


def test_png(tmp_path: Path) -> None:
    assert main(["show", "gpipe", "2", "2", "-o", str(tmp_path / "a.png")]) == VALID
    assert Image.open(tmp_path / "a.png").format == "PNG"


def test_text_into_a_file(tmp_path: Path) -> None:
    assert main(["show", "naive", "2", "1", "-o", str(tmp_path / "a.txt")]) == VALID
    assert (tmp_path / "a.txt").read_text() == gl.naive(2, 1).grid() + "\n"


def test_an_svg_is_described_and_the_same_each_time() -> None:
    pictures = [plot_schedule(gl.gpipe(2, 3)) for _ in range(2)]
    first, second = (picture.svg() for picture in pictures)
    assert first == second
    root = ElementTree.fromstring(first)
    assert root.get("role") == "img" and root.get("aria-label") == pictures[0].alt


def test_the_command_itself() -> None:
    command = [sys.executable, "-m", "gpipe_lab", "show"]
    root = Path(gl.__file__).parents[1]
    good = subprocess.run([*command, "gpipe", "2", "2"], cwd=root, capture_output=True, text=True)
    bad = subprocess.run([*command, "gpipe", "2", "0"], cwd=root, capture_output=True, text=True)
    assert (good.returncode, bad.returncode) == (VALID, INVALID)
    assert "verdict: can run" in good.stdout and good.stderr == ""
