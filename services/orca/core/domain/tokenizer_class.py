"""The tokenizer classes of transformers: which of them reads a folder, and what it makes of the vocabulary.

AutoTokenizer of transformers 5 reads a folder with the class that its files name, or with that of the model's family.
`TokenizersBackend` takes tokenizer.json as it is. Other classes take its vocabulary, merges and post-processor, and
replace the rest by their own: they decide how text is split, whatever the file says. Those that language models use are
here. The others are refused by name; a name that transformers does not know means TokenizersBackend.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from orca.core.domain.errors import ModelError

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerClass:
    """A class of transformers that builds its tokenizer from a vocabulary."""

    build: Callable[[Mapping[str, Any]], Json]
    """Settings, with the defaults filled in -> the parts of a tokenizer.json that replace those of the file. The
    setting `CHARSMAP` is the table of the file's normalizer."""
    vocabulary: str = "BPE"  # or Unigram
    tokens: Mapping[str, str] = field(default_factory=dict)  # special tokens unless the settings name others
    reads_vocab_json: bool = False  # instead of tokenizer.json: vocab.json and merges.txt
    own_vocabulary: Callable[[], Mapping[str, int]] | None = None  # no file has it
    is_bytes: bool = False  # each token is a byte: those that make no character are left out; EOS is never added twice
    adds_bos: bool = False  # BOS before each prompt, whatever the file's post-processor says
    drops_post_processor: bool = False
    makes_all_special: bool = False  # also tokens that the file lists as ordinary ones
    strips_before: tuple[str, ...] = ()  # named tokens that take the spaces before them, unless their flags are listed
    strips_around: tuple[str, ...] = ()  # the same, before and after
    extra_tokens: Callable[[Mapping[str, Any]], Sequence[str]] | None = (
        None  # more special tokens unless files list some
    )
    template: Callable[[Mapping[str, Any]], Sequence[str]] | None = None  # special tokens of a text; TEXT stands for it


CHARSMAP = "precompiled_charsmap"
TEXT = "$A"


def _byte_level(*, add_prefix_space: bool, use_regex: bool = True) -> Json:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


_BYTE_LEVEL_DECODER = _byte_level(add_prefix_space=True)


def _model(*, unk_token: str | None = None, fuse_unk: bool = False, byte_fallback: bool = False) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": False,
    }


def _gpt2(settings: Mapping[str, Any]) -> Json:
    return {
        "normalizer": None,
        "pre_tokenizer": _byte_level(add_prefix_space=bool(settings.get("add_prefix_space"))),
        "decoder": _BYTE_LEVEL_DECODER,
        "model": _model(),
    }


def _gpt_neox(settings: Mapping[str, Any]) -> Json:
    return _gpt2(settings) | {"normalizer": {"type": "NFC"}}


# The expression by which Qwen2 splits text: part of the class, not of its files.
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _qwen2(settings: Mapping[str, Any]) -> Json:
    prefix = bool(settings.get("add_prefix_space"))
    return {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                _split(_QWEN2_PATTERN),
                _byte_level(add_prefix_space=prefix, use_regex=False),
            ],
        },
        "decoder": _BYTE_LEVEL_DECODER,
        "model": _model(),
    }


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sentencepiece_decoder(*, strips: bool) -> Json:
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strips:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": decoders}


def _metaspace(prepend_scheme: str) -> Json:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend_scheme, "split": False}


def _llama(settings: Mapping[str, Any]) -> Json:
    prefix = settings.get("add_prefix_space")
    prefix = True if prefix is None else bool(prefix)
    scheme = "never" if not prefix else "always" if settings.get("legacy", False) else "first"
    return {
        "normalizer": None,
        "pre_tokenizer": _metaspace(scheme),
        "decoder": _sentencepiece_decoder(strips=prefix),
        "model": _model(fuse_unk=True, byte_fallback=True),
    }


def _code_llama(settings: Mapping[str, Any]) -> Json:
    prefix = settings.get("add_prefix_space")
    prefix = True if prefix is None else bool(prefix)
    return {
        "normalizer": None,
        "pre_tokenizer": _metaspace("first" if prefix else "never"),
        "decoder": _sentencepiece_decoder(strips=True),
        "model": _model(unk_token=settings.get("unk_token"), fuse_unk=True, byte_fallback=True),
    }


def _gemma(settings: Mapping[str, Any]) -> Json:
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "decoder": _sentencepiece_decoder(strips=False),
        "model": _model(unk_token=settings.get("unk_token"), fuse_unk=True, byte_fallback=True),
    }


def _unigram(unk_id: int) -> Json:
    return {"type": "Unigram", "unk_id": unk_id, "byte_fallback": False}


