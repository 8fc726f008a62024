"""A profile: the measured times of a model's parts, from which the time of any step on any layout follows.

It holds times only of what it names in its key: one model shape on one kind of machine. `orca profile` measures it
(measuring/), and profile_cost.py computes the time of a stage from it.

All times are microseconds. Times of a layer hold for one layer of its stack on one rank of a stage with so many ranks,
the exchange between these ranks included.
"""

import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import orjson

from orca.core.domain.errors import SettingError
from orca.core.strict_record import read_record_file, record_from_json, record_to_json
from orca.planner.profile.tables import Grid, Line

VERSION = 2
"""Rises when the meaning or the fields of a profile change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTime:
    """The median of some repeats, and their spread. It may be below 0 where it is the difference of two times."""

    us: float
    low_us: float  # first quartile
    high_us: float  # third quartile
    repeats: int

    def __post_init__(self) -> None:
        if not self.low_us <= self.us <= self.high_us or self.repeats < 1:
            raise ValueError("us must lie between low_us and high_us, and repeats must be at least 1")

    @property
    def spread(self) -> float:
        """Half of the distance of the quartiles, as a share of the time."""
        return (self.high_us - self.low_us) / 2 / abs(self.us) if self.us else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Times over one number."""

    at: tuple[int, ...]
    times: tuple[MeasuredTime, ...]

    def __post_init__(self) -> None:
        self.line()

    def line(self) -> Line:
        return Line(tuple(map(float, self.at)), tuple(each.us for each in self.times))


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """Times over two numbers: a curve over the second one at each value of the first."""

    at: tuple[int, ...]
    curves: tuple[Curve, ...]

    def __post_init__(self) -> None:
        self.grid()

    def grid(self) -> Grid:
        return Grid(tuple(map(float, self.at)), tuple(each.line() for each in self.curves))


