"""Small tables on their way to a device."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from orca.kernels.contract.transfer import scatter, scatter_on_device
from support.kernels.gpu import DEVICE


@pytest.mark.parametrize("way", [scatter, scatter_on_device])
@pytest.mark.parametrize("values", [[7, 8, 9], torch.tensor([7, 8, 9])], ids=["of the host", "of a device"])
@pytest.mark.parametrize("taken", [[0, 1, 2], [0, 2], [1]])
def test_values_are_written_to_their_indices(
    values: Tensor | Sequence[int], taken: list[int], way: Callable[..., None]
) -> None:
    to = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    places = [4, 0, 2][: len(taken)]
    way(to, places, values, taken)
    expected = [0] * 5
    for place, value in zip(places, taken, strict=True):
        expected[place] = 7 + value
    assert to.tolist() == expected


def test_no_values_are_written_to_no_indices() -> None:
    to = torch.ones(2, dtype=torch.int64, device=DEVICE)
    scatter(to, [], [5, 6], [])
    assert to.tolist() == [1, 1]
