"""The checks of a GPU machine, under pytest where there is one."""

import pytest
import torch

from .checks import CHECKS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can see")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_gpu(check):
    print(check())
