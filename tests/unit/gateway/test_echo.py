"""An echoed prompt is the prompt as it was given, and each token's offset is where its text stands in the answer."""

import functools
import threading
from typing import Any

import orjson
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from orca.core.domain.text import Tokenizer
from orca.gateway.calls.accept import echo_texts
from orca.gateway.calls.bodies import CompletionBody
from orca.gateway.models.models import ServedModel
from orca.gateway.render.render import AnswerKind, RenderOptions
from orca.gateway.settings import GatewaySettings
from support.gateway.gateway_rig import MODEL, Rig, events, ids, rig

SPECIAL = ("<s>", "</s>", "<|user|>")
SETTINGS = GatewaySettings(model="tiny")


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "byte fallback":
        bytes_ = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
        words = ["▁", "▁the", "▁fox", "a", "b", "é", "x"]
        vocab = dict(zip(SPECIAL, range(3), strict=True)) | bytes_ | {word: 259 + i for i, word in enumerate(words)}
        inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<s>"))
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {text: i for i, text in enumerate((*SPECIAL, *alphabet))}
        inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        if kind == "lower case":
            inner.normalizer = normalizers.Lowercase()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    if kind in ("begins with <s>", "byte fallback", "lower case"):
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    if kind == "ends with </s>":
        inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return Tokenizer(inner, decoder=orjson.loads(inner.to_str())["decoder"], named_special_tokens={})


KINDS = ("byte level", "begins with <s>", "ends with </s>", "byte fallback", "lower case")
PROMPTS = (
    "the fox", " the fox ", "a<|user|>b</s>x", "<|user|>", "<s>", "<s><s>a", "a</s>", "é🐋<|user|>é", "A b", "s", " ",
    "x\n<|user|> the fox",
)  # fmt: skip


def serving(kind: str) -> Any:
    return rig(newest=ServedModel.of(MODEL, tokenizer(kind), SETTINGS))


async def echoed(one: Rig, prompt: Any, **body: Any) -> dict[str, Any]:
    one.scheduler.answer = lambda _: ids("a")
    answer = await one.complete(prompt=prompt, echo=True, max_tokens=1, logprobs=0, **body)
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def check_offsets(choice: dict[str, Any], *, added: tuple[str, ...] = ()) -> None:
    """Each token's text is at its offset. Args: added: special tokens at both ends that the text does not have."""
    text, logprobs = choice["text"], choice["logprobs"]
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    for token, offset in zip(logprobs["tokens"][:-1], offsets, strict=False):
        is_whole = not token.startswith("bytes:") and token not in added
        # A tokenizer with word marks has a space before the first word.
        assert not is_whole or text.startswith((token, token.removeprefix(" ")), offset), (token, offset, choice)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_text_comes_back_as_it_was(kind: str) -> None:
    async with serving(kind) as one:
        for prompt in PROMPTS:
            choice = await echoed(one, prompt)
            token = tokenizer(kind).decode(ids("a"))
            assert choice["text"] == prompt + token
            if kind != "lower case":
                check_offsets(choice, added=("<s>", "</s>") if kind != "byte level" else ())
            assert choice["logprobs"]["text_offset"][-1] == len(prompt)
            body = {"prompt": prompt, "echo": True, "max_tokens": 1, "logprobs": 0, "stream": True}
            chunks = [
                data["choices"][0] for _, data in list(events((await one.post("/v1/completions", **body)).text))[:-1]
            ]
            assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
            streamed = [offset for chunk in chunks if chunk["logprobs"] for offset in chunk["logprobs"]["text_offset"]]
            assert streamed == choice["logprobs"]["text_offset"]


async def test_offsets_of_a_text_that_the_tokenizer_changes_are_the_tokenizers() -> None:
    async with serving("lower case") as one:
        assert (await echoed(one, "A<|user|>Bc"))["logprobs"]["text_offset"] == [0, 0, 1, 9, 10, 11]


@pytest.mark.parametrize("kind", KINDS)
async def test_token_ids_come_back_as_their_text_with_special_tokens(kind: str) -> None:
    one_tokenizer = tokenizer(kind)
    async with serving(kind) as one:
        for text in PROMPTS:
            prompt = one_tokenizer.encode(text)
            choice = await echoed(one, prompt)
            shown = one_tokenizer.decode(prompt, skip_special_tokens=False)
            assert choice["text"].startswith(shown)
            detokenized = (await one.post("/detokenize", tokens=prompt)).json()
            assert shown == detokenized["prompt"]
            check_offsets(choice)


async def test_texts_and_token_ids_of_one_call_come_back_each_in_its_way() -> None:
    async with serving("begins with <s>") as one:
        body = {"prompt": ["a<|user|>", [0, 2], "b"], "n": 2, "echo": True, "max_tokens": 0}
        answer = (await one.post("/v1/completions", **body)).json()
        assert [choice["text"] for choice in answer["choices"]] == ["a<|user|>"] * 2 + ["<s><|user|>"] * 2 + ["b"] * 2


async def test_only_a_text_that_its_tokens_do_not_give_back_is_stored() -> None:
    for kind, stored in (("byte level", True), ("begins with <s>", ["the fox", None])):
        async with serving(kind) as one:
            await one.post("/v1/completions", prompt=["the fox", [5]], echo=True, max_tokens=1)
            [name] = one.pool.state.parents
            assert orjson.loads((await one.pool.parent(name)).render)["echo"] == stored


def test_stored_options_read_back_also_those_of_the_release_before() -> None:
    reserved = {"tool_format": "hermes", "reasoning_format": "think", "tools": "[]", "text_flags": 0, "items": "[]"}
    for options in ({}, {"echo": True}, {"echo": True, "echo_texts": ("a", None)}, reserved):
        one = RenderOptions(kind=AnswerKind.COMPLETION, model="tiny", created=1, **options)  # type: ignore[arg-type]
        assert RenderOptions.from_json(one.to_json()) == one
        stored = orjson.loads(one.to_json())
        assert "echo_texts" not in stored
        assert reserved.keys() & stored.keys() == reserved.keys() & options.keys()
        assert RenderOptions.from_json(orjson.dumps({**stored, "of_a_later_release": 1}).decode()) == one


async def test_the_echo_of_long_prompts_is_decoded_in_a_thread() -> None:
    settings = GatewaySettings(model="tiny", inline_characters_max=14)
    async with rig(schedules=False, settings=settings) as one:
        model, threads = one.app.state.gateway.models.current, []
        decode = model.tokenizer.decode

        def noting(given: list[int], **named: bool) -> str:
            threads.append(threading.current_thread())
            text: str = decode(given, **named)
            return text

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.tokenizer, "decode", noting)
            for prompts in (["the fox"] * 2, ["the fox"] * 3):
                body = CompletionBody(prompt=prompts, echo=True)
                await echo_texts(body, [model.tokenizer.encode(prompt) for prompt in prompts], model, settings)
        assert [thread is threading.current_thread() for thread in threads] == [True] * 2 + [False] * 3