# SentencePiece's table of characters to replace, then runs of spaces.
def _charsmap(settings: Mapping[str, Any]) -> list[Json]:
    table = settings.get(CHARSMAP)
    return [] if table is None else [{"type": "Precompiled", CHARSMAP: table}]


def _sequence(normalizers: Sequence[Json]) -> Json | None:
    return {"type": "Sequence", "normalizers": list(normalizers)} if normalizers else None


_SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
_MARKED_WORDS = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
_SPLIT_WORDS = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, _MARKED_WORDS]}


def _t5(settings: Mapping[str, Any]) -> Json:
    return {
        "normalizer": _sequence(_charsmap(settings)),
        "pre_tokenizer": _SPLIT_WORDS,
        "decoder": _MARKED_WORDS,
        "model": _unigram(2),
    }


def _mbart(_: Mapping[str, Any]) -> Json:
    return {"normalizer": None, "pre_tokenizer": _SPLIT_WORDS, "decoder": _MARKED_WORDS, "model": _unigram(3)}


def _mbart50(settings: Mapping[str, Any]) -> Json:
    return {
        "normalizer": _sequence([*_charsmap(settings), _SPACES]),
        "pre_tokenizer": _MARKED_WORDS,
        "decoder": _MARKED_WORDS,
        "model": _unigram(3),
    }


def _nllb(settings: Mapping[str, Any]) -> Json:
    table = _charsmap(settings)
    return {
        "normalizer": _sequence([*table, _SPACES] if table else []),
        "pre_tokenizer": _MARKED_WORDS,
        "decoder": _MARKED_WORDS,
        "model": _model(unk_token=settings.get("unk_token"), fuse_unk=True),
    }


def _byt5(_: Mapping[str, Any]) -> Json:
    return {
        "normalizer": None,
        "pre_tokenizer": _byte_level(add_prefix_space=False, use_regex=False),
        "decoder": _BYTE_LEVEL_DECODER,
        "model": _model(),
    }


def _byt5_vocabulary() -> dict[str, int]:
    """Return three special tokens, then the bytes in order, as byte-level tokens write them."""
    return {"<pad>": 0, "</s>": 1, "<unk>": 2} | {text: 3 + byte for text, byte in byte_level_alphabet().items()}


def _sentinels(count: int) -> Callable[[Mapping[str, Any]], Sequence[str]]:
    """Return a function that makes T5's tokens for masked spans. Args: count: unless the settings name another one."""

    def make(settings: Mapping[str, Any]) -> list[str]:
        found = settings.get("extra_ids", count)
        return [f"<extra_id_{number}>" for number in range(found if isinstance(found, int) else count)]

    return make


@cache
def byte_level_alphabet() -> Mapping[str, int]:
    """Return character -> byte of byte-level BPE: printable Latin-1 is itself, the rest is 256 and up, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _around(settings: Mapping[str, Any]) -> list[str]:
    return [settings["cls_token"], TEXT, settings["sep_token"]]


def _before_eos(settings: Mapping[str, Any]) -> list[str]:
    return [TEXT, settings["eos_token"]]


def _language_last(settings: Mapping[str, Any]) -> list[str]:
    return [TEXT, settings["eos_token"], settings.get("src_lang") or "en_XX"]


def _language_first(settings: Mapping[str, Any]) -> list[str]:
    return [settings.get("src_lang") or "en_XX", TEXT, settings["eos_token"]]


def _nllb_template(settings: Mapping[str, Any]) -> list[str]:
    language = settings.get("src_lang") or "eng_Latn"
    if settings.get("legacy_behaviour"):
        return [TEXT, settings["eos_token"], language]
    return [language, TEXT, settings["eos_token"]]


_END_OF_TEXT = "<|endoftext|>"
_BART_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}
_ROBERTA = TokenizerClass(build=_gpt2, tokens=_BART_TOKENS, reads_vocab_json=True, template=_around)
_LLAMA_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}

# The languages of translation models: each is a special token, also if no file lists it. They are in the order of
# transformers, because a token that a vocabulary lacks gets the next free id.
_MBART = """
    ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX
    ro_RO ru_RU si_LK tr_TR vi_VN zh_CN
"""
_MBART50 = """
    af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN
    te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI
