"""How the benchmark takes turns, and what it makes of two engines' figures."""

from gpipe_lab.tools.bench import beside, in_turns
from gpipe_lab.tools.record import LONGER, OURS, TORCH, markdown, read, write


def test_every_turn_asks_both_in_alternating_order_and_the_first_only_warms_up():
    asked = []

    def step(name):
        asked.append(name)
        return len(asked)

    first, second = in_turns(2, lambda: step("a"), lambda: step("b"))
    assert asked == ["b", "a", "a", "b", "b", "a"]
    assert (first, second) == ([3, 6], [4, 5])


def test_the_ratio_is_that_of_each_turn_and_says_how_long_torch_took():
    *_, times = beside("a makespan", "ms", [10.0, 20.0, 30.0], [20.0, 30.0, 30.0])
    assert (times.engine, times.value, times.least, times.most) == (LONGER, 1.5, 1.0, 2.0)
    *_, speeds = beside("a speed-up", "x", [2.0], [1.0])
    assert speeds.value == 2.0


def test_a_record_is_read_as_it_was_written(tmp_path):
    figures = list(beside("a makespan", "ms", [10.0], [20.0], paced=", paced"))
    write(figures, tmp_path / "record.csv")
    assert read(tmp_path / "record.csv") == figures
    head, _, row = markdown(figures).splitlines()
    assert OURS in head and TORCH in head
    assert row == "| a makespan | 10.0 ms | 20.0 ms | 2.000 |"
