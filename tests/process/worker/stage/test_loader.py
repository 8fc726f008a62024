"""Files of weights are mapped: what was read of them does not stay in memory, and is there when it is read again."""

import gc
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from orca.worker.models.weights import RankWeights
from orca.worker.parallel.shard import Shard
from orca.worker.weights import loader
from orca.worker.weights.layout_choice import LayoutChooser
from orca.worker.weights.linear import Linear, OneDnnLinear, PanelLinear
from orca.worker.weights.loader import Checkpoint
from support.resident import resident_bytes_of_file

ROWS, COLUMNS, NUMBER = 1024, 1024, 24  # 4 MiB each


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("large")
    tensors = {f"{place}.weight": torch.full((ROWS, COLUMNS), float(place)) for place in range(NUMBER)}
    save_file(tensors, made / "model.safetensors")
    return made


def checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    return Checkpoint(folder, dtype=dtype, device=torch.device("cpu"))


def resident_bytes(folder: Path) -> int:
    return resident_bytes_of_file(folder / "model.safetensors")


def written_bytes() -> int:
    """Return the bytes of this process's memory that are no part of a file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_that_were_read_do_not_stay_in_memory(folder: Path, dtype: torch.dtype) -> None:
    files = checkpoint(folder, dtype)
    for place in range(NUMBER):
        tensor = files.read(f"{place}.weight", (ROWS, COLUMNS))
        assert tensor.unique().tolist() == [place]
        assert resident_bytes(folder) < 3 * ROWS * COLUMNS * 4
    assert files.bytes_read == NUMBER * ROWS * COLUMNS * 4


def test_pages_of_a_partly_read_file_are_released_and_the_rest_read_later(folder: Path) -> None:
    files = checkpoint(folder)
    for rows in ((0, 300), (300, ROWS)):
        for columns in (None, (5, 900)):
            part = files.view("7.weight", (ROWS, COLUMNS), rows, columns)
            assert part.is_contiguous()
            assert part.unique().tolist() == [7]
            files.give_back()


@pytest.mark.covered(1)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("layout", [Linear, PanelLinear])
def test_a_layout_holds_no_part_of_the_file(folder: Path, layout: type[Linear], is_transposed: bool) -> None:
    """Nothing of the model may read the file after `give_back`: the file may be another one by then."""
    files = checkpoint(folder)
    outputs, inputs = (COLUMNS, ROWS) if is_transposed else (ROWS, COLUMNS)
    weights = RankWeights(files, Shard(), LayoutChooser(only=layout), torch.float32)
    linears = [
        weights.row_linear(f"{place}", outputs, inputs, (0, inputs), has_bias=False, is_transposed=is_transposed)
        for place in range(1, NUMBER)
    ]
    ones = torch.ones(1, inputs)
    for place, linear in enumerate(linears, 1):
        assert torch.equal(linear(ones), torch.full((1, outputs), float(place * inputs)))
    assert resident_bytes(folder) < 3 * ROWS * COLUMNS * 4


@pytest.mark.parametrize("layout", [Linear, PanelLinear, OneDnnLinear])
def test_an_embedding_holds_no_part_of_the_file(folder: Path, layout: type[Linear]) -> None:
    files = checkpoint(folder)
    weights = RankWeights(files, Shard(), LayoutChooser(only=layout), torch.float32)
    tables = [weights.table("1.weight", (ROWS, COLUMNS)), weights.tied_table("2.weight", (ROWS, COLUMNS))[1]]
    ids, positions = torch.arange(ROWS), torch.zeros(ROWS, dtype=torch.int64)
    for number, table in enumerate(tables, 1):
        assert table.embed(ids, None, positions).unique().tolist() == [number]
    assert resident_bytes(folder) < ROWS * COLUMNS * 4 // 2


@pytest.mark.skipif(loader._MALLOC_TRIM is None, reason="only glibc is asked to give memory back")
@pytest.mark.parametrize("is_last", [False, True])
def test_memory_freed_while_loading_is_returned_by_the_heap(
    folder: Path, is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # what earlier tests left is freed now, and not while this one counts
    torch.empty(28 << 20, dtype=torch.uint8)  # from here on the C library takes what is smaller from its heap
    files = checkpoint(folder)
    tensors = [files.read(f"{place}.weight", (ROWS, COLUMNS)) for place in range(NUMBER)]
    del tensors[:-1]  # below the one that stays
    before = written_bytes()
    if is_last:
        files.close()
    else:
        files.give_back()  # not enough was read since the last time
        assert before - written_bytes() < 3 * ROWS * COLUMNS * 4
        monkeypatch.setattr(loader, "TRIM_BYTES", NUMBER * ROWS * COLUMNS * 4 - loader.TRIM_BYTES)
        files.give_back()
    assert before - written_bytes() > (NUMBER - 3) * ROWS * COLUMNS * 4
