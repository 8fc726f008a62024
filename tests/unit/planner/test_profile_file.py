"""The file of a profile: what is written is read back, and nothing else is accepted."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from orca.core.domain.errors import SettingError
from orca.planner.profile.profile import Profile, ProfileKey, StackShape, from_json, read_profile, to_json
from support.planner import profiles

BOTH = pytest.mark.parametrize("has_encoder", [False, True], ids=["decoder-only", "encoder-decoder"])


def change(profile: Profile, edit: Callable[[Any], object]) -> bytes:
    content = orjson.loads(to_json(profile))
    edit(content)
    return orjson.dumps(content)


def refusal(text: bytes) -> str:
    with pytest.raises(SettingError) as raised:
        from_json(text, "p.json")
    return str(raised.value)


@BOTH
def test_a_profile_is_read_back_as_it_was_written(has_encoder: bool, tmp_path: Path) -> None:
    profile = profiles.profile(has_encoder=has_encoder)
    file = tmp_path / "p.json"
    file.write_bytes(to_json(profile))
    assert read_profile(file) == profile


def test_every_field_is_required_and_no_other_is_known() -> None:
    """Take away each field of each record, and add one to each, by their paths."""
    profile = profiles.profile(has_encoder=True)
    paths = [path for path in _objects(orjson.loads(to_json(profile))) if path.count("[1]") < 2]
    assert "degrees[0].stacks[1].cross.curves[0].times[0]." in paths
    for path in paths:
        text = change(profile, lambda content, path=path: _at(content, path).update(surprise=1))  # type: ignore[misc]
        assert refusal(text) == f"profile p.json: {path}surprise is unknown"
        names = list(_at(orjson.loads(to_json(profile)), path))
        for name in names:
            text = change(profile, lambda content, path=path, name=name: _at(content, path).pop(name))  # type: ignore[misc]
            assert refusal(text) == f"profile p.json: {path}{name} is missing"


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda it: it.update(seconds="1"), "seconds must be a number, not '1'"),
        (lambda it: it.update(seconds=None), "seconds must be a number, not None"),
        (lambda it: it.update(digest=7), "digest must be a text, not 7"),
        (lambda it: it.update(degrees={}), "degrees must be a list, not {}"),
        (lambda it: it.update(key=[]), "key must be an object, not []"),
        (lambda it: it["key"].update(threads=True), "key.threads must be a whole number, not True"),
        (lambda it: it["key"].update(threads=1.5), "key.threads must be a whole number, not 1.5"),
        (lambda it: it["key"].update(version=9), "the file: key.version is 9, this release reads 2"),
        (lambda it: it["key"].update(threads=9), "the file: digest 5"),
        (lambda it: it["key"].update(stacks=[]), "the file: digest 5"),
        (lambda it: it["degrees"].pop(), "the file: degrees must be those of key.ranks, [1, 2]"),
        (lambda it: it["send"].update(at=[3, 2, 1]), "send: 3 values at [3.0, 2.0, 1.0]: places must rise"),
        (lambda it: it["send"].update(at=[1]), "send: 3 values at [1.0]: places must rise"),
        (lambda it: it["send"]["times"][0].update(low_us=99), "send.times[0]: us must lie between"),
        (lambda it: it["send"]["times"][0].update(repeats=0), "send.times[0]: us must lie between"),
        (
            lambda it: it["degrees"][0]["stacks"][0].update(keep=None),
            "the file: degrees[0].stacks[0].keep must not be null",
        ),
        (
            lambda it: it["degrees"][1]["stacks"][0].update(memory=it["send"]),
            "the file: degrees[1].stacks[0].memory must be null",
        ),
        (
            lambda it: it["degrees"][0].update(weight_bytes_per_layer=[]),
            "the file: degrees[0].stacks and degrees[0].weight_bytes_per_layer must have 1 entries",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(edit: Callable[[Any], object], complaint: str) -> None:
    profile = profiles.profile()
    if complaint.startswith("the file: digest"):
        complaint = f"the file: digest {profile.digest} is not that of the key"
    assert refusal(change(profile, edit)).startswith(f"profile p.json: {complaint}")


@pytest.mark.parametrize("text", [b"", b"{", b"NaN", b"\xff"])
def test_what_is_no_json_is_refused(text: bytes) -> None:
    assert refusal(text).startswith("profile p.json is no JSON: ")


def test_a_list_is_no_profile() -> None:
    assert refusal(b"[]") == "profile p.json: the file must be an object, not []"


def test_a_missing_file_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"none\.json cannot be read: No such file"):
        read_profile(tmp_path / "none.json")


OTHER: dict[str, object] = {
    "version": 3,
    "architecture": "qwen3",
    "stacks": (StackShape(layers=7, heads=4, kv_heads=4, head_dim=8, intermediate_size=64),),
    "hidden_size": 64,
    "vocab_size": 98,
    "max_model_len": 512,
    "dtype": "bfloat16",
    "quantization": "int8",
    "device": "cuda",
    "processor": "another",
    "processors": 3,
    "threads": 3,
    "ranks": (1,),
    "devices": 4,
    "release": "0.2.0",
}


def test_the_other_values_cover_every_field_of_the_key() -> None:
    assert list(OTHER) == [field.name for field in dataclasses.fields(ProfileKey)]


@pytest.mark.parametrize("name", OTHER)
def test_another_key_is_refused_by_the_first_field_that_differs(name: str) -> None:
    profile = profiles.profile()
    profile.check_key(profiles.key())
    wanted = dataclasses.replace(profile.key, **{name: OTHER[name]})
    assert wanted.digest != profile.digest
    with pytest.raises(
        SettingError, match=f"the profile has another key: its {name} (is|are) .*, not .*; measure again"
    ):
        profile.check_key(wanted)


def test_the_refusal_shows_both_values() -> None:
    wanted = dataclasses.replace(profiles.key(), threads=8, release="9")
    with pytest.raises(SettingError, match=r"its threads is 1, not 8; measure again with `orca profile`"):
        profiles.profile().check_key(wanted)


def _objects(content: Any, path: str = "") -> list[str]:
    """Return the paths of all objects, each with a dot at its end unless it is the whole file."""
    if isinstance(content, dict):
        inner = [each for name, value in content.items() for each in _objects(value, f"{path}{name}")]
        return [path and f"{path}.", *inner] if not path else [f"{path}.", *_dotted(content, path)]
    if isinstance(content, list):
        return [each for index, value in enumerate(content) for each in _objects(value, f"{path}[{index}]")]
    return []


def _dotted(content: dict[str, Any], path: str) -> list[str]:
    return [each for name, value in content.items() for each in _objects(value, f"{path}.{name}")]


def _at(content: Any, path: str) -> Any:
    for part in path.replace("[", ".").replace("]", "").split("."):
        if part:
            content = content[int(part)] if part.isdigit() else content[part]
    return content
