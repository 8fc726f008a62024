"""The tensors of a model: one rank's slices of its weights, read from safetensors files.

`Tensors` is the interface that a model is built from. `Checkpoint` reads tensors from files, whole or in slices, and
refuses those that are missing, misshapen or of a type that is not a plain float. The files are mapped, so pages that
were read would count as memory of the process until they are closed: `Checkpoint` gives them back piece by piece.
"""

import ctypes
import mmap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from orca.core.domain.errors import ModelError
from orca.core.domain.model import weight_files

TRIM_BYTES = 64 << 20
"""Bytes that are read before freed memory is given back to the system again."""

_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

Slice = tuple[int, int] | None
"""[first, last) along one dimension; None takes all of it."""


class Tensors(Protocol):
    """The named tensors of a model on one device, from a folder (`Checkpoint`) or generated.

    They come in one dtype unless a call asks for another one.
    """

    dtype: torch.dtype
    bytes_read: int
    expected_bytes: int

    @property
    def stored_dtype(self) -> torch.dtype: ...

    def prefix(self, candidates: Sequence[str], name: str, instead: str | None = None) -> str:
        """See Checkpoint, also for the other methods."""
        ...

    def read(self, name: str, shape: tuple[int, ...], *slices: Slice, dtype: torch.dtype | None = None) -> Tensor: ...

    def view(self, name: str, shape: tuple[int, ...], *slices: Slice, dtype: torch.dtype | None = None) -> Tensor: ...

    def full(self, value: float, shape: tuple[int, ...]) -> Tensor: ...

    def give_back(self) -> None: ...

    def stored_bytes(self, prefixes: Iterable[str]) -> int: ...

    def refuse_unread(self, prefix: str, ignored: Sequence[str] = ()) -> None: ...

    def other_than(self, tied: str, names: Iterable[str], shape: tuple[int, ...], *slices: Slice) -> str | None: ...

    def __contains__(self, name: str) -> bool: ...

    def close(self) -> None: ...


