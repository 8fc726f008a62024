"""Small tables on their way to a device."""

from collections.abc import Sequence

import pytest
import torch
from gpu import DEVICE
from torch import Tensor

from orca.kernels.transfer import put_on_device


@pytest.mark.parametrize("values", [[7, 8, 9], torch.tensor([7, 8, 9])], ids=["of the host", "of a device"])
@pytest.mark.parametrize("taken", [[0, 1, 2], [0, 2], [1]])
def test_some_values_go_to_places(values: Tensor | Sequence[int], taken: list[int]) -> None:
    to = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    places = [4, 0, 2][: len(taken)]
    put_on_device(to, places, values, taken)
    expected = [0] * 5
    for place, value in zip(places, taken, strict=True):
        expected[place] = 7 + value
    assert to.tolist() == expected
