"""Settings of a service: one frozen dataclass, read once. Flags override variables, which override defaults.

    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Settings:
        port: int = setting(8000, "port to listen on", least=0)

        def __post_init__(self) -> None:
            check_bounds(self)

    settings = read_settings(Settings, argv, environment, prefix="ORCA_GATEWAY_", prog="orca gateway", description="")

`--port 80` and `ORCA_GATEWAY_PORT=80` then mean the same. An unknown flag, an unknown variable with the prefix, and a
missing or bad value stop the start with the name of the flag or variable. The dataclass is also the reference of the
command line.
"""

import argparse
import dataclasses
import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import get_annotations
from typing import Any, NoReturn, TypeVar

from orca.core.domain.errors import BadValue, SettingError

LOG_FORMATS = ("auto", "json", "text")
METRIC_NAMES = ("orca", "vllm")
DEFAULT_METRIC_NAMES = ("orca",)
LOG_LEVELS = ("debug", "info", "warning", "error")

S = TypeVar("S")


def setting(
    default: Any, help_text: str, *, least: float | None = None, choices: Sequence[str] = (), is_secret: bool = False
) -> Any:
    """Define a field of a settings dataclass.

    Args:
        least: smallest value allowed; None allows any.
        choices: the only values allowed, of a list the only words; none for any.
        is_secret: keep the value out of the dataclass's repr.
    """
    metadata = {"help": help_text, "least": least, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=metadata, repr=not is_secret)


def required(help_text: str) -> Any:
    """Define a field without a default: the start stops unless it is given."""
    return setting(dataclasses.MISSING, help_text)


def log_format_setting() -> Any:
    return setting("auto", "auto means text on a terminal, otherwise json", choices=LOG_FORMATS)


def log_level_setting() -> Any:
    return setting("info", "lowest level that is logged", choices=LOG_LEVELS)


def metric_names_setting() -> Any:
    return setting(
        DEFAULT_METRIC_NAMES,
        "comma-separated names under which /metrics exports metrics: orca, vllm, or both; vllm adds vLLM's names for"
        " metrics of equal meaning",
        choices=METRIC_NAMES,
    )


def check_bounds(settings: Any) -> None:
    """Raise for the first field that is under its `least` or not one of its `choices`. Raises: BadValue."""
    for field in dataclasses.fields(settings):
        _check_field(field, getattr(settings, field.name))


def require(is_valid: bool, settings: Any, name: str, rule: str) -> None:
    """Raise BadValue "setting NAME: VALUE is not RULE" unless `is_valid`."""
    if not is_valid:
        raise _broken(name, getattr(settings, name), rule)


def ordered_fields(kind: type[Any]) -> list["dataclasses.Field[Any]"]:
    """Return a settings dataclass's own fields in their order, then those of its nearest base, and so on.

    So its help begins with its own topic.
    """
    names = [name for each in kind.__mro__ for name in get_annotations(each)]
    return sorted(dataclasses.fields(kind), key=lambda field: names.index(field.name))


def show_default(default: Any) -> Any:
    """Return a default as a user writes it: a list is comma-separated."""
    return ",".join(default) if isinstance(default, tuple) else default


def read_settings(
    kind: type[S],
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    prefix: str,
    prog: str,
    description: str,
) -> S:
    """Read the settings. Flags override variables, which override defaults.

    Raises: SettingError that names the flag or variable; SystemExit only for --help.
    """
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    for field in _fields(kind).values():
        parser.add_argument(_flag(field.name), help=_help(field), default=None, **_argument(field))
    flags = {name: text for name, text in vars(parser.parse_args(list(argv))).items() if text is not None}
    variables = _variables(kind, environment, prefix)
    texts = variables | flags
    for field in _fields(kind).values():
        if field.default is dataclasses.MISSING and not texts.get(field.name):
            raise SettingError(f"setting {field.name}: required ({_flag(field.name)} or {prefix}{field.name.upper()})")
    return _build(kind, texts, lambda name: prefix + name.upper() if name in variables.keys() - flags else _flag(name))


def read_variables(kind: type[S], environment: Mapping[str, str], *, prefix: str) -> S:
    """Read settings that have no flags: every service of a deployment gets the same variables.

    Raises: SettingError that names the variable.
    """
    return _build(kind, _variables(kind, environment, prefix), lambda name: prefix + name.upper())


def with_texts(settings: S, texts: Mapping[str, str]) -> S:
    """Return settings in which some fields have other values, given as on a command line.

    Raises: BadValue that names the flag.
    """
    with _naming(_flag):
        values: Any = _values(type(settings), texts)
        return dataclasses.replace(settings, **values)  # type: ignore[type-var]


