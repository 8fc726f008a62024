"""The settings of a gateway: `--port 80` or `ORCA_GATEWAY_PORT=80` (see core.process.settings)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from orca.core.answer_formats import AUTO_FORMAT, REASONING_FORMATS, TOOL_FORMATS
from orca.core.domain.model import DTYPES, QUANTIZATIONS
from orca.core.other_model import OtherModel
from orca.core.process.settings import (
    check_bounds,
    log_format_setting,
    log_level_setting,
    metric_names_setting,
    read_settings,
    require,
    required,
    setting,
)
from orca.gateway.origins import ORIGINS_RULE, is_origin

PREFIX = "ORCA_GATEWAY_"

PORT_MAX = 65_535


def tool_format_setting() -> Any:
    """Return the field `tool_format`, which the gateway shares with `orca up`."""
    return setting(
        AUTO_FORMAT,
        "format in which the model writes tool calls; auto means the one that its chat template has; none leaves"
        " calls in the text",
        choices=TOOL_FORMATS,
    )


def reasoning_format_setting() -> Any:
    """Return the field `reasoning_format`, which the gateway shares with `orca up`."""
    return setting(
        AUTO_FORMAT,
        "format in which the model writes its reasoning; auto means the one that its chat template has; none leaves"
        " reasoning in the text",
        choices=REASONING_FORMATS,
    )


PREFIX_SHARING = ("all", "key")


def prefix_sharing_setting() -> Any:
    """Return the field `prefix_sharing`, which the gateway shares with `orca up`."""
    return setting(
        "all",
        "calls that share computed prompts: all, or only those with the same API key; cache_salt in a call divides them"
        " further",
        choices=PREFIX_SHARING,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """The settings of a gateway process."""

    model: str = required("folder of the model: config.json, tokenizer.json and weights (only their headers are read)")
    other_models: tuple[str, ...] = setting(
        (),
        "more models: answers of all are rendered, calls are accepted for the one that is current in the pool; "
        "comma-separated FOLDER?name=NAME&dtype=DTYPE&quantization=QUANTIZATION&max_model_len=N"
        "&tool_format=FORMAT&reasoning_format=FORMAT",
    )
    name: str | None = setting(None, "name by which clients call the model; unset means the folder's name")
    dtype: str = setting("float32", "number type in which the stages compute; part of the revision", choices=DTYPES)
    quantization: str | None = setting(
        None,
        "number type to which the stages round matrices; part of the revision; unset means none",
        choices=QUANTIZATIONS,
    )
    max_model_len: int | None = setting(
        None,
        "longest prompt + output in tokens; unset means what the model allows; a model with rotary positions may get"
        " more, with a warning",
    )
    tool_format: str = tool_format_setting()
    reasoning_format: str = reasoning_format_setting()
    # Loopback, because the gateway does not encrypt.
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 means any free port", least=0)
    pool: str = setting("redis://127.0.0.1:6379/0", "URL of the pool's Redis")
    deployment: str = setting("orca", "name of the deployment, which separates its keys from others in the same Redis")
    api_keys: tuple[str, ...] = setting((), "comma-separated API keys of clients", is_secret=True)
    # Besides flags and variables, which are visible in the process list and cannot change while the gateway runs.
    api_keys_file: str | None = setting(
        None, "file of hashed API keys with their limits, one per line (`orca keys make`); read again when changed"
    )
    open_to_network: bool = setting(False, "serve without API keys on a host that other machines can reach")
    prefix_sharing: str = prefix_sharing_setting()
    cors_origins: tuple[str, ...] = setting(
        (),
        "comma-separated origins of web pages that may call the API from a browser, such as https://chat.example.com;"
        " * allows every page; unset allows none",
    )
    default_max_new_tokens: int = setting(
        512,
        "most tokens of a chat answer without max_tokens, cut to the context; completions have OpenAI's 16",
        least=1,
    )
    # For a cluster, where clients of the API must not read the metrics: `/metrics` needs no key.
    metrics_port: int | None = setting(
        None, "separate port for /metrics; unset serves it on the API's port; 0 means any free port", least=0
    )
    metric_names: tuple[str, ...] = metric_names_setting()
    # Each is an open file: the usual limit of a process is 1,024 or, in containers, far more.
    connections_max: int = setting(4096, "most connections at a time; further ones are answered 503", least=1)
    # Unset, because behind a load balancer all clients have its address.
    connections_per_address_max: int | None = setting(
        None,
        "most connections at a time from one client address; further ones are answered 429; unset: no limit",
        least=1,
    )
    calls_per_key_max: int | None = setting(
        None,
        "most calls at a time with one API key; a background call counts until its 202; further ones are answered 429;"
        " unset: no limit",
        least=1,
    )
    url_bytes_max: int = setting(8 << 10, "most bytes of a request's URL", least=1)
    header_bytes_max: int = setting(32 << 10, "most bytes of a request's headers, names and values", least=1)
    header_count_max: int = setting(100, "most headers of a request", least=1)
    # 4 MiB are about a million tokens of prompt, more than any context.
    body_bytes_max: int = setting(4 << 20, "most bytes of a call's body", least=1)
    # Without it slow senders could hold the largest body on each of thousands of connections.
    bodies_bytes_max: int = setting(
        256 << 20,
        "most bytes of all bodies that are being received or encoded at a time; further calls are answered 503",
        least=1,
    )
    header_seconds_max: float = setting(10.0, "seconds in which a request's line and headers must arrive", least=0.001)
    body_seconds_max: float = setting(
        30.0, "seconds in which a body must arrive, however slowly it is sent", least=0.001
    )
    # A call is lost if a proxy sends it on a connection which is just being closed. Proxies keep idle connections for
    # different times: nginx and AWS for 60 s, Traefik and other proxies written in Go for 90 s, Google for 600 s. Envoy
    # keeps them for an hour, and so does AWS as our operator configures it.
    idle_seconds_max: float = setting(
        3900.0,
        "seconds after which an idle connection is closed; proxies must close theirs earlier; a connection beyond"
        " connections_max takes the place of one that is idle for 5 s",
        least=0.001,
    )
    # A client that reads nothing holds a connection and its buffers. A client on a slow link always takes something.
    unread_seconds_max: float = setting(
        60.0, "seconds after which a connection is cut whose client takes nothing of what is sent", least=0.001
    )
    nesting_max: int = setting(32, "most levels of JSON in a body", least=2)
    # Checking 10,000 messages takes 35 ms, and no thread of this process runs meanwhile.
    containers_max: int = setting(10_000, "most objects and lists in a body; messages and their parts count", least=2)
    choices_max: int = setting(128, "most choices (prompts x n) of one call", least=1)
    stop_max: int = setting(16, "most stop strings of a call", least=0)
    # This much text may be held back.
    stop_characters_max: int = setting(1024, "most characters of one stop string", least=1)
    stop_token_ids_max: int = setting(128, "most stop token ids of a call", least=0)
    logit_bias_max: int = setting(1024, "most entries of a call's logit_bias", least=0)
    # Stored with each request of the call.
    allowed_token_ids_max: int = setting(1 << 14, "most token ids of a call's allowed_token_ids", least=1)
    bad_words_max: int = setting(128, "most texts of a call's bad_words", least=0)
    bad_word_characters_max: int = setting(256, "most characters of one text of bad_words", least=1)
    grammar_bytes_max: int = setting(64 << 10, "most bytes of the grammar that a call's schema makes", least=1)
    # A schema of an application takes some milliseconds.
    grammar_seconds_max: float = setting(
        0.8, "seconds in which a call's grammar must be built; calls with slower ones are refused", least=0.001
    )
    # About 10 ms of encoding.
    inline_characters_max: int = setting(
        10_000, "longer texts are encoded in a thread, so that streams go on meanwhile", least=0
    )
    # About 2 ms of parsing. While a thread parses megabytes, the loop still waits some 50 ms.
    inline_body_bytes_max: int = setting(
        64 << 10, "bodies with more bytes are parsed in a thread, so that streams go on meanwhile", least=0
    )
    # About 2 ms of a plain template.
    inline_messages_max: int = setting(
        500, "chats with more messages are rendered in a thread, so that streams go on meanwhile", least=0
    )
    # A template and the check of its prompt may read each text several times.
    inline_chat_characters_max: int = setting(
        100_000, "chats with longer texts are rendered in a thread, so that streams go on meanwhile", least=0
    )
    detokenize_tokens_max: int = setting(
        1 << 16, "most tokens of /detokenize, unless the model's context is longer", least=1
    )
    # English has 4 to 5. A longer token in the vocabulary raises the limit.
    bytes_per_token_max: int = setting(
        64, "a prompt with more bytes of text per token of the context is refused before it is encoded", least=1
    )
    tokenize_bytes_max: int = setting(
        256 << 10, "most bytes of text of /tokenize, unless the limit for prompts is higher", least=1
    )
    slo_enforce: bool = setting(
        False, "end requests that miss the latency goals of their x-slo headers; otherwise goals end nothing"
    )
    round_seconds: float = setting(
        0.5, "seconds between two rounds of renewing reader entries and sweeping the pool", least=0.001
    )
    # Proxies cut connections that are quiet for a minute, and clients should give up on dead ones.
    keep_alive_seconds: float = setting(
        15.0, "seconds after which a quiet stream gets a comment, which clients skip", least=0.001
    )
    # A first token mostly takes longer, so this does not delay it.
    proxy_pause_seconds: float = setting(
        0.05,
        "least seconds from the end of a forwarded request to its answer, for proxies written in Go (behind_proxy.py);"
        " other proxies need 0, which also sends the headers of a stream before its first event",
        least=0,
    )
    drain_seconds: float = setting(
        300.0, "seconds in which open answers may end after SIGTERM; a second signal cuts them at once", least=0
    )
    log_format: str = log_format_setting()
    log_level: str = log_level_setting()

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in ("port", "metrics_port"):
            # The system would silently take the lower 16 bits.
            require((getattr(self, name) or 0) <= PORT_MAX, self, name, f"{PORT_MAX} or less")
        require(self.name is None or bool(self.name.strip()), self, "name", "a name")
        require(all(map(_is_model, self.other_models)), self, "other_models", "a list of models as --help describes it")
        require(all(map(is_origin, self.cors_origins)), self, "cors_origins", ORIGINS_RULE)
        require(self.unread_seconds_max <= 32_767, self, "unread_seconds_max", "32767 or less, which is Linux's limit")
        require(self.bodies_bytes_max >= self.body_bytes_max, self, "bodies_bytes_max", "at least body_bytes_max")


def _is_model(text: str) -> bool:
    try:
        OtherModel.from_text(text)
    except ValueError:
        return False
    return True


def parse_settings(argv: Sequence[str], environment: Mapping[str, str]) -> GatewaySettings:
    """Read the settings. Raises: SettingError that names the setting; SystemExit only for --help."""
    return read_settings(
        GatewaySettings,
        argv,
        environment,
        prefix=PREFIX,
        prog="orca gateway",
        description="Serve the OpenAI API in front of a pool.",
    )