class Checkpoint:
    """The tensors of a model folder, read slice by slice into one dtype and device.

    `bytes_read` counts the bytes read, in the dtype of the files. After each read, `on_progress` is called with the
    share of `expected_bytes` that has been read so far, in permille below 1000.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self.bytes_read = 0
        self.expected_bytes = 0  # set by the owner when it knows what it will read; 0: report no progress
        self.dtype = dtype
        self._device = device
        self._on_progress = on_progress
        self._files: dict[str, Any] = {}  # open file by tensor name
        self._paths: dict[str, Path] = {}
        self._stored_as: dict[str, str] = {}  # the files' own names of tensors that are read under another one
        self._read: set[str] = set()
        self._viewed: list[Tensor] = []  # as they lie in the files
        self._trimmed_at = 0  # bytes read
        for path in weight_files(folder):
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is not a whole safetensors file: {error}") from error
            names: list[str] = file.keys()  # type: ignore[no-untyped-call]
            for name in names:
                self._files[name] = file
                self._paths[name] = path
        self._folder = folder

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of all matrices in the files if it is the same; otherwise the dtype that they are read into."""
        slices = (file.get_slice(self._stored_as.get(name, name)) for name, file in self._files.items())
        kinds = {each.get_dtype() for each in slices if len(each.get_shape()) > 1}
        return _FLOATS.get(kinds.pop(), self.dtype) if len(kinds) == 1 else self.dtype

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def prefix(self, candidates: Sequence[str], name: str, instead: str | None = None) -> str:
        """Return the first of `candidates` that the checkpoint has before `name`: they differ in how deep they nest.

        Args:
            instead: a tensor that is read for `name` if the files lack that one: the two are the same.
        Raises: ModelError if it has none of them.
        """
        for candidate in candidates:
            if candidate + name in self._files:
                return candidate
        if instead is None or instead not in self._files:
            raise ModelError(f"{self._folder} has no tensor {candidates[0]}{name}")
        others = [other for other in self._files if other != instead]
        found = next(
            (candidate for candidate in candidates if any(other.startswith(candidate) for other in others)), ""
        )
        self._files[found + name] = self._files[instead]
        self._paths[found + name] = self._paths[instead]
        self._stored_as[found + name] = instead
        return found

    def read(self, name: str, shape: tuple[int, ...], *slices: Slice, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor as `view` does, into memory of its own."""
        kind = dtype or self.dtype
        tensor = self._find(name, shape, *slices).to(device=self._device, dtype=kind, copy=True).contiguous()
        self.give_back()
        return tensor

    def view(self, name: str, shape: tuple[int, ...], *slices: Slice, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor, or a part of it, that is valid until `give_back`.

        It may lie in the mapped file, so callers copy, rearrange or sum it up.

        Args:
            shape: the whole tensor's shape according to the config.
            slices: the part to read, one for each leading dimension.
            dtype: another one than the checkpoint's.
        Returns: a contiguous tensor on the checkpoint's device.
        Raises: ModelError that names tensor and file.
        """
        return self._find(name, shape, *slices).to(device=self._device, dtype=dtype or self.dtype).contiguous()

    def full(self, value: float, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor that no file has: the same number everywhere."""
        return torch.full(shape, value, dtype=self.dtype, device=self._device)

    def give_back(self) -> None:
        """Give the memory of all views back to the system; they are invalid afterwards.

        From time to time, also give back the heap memory of freed intermediate tensors. Otherwise the heap would hold
        600 MiB of it in the end, beside 990 MiB of weights converted from float32 to bfloat16 (519 M parameters). With
        this it holds 70 MiB, and loading takes no longer.
        """
        for tensor in self._viewed:
            _give_back(tensor)
        self._viewed.clear()
        if self.bytes_read - self._trimmed_at >= TRIM_BYTES:
            self._trim()

    def _find(self, name: str, shape: tuple[int, ...], *slices: Slice) -> Tensor:
        if name not in self._files:
            raise ModelError(f"{self._folder} has no tensor {name}")
        try:
            stored = self._files[name].get_slice(self._stored_as.get(name, name))
            kind, found = stored.get_dtype(), tuple(stored.get_shape())
            if kind not in _FLOATS:
                raise ModelError(f"tensor {name} in {self._paths[name]} is {kind}, not one of {', '.join(_FLOATS)}")
            if found != shape:
                raise ModelError(f"tensor {name} in {self._paths[name]} has shape {found}, the config says {shape}")
            index = tuple(slice(None) if part is None else slice(*part) for part in slices)
            tensor: Tensor = stored[index] if index else stored[:]
        except SafetensorError as error:
            raise ModelError(f"tensor {name} in {self._paths[name]} cannot be read: {error}") from error
        self._read.add(name)
        self._count(tensor.numel() * tensor.element_size())
        self._viewed.append(tensor)
        return tensor

    def stored_bytes(self, prefixes: Iterable[str]) -> int:
        """Estimate what is to be read: the bytes of all tensors whose names begin with one of `prefixes`."""
        starts = tuple(prefixes)
        total = 0
        for name, file in self._files.items():
            if name.startswith(starts):
                stored = file.get_slice(self._stored_as.get(name, name))
                size = 4 if stored.get_dtype() == "F32" else 2
                total += torch.Size(stored.get_shape()).numel() * size
        return total

    def refuse_unread(self, prefix: str, ignored: Sequence[str] = ()) -> None:
        """Refuse tensors under `prefix` that were not read: they belong to a part that the config does not describe.

        Args:
            ignored: endings of names that carry no weights (masks, frequencies).
        Raises: ModelError that names the first such tensor.
        """
        for name in sorted(self._files):
            if name.startswith(prefix) and name not in self._read and not name.endswith(tuple(ignored)):
                raise ModelError(f"tensor {name} in {self._paths[name]} has no place in the model its config describes")

    def other_than(self, tied: str, names: Iterable[str], shape: tuple[int, ...], *slices: Slice) -> str | None:
        """Return the first of some tensors that the files have and that differs from `tied`, for an error; or None.

        Raises: ModelError as `view`.
        """
        for name in names:
            if name not in self or self._stored_as.get(tied) == name:
                continue
            found, expected = self._find(name, shape, *slices), self._find(tied, shape, *slices)
            is_other = not torch.equal(found.to(expected.dtype), expected)
            self.give_back()
            if is_other:
                return f"tensor {name} in {self._paths[name]}"
        return None

    def close(self) -> None:
        """Close the files, after the last tensor was read."""
        self.give_back()
        self._files.clear()
        self._trim()

    def _trim(self) -> None:
        """Give freed heap memory back to the system, also below memory that is still in use."""
        self._trimmed_at = self.bytes_read
        if _MALLOC_TRIM is not None:
            _MALLOC_TRIM(ctypes.c_size_t(0))

    def _count(self, size: int) -> None:
        self.bytes_read += size
        if self._on_progress is not None and self.expected_bytes:
            self._on_progress(min(999, self.bytes_read * 1000 // self.expected_bytes))


_MADVISE = getattr(ctypes.CDLL(None), "madvise", None)
_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc


def _give_back(tensor: Tensor) -> None:
    """Drop a tensor's whole pages. They lie in a file that nobody writes to, so they are read again when needed."""
    if _MADVISE is None or not hasattr(mmap, "MADV_DONTNEED") or not tensor.numel():
        return
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (tensor.data_ptr() + reach * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        _MADVISE(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