def check_variables(kind: type[Any], environment: Mapping[str, str], *, prefix: str) -> None:
    """Check each variable of a service by itself, before other settings are added to them.

    Raises: SettingError that names a variable which is unknown, cannot be read or is out of its field's bounds.
    """
    fields = _fields(kind)
    with _naming(lambda name: prefix + name.upper()):
        for name, value in _values(kind, _variables(kind, environment, prefix)).items():
            _check_field(fields[name], value)


def is_address(text: str, *, least_port: int = 0) -> bool:
    """Return whether `text` is host:port."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and least_port <= int(port) <= 65_535


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host. Names other than localhost count as reachable by others."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _fields(kind: type[Any]) -> dict[str, "dataclasses.Field[Any]"]:
    return {field.name: field for field in ordered_fields(kind)}


def _check_field(field: "dataclasses.Field[Any]", value: Any) -> None:
    """Raise BadValue if the value is under the field's `least` or not one of its `choices`. None is allowed."""
    least, choices = field.metadata["least"], field.metadata["choices"]
    if value is None:
        return
    if least is not None and not value >= least:  # so that NaN is refused
        raise _broken(field.name, value, f"{least} or more")
    for word in value if isinstance(value, tuple) else (value,):
        if choices and word not in choices:
            raise _broken(field.name, word, f"one of {', '.join(choices)}")


def _broken(name: str, value: Any, rule: str) -> BadValue:
    return BadValue(name, f"{value!r} is not {rule}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _help(field: "dataclasses.Field[Any]") -> str:
    default = "" if field.default in (None, ()) else f" (default {show_default(field.default)})"
    shown = " (required)" if field.default is dataclasses.MISSING else default
    return f"{field.metadata['help']}{shown}".replace("%", "%%")


def _argument(field: "dataclasses.Field[Any]") -> dict[str, Any]:
    """Return argparse's options for a field. A switch may have no value: `--keep` is `--keep true`."""
    if field.type is bool:
        return {"nargs": "?", "const": "true", "metavar": "true|false"}
    separator = "," if field.type == tuple[str, ...] else "|"
    return {"metavar": separator.join(field.metadata["choices"]) or _METAVARS.get(field.type)}


def _variables(kind: type[Any], environment: Mapping[str, str], prefix: str) -> dict[str, str]:
    found = {name.removeprefix(prefix).lower(): text for name, text in environment.items() if name.startswith(prefix)}
    for name in found:
        if name not in _fields(kind):
            raise SettingError(f"setting {prefix}{name.upper()}: there is no such variable")
    return found


def _build(kind: type[S], texts: Mapping[str, str], source: Callable[[str], str]) -> S:
    """Args: source: as for `_naming`."""
    with _naming(source):
        return kind(**_values(kind, texts))


@contextmanager
def _naming(source: Callable[[str], str]) -> Iterator[None]:
    """Name the flag or variable, which the user has to correct, in errors. Args: source: field -> flag or variable."""
    try:
        yield
    except BadValue as error:
        raise BadValue(source(error.name), error.complaint) from error


def _values(kind: type[Any], texts: Mapping[str, str]) -> dict[str, Any]:
    fields = _fields(kind)
    return {name: _value(fields[name], text) for name, text in texts.items()}


def _value(field: "dataclasses.Field[Any]", text: str) -> Any:
    try:
        return _READERS.get(field.type, str)(text)
    except ValueError as error:
        raise BadValue(field.name, f"{text!r} is not {_rule(field)}") from error


def _rule(field: "dataclasses.Field[Any]") -> str:
    """Return what the text of a field must be. The name of a number may end with its unit, such as `patience_s`."""
    unit = _UNITS.get(field.name.rpartition("_")[2], "") if field.type in _NUMBERS else ""
    return _RULES[field.type] + unit


def _switch(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def _words(text: str) -> tuple[str, ...]:
    """Read one word or more: an empty variable for a list of API keys must not leave the API open."""
    if words := tuple(word.strip() for word in text.split(",") if word.strip()):
        return words
    raise ValueError(text)


_READERS: Mapping[Any, Callable[[str], Any]] = {
    int: int,
    int | None: int,
    float: float,
    float | None: float,
    bool: _switch,
    tuple[str, ...]: _words,
}
_NUMBERS: Mapping[Any, str] = {
    int: "a whole number",
    int | None: "a whole number",
    float: "a number",
    float | None: "a number",
}
_RULES: Mapping[Any, str] = {**_NUMBERS, bool: "true or false", tuple[str, ...]: "a comma-separated list of words"}
_UNITS: Mapping[str, str] = {"s": " of seconds", "seconds": " of seconds", "ms": " of milliseconds"}
_METAVARS: Mapping[Any, str] = {int: "N", int | None: "N", float: "X", float | None: "X", tuple[str, ...]: "A,B"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{message} (--help lists the options)")