"""
_NLLB = """
    ace_Arab ace_Latn acm_Arab acq_Arab aeb_Arab afr_Latn ajp_Arab aka_Latn amh_Ethi apc_Arab arb_Arab ars_Arab
    ary_Arab arz_Arab asm_Beng ast_Latn awa_Deva ayr_Latn azb_Arab azj_Latn bak_Cyrl bam_Latn ban_Latn bel_Cyrl
    bem_Latn ben_Beng bho_Deva bjn_Arab bjn_Latn bod_Tibt bos_Latn bug_Latn bul_Cyrl cat_Latn ceb_Latn ces_Latn
    cjk_Latn ckb_Arab crh_Latn cym_Latn dan_Latn deu_Latn dik_Latn dyu_Latn dzo_Tibt ell_Grek eng_Latn epo_Latn
    est_Latn eus_Latn ewe_Latn fao_Latn pes_Arab fij_Latn fin_Latn fon_Latn fra_Latn fur_Latn fuv_Latn gla_Latn
    gle_Latn glg_Latn grn_Latn guj_Gujr hat_Latn hau_Latn heb_Hebr hin_Deva hne_Deva hrv_Latn hun_Latn hye_Armn
    ibo_Latn ilo_Latn ind_Latn isl_Latn ita_Latn jav_Latn jpn_Jpan kab_Latn kac_Latn kam_Latn kan_Knda kas_Arab
    kas_Deva kat_Geor knc_Arab knc_Latn kaz_Cyrl kbp_Latn kea_Latn khm_Khmr kik_Latn kin_Latn kir_Cyrl kmb_Latn
    kon_Latn kor_Hang kmr_Latn lao_Laoo lvs_Latn lij_Latn lim_Latn lin_Latn lit_Latn lmo_Latn ltg_Latn ltz_Latn
    lua_Latn lug_Latn luo_Latn lus_Latn mag_Deva mai_Deva mal_Mlym mar_Deva min_Latn mkd_Cyrl plt_Latn mlt_Latn
    mni_Beng khk_Cyrl mos_Latn mri_Latn zsm_Latn mya_Mymr nld_Latn nno_Latn nob_Latn npi_Deva nso_Latn nus_Latn
    nya_Latn oci_Latn gaz_Latn ory_Orya pag_Latn pan_Guru pap_Latn pol_Latn por_Latn prs_Arab pbt_Arab quy_Latn
    ron_Latn run_Latn rus_Cyrl sag_Latn san_Deva sat_Beng scn_Latn shn_Mymr sin_Sinh slk_Latn slv_Latn smo_Latn
    sna_Latn snd_Arab som_Latn sot_Latn spa_Latn als_Latn srd_Latn srp_Cyrl ssw_Latn sun_Latn swe_Latn swh_Latn
    szl_Latn tam_Taml tat_Cyrl tel_Telu tgk_Cyrl tgl_Latn tha_Thai tir_Ethi taq_Latn taq_Tfng tpi_Latn tsn_Latn
    tso_Latn tuk_Latn tum_Latn tur_Latn twi_Latn tzm_Tfng uig_Arab ukr_Cyrl umb_Latn urd_Arab uzn_Latn vec_Latn
    vie_Latn war_Latn wol_Latn xho_Latn ydd_Hebr yor_Latn yue_Hant zho_Hans zho_Hant zul_Latn
