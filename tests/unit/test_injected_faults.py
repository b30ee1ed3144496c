"""The list of injected faults follows the code, and says of each which tests find it."""

import pytest

from tests.injected_faults import FAULTS, ROOT, occurrences


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_has_its_place_in_todays_code_and_tests(fault):
    assert occurrences(fault) == 1, f"{fault.file} holds the text of this fault that often: follow the code"
    assert fault.before != fault.after
    for test in fault.tests.split():
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / "tests" / file).read_text(encoding="utf-8")


def test_there_are_at_least_forty_by_different_names():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40