@dataclass(frozen=True, slots=True, kw_only=True)
class StackTimes:
    """The times of one layer of a stack."""

    rest: Curve  # over rows: everything but what attention over other tokens adds
    prompts: Surface  # over tokens of a row, and its start: what attention adds for one row of several tokens
    increments: Surface | None  # over rows of one token, and context of each: what attention adds; None: an encoder
    keep: Curve | None  # over rows: the last layer if none of them is sampled, which only writes keys and values
    cross: Surface | None  # over rows, and source tokens of each: what cross attention adds
    memory: Curve | None  # over source tokens: keys and values of the encoder output of new sources


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeTimes:
    """The times on stages with so many ranks."""

    ranks: int
    stacks: tuple[StackTimes, ...]  # of a decoder-only model: one; otherwise encoder, decoder
    step: Curve  # over requests of a step: what a stage takes besides its layers
    embed: Curve  # over rows
    head: Curve  # over sampled rows: output head and sampling
    all_reduce: Curve | None  # over bytes; part of the times of layers already; None: one rank
    weight_bytes_per_layer: tuple[int, ...]  # of each stack, on one rank
    embed_bytes: int  # on one rank
    head_bytes: int  # on one rank; 0 if it is the embedding and one rank has both
    kv_bytes_per_slot: int  # of one layer, on one rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorTime:
    """The processor time of some processes for a step, as a sum of three parts."""

    step_us: float
    row_us: float  # for each request in the step
    answer_us: float  # for each request that runs for the first time: from its call to the end of its answer

    def __post_init__(self) -> None:
        if min(self.step_us, self.row_us, self.answer_us) < 0:
            raise ValueError("step_us, row_us and answer_us must be at least 0")

    def us(self, rows: float, entering: float) -> float:
        """Return the time of a step. Args: entering: requests that run for the first time."""
        return self.step_us + self.row_us * rows + self.answer_us * entering


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """The processor time that a step takes outside the ranks, on a machine where all of Orca runs."""

    service: ProcessorTime  # of gateway, scheduler, Redis and the process that starts them
    controller: ProcessorTime  # of the controller of each stage


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    """The sizes of a stack of layers."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int


MODEL_FIELDS = (
    "architecture",
    "stacks",
    "hidden_size",
    "vocab_size",
    "max_model_len",
    "dtype",
    "quantization",
    "device",
)
"""The fields of a key that name a model, and how it is computed."""

MACHINE_FIELDS = ("processor", "processors")
"""The fields of a key that name a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """All that the times depend on. Two profiles with equal keys may replace each other."""

    version: int
    architecture: str  # key of core.domain.model.FAMILIES
    stacks: tuple[StackShape, ...]  # of a decoder-only model: one; otherwise encoder, decoder
    hidden_size: int
    vocab_size: int
    max_model_len: int
    dtype: str
    quantization: str | None
    device: str  # cpu or cuda
    processor: str  # name of the processor, or of the GPU
    processors: int  # that computing threads may use
    threads: int  # of each rank
    ranks: tuple[int, ...]  # tensor degrees, rising
    devices: int  # ranks that run at the same time on the machine
    release: str  # version of Orca

    @property
    def digest(self) -> str:
        """Return 16 hex digits that stand for the key, for names of files and objects."""
        text = orjson.dumps(dataclasses.asdict(self), option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(text).hexdigest()[:16]

    @property
    def num_layers(self) -> int:
        """Layers of all stacks."""
        return sum(stack.layers for stack in self.stacks)

    def difference(self, wanted: "ProfileKey", names: Iterable[str]) -> str | None:
        """Return the first of the fields that differs, with both values; None if none does."""
        for name in names:
            own, other = getattr(self, name), getattr(wanted, name)
            if own != other:
                return f"{name} {'are' if isinstance(own, tuple) else 'is'} {_shown(own)}, not {_shown(other)}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The measured times of a model on a kind of machine."""

    key: ProfileKey
    digest: str  # of the key
    seconds: float  # that measuring took
    device_bytes: int  # memory that was free on one device before; a machine's is divided among its devices
    send: Curve | None  # over bytes: from one stage to the next; None: measured with one device
    host: HostLoad | None  # None: not measured, as for devices that leave a processor to the host
    degrees: tuple[DegreeTimes, ...]  # in the order of `key.ranks`

    def __post_init__(self) -> None:
        if self.key.version != VERSION:
            raise ValueError(f"key.version is {self.key.version}, this release reads {VERSION}")
        if self.digest != self.key.digest:
            raise ValueError(f"digest {self.digest} is not that of the key, {self.key.digest}")
        if not self.key.stacks or len(self.key.stacks) > 2 or min(each.layers for each in self.key.stacks) < 1:
            raise ValueError("key.stacks must be one or two stacks of at least one layer")
        if not self.degrees or tuple(each.ranks for each in self.degrees) != self.key.ranks:
            raise ValueError(f"degrees must be those of key.ranks, {list(self.key.ranks)}")
        for index, degree in enumerate(self.degrees):
            _check_degree(degree, len(self.key.stacks), f"degrees[{index}]")

    def degree(self, ranks: int) -> DegreeTimes:
        """Return the times on stages with so many ranks. Raises: SettingError if they were not measured."""
        for each in self.degrees:
            if each.ranks == ranks:
                return each
        measured = ", ".join(map(str, self.key.ranks))
        raise SettingError(f"the profile has no times for stages of {ranks} ranks, only of {measured}: measure --ranks")

    def check_key(self, wanted: ProfileKey) -> None:
        """Check that the profile may be used where `wanted` is the key.

        Raises: SettingError that names the first field that differs, with both values.
        """
        found = self.key.difference(wanted, [field.name for field in dataclasses.fields(ProfileKey)])
        if found is not None:
            raise SettingError(f"the profile has another key: its {found}; measure again with `orca profile`")


def _check_degree(degree: DegreeTimes, stacks: int, path: str) -> None:
    """Raises: ValueError that names a table that is missing, or one that the model cannot have."""
    if len(degree.stacks) != stacks or len(degree.weight_bytes_per_layer) != stacks:
        raise ValueError(f"{path}.stacks and {path}.weight_bytes_per_layer must have {stacks} entries")
    for index, stack in enumerate(degree.stacks):
        is_decoder, has_encoder = index == stacks - 1, stacks == 2
        wanted = {"increments": is_decoder, "keep": is_decoder}
        wanted |= {"cross": is_decoder and has_encoder, "memory": is_decoder and has_encoder}
        for name, is_wanted in wanted.items():
            if (getattr(stack, name) is not None) != is_wanted:
                raise ValueError(f"{path}.stacks[{index}].{name} must {'not ' if is_wanted else ''}be null")


def to_json(profile: Profile) -> bytes:
    """Return the file of a profile."""
    return record_to_json(profile)


def from_json(text: bytes, name: str) -> Profile:
    """Read a profile. Args: name: of the file, for errors. Raises: SettingError that names the field that is wrong."""
    return record_from_json(Profile, text, f"profile {name}")


def read_profile(file: Path) -> Profile:
    """Read the file of a profile. Raises: SettingError if it cannot be read, or has a wrong field."""
    return read_record_file(Profile, file, "profile")


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    if isinstance(value, StackShape):
        return f"{value.layers} layers of {value.heads} heads"
    return repr(value) if isinstance(value, str) else str(value)