"""


def _languages(text: str) -> Callable[[Mapping[str, Any]], Sequence[str]]:
    return lambda _: text.split()


CLASSES: Mapping[str, TokenizerClass] = {
    "GPT2Tokenizer": TokenizerClass(
        build=_gpt2, tokens=dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END_OF_TEXT), reads_vocab_json=True
    ),
    "GPTNeoXTokenizer": TokenizerClass(
        build=_gpt_neox,
        tokens={**dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END_OF_TEXT), "pad_token": "<|padding|>"},
        drops_post_processor=True,
    ),
    "Qwen2Tokenizer": TokenizerClass(
        build=_qwen2,
        tokens=dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END_OF_TEXT),
        reads_vocab_json=True,
        makes_all_special=True,
    ),
    "LlamaTokenizer": TokenizerClass(build=_llama, tokens=_LLAMA_TOKENS),
    "CodeLlamaTokenizer": TokenizerClass(
        build=_code_llama,
        tokens={
            **_LLAMA_TOKENS,
            "prefix_token": "▁<PRE>",
            "middle_token": "▁<MID>",
            "suffix_token": "▁<SUF>",
            "eot_token": "▁<EOT>",
            "fill_token": "<FILL_ME>",
        },
        adds_bos=True,
    ),
    "GemmaTokenizer": TokenizerClass(
        build=_gemma,
        tokens={
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    ),
    "T5Tokenizer": TokenizerClass(
        build=_t5,
        tokens={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        vocabulary="Unigram",
        extra_tokens=_sentinels(100),
        template=_before_eos,
    ),
    "ByT5Tokenizer": TokenizerClass(
        build=_byt5,
        tokens={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        own_vocabulary=_byt5_vocabulary,
        is_bytes=True,
        strips_around=("eos_token", "unk_token", "pad_token"),
        extra_tokens=_sentinels(125),
        template=_before_eos,
    ),
    "BartTokenizer": _ROBERTA,
    "RobertaTokenizer": _ROBERTA,
    "NllbTokenizer": TokenizerClass(
        build=_nllb,
        tokens=_BART_TOKENS,
        strips_before=("mask_token",),
        extra_tokens=_languages(_NLLB),
        template=_nllb_template,
    ),
    "MBartTokenizer": TokenizerClass(
        build=_mbart,
        tokens=_BART_TOKENS,
        vocabulary="Unigram",
        strips_before=("mask_token",),
        extra_tokens=_languages(_MBART),
        template=_language_last,
    ),
    "MBart50Tokenizer": TokenizerClass(
        build=_mbart50,
        tokens={name: text for name, text in _BART_TOKENS.items() if name != "bos_token"},
        vocabulary="Unigram",
        strips_before=("mask_token",),
        extra_tokens=_languages(_MBART + _MBART50),
        template=_language_first,
    ),
}

# The class of a family unless its files name another one.
_OF_FAMILY = {
    "gpt2": "GPT2Tokenizer",
    "opt": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "t5": "T5Tokenizer",
    "mt5": "T5Tokenizer",
    "bart": "RobertaTokenizer",
    "mbart": "MBartTokenizer",
    "m2m_100": "M2M100Tokenizer",
    "marian": "MarianTokenizer",
}
# Families whose files name wrong classes on the hub, so that transformers goes by the family.
_ALWAYS_OF_FAMILY = ("qwen2",)
# Families without a class of their own: whatever class is named, tokenizer.json counts.
_WITHOUT_CLASS = ("mistral", "umt5")

_REFUSED_TEXT = """
    Albert Barthez Bartpho BertGeneration BertJapanese Bert BertTokenizerLegacy Bertweet BigBird BioGpt
    BlenderbotSmall Blenderbot CLIP CTRL Camembert Canine Clvp CodeGen Cohere ConvBert CpmAnt Cpm
    DPRContextEncoder DPRQuestionEncoder DPRReader Deberta DebertaV2 Dia DistilBert Esm Esmc FNet FSMT
    FastSpeech2Conformer Flaubert Funnel GPTNeoXJapanese GPTSw3 Herbert Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke
    M2M100 MLuke MPNet Marian MarkupLM Mgpstr MobileBert MyT5 Nougat OpenAIGPT PLBart Parakeet
    Pegasus Perceiver Phobert Pop2Piano ProphetNet Qwen3_5 Rag Reformer RemBert RoCBert RoFormer SeamlessM4T
    Siglip2 Siglip Speech2Text SpeechT5 Splinter SqueezeBert Tapas Tipsv2 Udop VideoPrism Vits Wav2Vec2CTC
    Wav2Vec2PhonemeCTC Whisper XGLM XLMRoberta XLM XLNet
"""
REFUSED = frozenset(name if name.endswith("Legacy") else f"{name}Tokenizer" for name in _REFUSED_TEXT.split())


def class_of_folder(
    model_type: str | None, *, of_tokenizer: str | None, of_config: str | None, is_byte_level: bool, has_code: bool
) -> TokenizerClass | None:
    """Return the class by which AutoTokenizer reads a folder; None is TokenizersBackend.

    Args:
        model_type: of config.json.
        of_tokenizer, of_config: `tokenizer_class` of tokenizer_config.json and of config.json.
        is_byte_level: tokenizer.json has a ByteLevel part.
        has_code: tokenizer_config.json names code of the model's own, which is not run.
    Raises: ModelError that names the class.
    """
    declared = of_tokenizer or of_config
    bare = None if declared is None else declared.removesuffix("Fast")
    if bare is not None and not has_code:
        own = _OF_FAMILY.get(model_type or "")
        # Llama 3 and its children have ByteLevel tokenizers under this name.
        if bare == "LlamaTokenizer" and is_byte_level and model_type not in _ALWAYS_OF_FAMILY:
            return None
        if model_type in _WITHOUT_CLASS:
            return None
        if own is not None and own != bare:
            return _find(own if model_type in _ALWAYS_OF_FAMILY else bare)
    found = bare or _OF_FAMILY.get(model_type or "")
    return None if found is None else _find(found)


def _find(name: str) -> TokenizerClass | None:
    if name in REFUSED:
        served = ", ".join(CLASSES)
        raise ModelError(
            f"tokenizer_class {name} is not served; served are {served} and PreTrainedTokenizerFast. If the model has "
            "a tokenizer.json, name PreTrainedTokenizerFast in tokenizer_config.json. save_pretrained of AutoTokenizer "
            "writes that file for most classes, but not for MarianTokenizer and M2M100Tokenizer: convert theirs with "
            "the tokenizers library"
        )
    return CLASSES.get(name)
