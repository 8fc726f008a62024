"""The settings of a gateway: `--port 80` or `ORCA_GATEWAY_PORT=80` (see core.process.settings)."""

import dataclasses
from collections.abc import Mapping, Sequence

from orca.core.domain.model import DTYPES, QUANTIZATIONS
from orca.core.other_model import OtherModel
from orca.core.process.settings import (
    check_bounds,
    log_format_setting,
    log_level_setting,
    read_settings,
    require,
    required,
    setting,
)

PREFIX = "ORCA_GATEWAY_"

PORT_MAX = 65_535


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that a gateway process is told at start."""

    model: str = required("folder of the model: config.json, tokenizer.json and weights, of which it reads no values")
    other_models: tuple[str, ...] = setting(
        (),
        "further models that it reads answers of, and accepts calls for while the pool has them in force: "
        "FOLDER?name=NAME&dtype=DTYPE&quantization=QUANTIZATION&max_model_len=N, parted by commas",
    )
    name: str | None = setting(None, "what clients call the model; unset takes the folder's name")
    dtype: str = setting("float32", "what the stages compute in; part of the revision", choices=DTYPES)
    quantization: str | None = setting(
        None,
        "what the stages round matrices to; part of the revision; unset leaves them in dtype",
        choices=QUANTIZATIONS,
    )
    max_model_len: int | None = setting(None, "longest prompt + output in tokens; unset takes what the model allows")
    # Loopback, because it encrypts nothing itself.
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one", least=0)
    pool: str = setting("redis://127.0.0.1:6379/0", "URL of the pool's Redis")
    deployment: str = setting("orca", "word that keeps this deployment's keys apart in one Redis")
    api_keys: tuple[str, ...] = setting((), "keys that clients may show, parted by commas", is_secret=True)
    # Beside flags and variables, because what those hold is seen in the process and cannot change while it runs.
    api_keys_file: str | None = setting(
        None, "file of hashed keys with their limits, a line each (`orca keys make`), followed when it changes"
    )
    open_to_network: bool = setting(False, "serve without keys at a host that other machines reach")
    default_max_new_tokens: int = setting(
        512, "tokens of a chat answer without max_tokens, cut to the context; completions take OpenAI's 16", least=1
    )
    # For a cluster, where whoever reaches the API is not to read the metrics: `/metrics` has no key.
    metrics_port: int | None = setting(
        None, "port that serves /metrics instead of the API's; unset serves both from one; 0 takes a free one", least=0
    )
    # An open file each: a process is usually allowed 1,024 or, in containers, far more.
    connections_max: int = setting(4096, "connections at a time; one more is answered 503", least=1)
    # Unset, because behind a balancer all clients have its address.
    connections_per_address_max: int | None = setting(
        None, "connections at a time of one client address; one more is answered 429; unset bounds nothing", least=1
    )
    calls_per_key_max: int | None = setting(
        None,
        "calls at a time that show one key, one in the background until its 202; one more is answered 429; unset bounds"
        " nothing",
        least=1,
    )
    url_bytes_max: int = setting(8 << 10, "bytes of a request's URL", least=1)
    header_bytes_max: int = setting(32 << 10, "bytes of all names and values of a request's headers", least=1)
    header_count_max: int = setting(100, "headers of a request", least=1)
    # 4 MiB are some million tokens of prompt, more than any context.
    body_bytes_max: int = setting(4 << 20, "largest body of a call", least=1)
    # Without it slow senders could hold the largest body on each of thousands of connections.
    bodies_bytes_max: int = setting(
        256 << 20,
        "bytes of all bodies that are read, or wait to be encoded, at a time; beyond it calls get 503",
        least=1,
    )
    header_seconds_max: float = setting(10.0, "seconds for a request's line and headers to arrive", least=0.001)
    body_seconds_max: float = setting(30.0, "seconds for a body to arrive; one that drips in is cut then", least=0.001)
    # A call that a proxy sends on a connection which is just being closed is lost. nginx and AWS keep theirs for 60 s,
    # Traefik and whatever else is written in Go for 90, Google's for 600, Envoy for an hour, as AWS's here (operator).
    idle_seconds_max: float = setting(
        3900.0,
        "a connection without a request for so long is closed, longer than proxies keep theirs; one beyond"
        " connections_max takes the place of a connection that is idle for 5 s",
        least=0.001,
    )
    # A client that reads nothing holds a connection and its buffers. One behind a slow link always takes something.
    unread_seconds_max: float = setting(
        60.0, "seconds in which a client takes nothing of what is sent; its connection is cut then", least=0.001
    )
    nesting_max: int = setting(32, "levels of JSON in a body", least=2)
    # Checking 10,000 messages takes 35 ms, in one piece: no thread of this process runs meanwhile.
    containers_max: int = setting(10_000, "objects and lists in a body, messages and their parts among them", least=2)
    choices_max: int = setting(128, "prompts x n of one call", least=1)
    stop_max: int = setting(16, "stop strings of a call", least=0)
    # So much text may be held back.
    stop_characters_max: int = setting(1024, "characters of one stop string", least=1)
    stop_token_ids_max: int = setting(128, "stop token ids of a call", least=0)
    logit_bias_max: int = setting(1024, "entries of a call's logit_bias", least=0)
    # About 10 ms of encoding.
    inline_characters_max: int = setting(10_000, "longer texts are encoded in a thread, so that streams go on", least=0)
    # About 2 ms of parsing. Beside a thread that parses megabytes the loop still waits some 50 ms.
    inline_body_bytes_max: int = setting(
        64 << 10, "larger bodies are parsed in a thread, so that streams go on", least=0
    )
    # About 2 ms of a plain template.
    inline_messages_max: int = setting(
        500, "chats of more messages are written out in a thread, so that streams go on", least=0
    )
    detokenize_tokens_max: int = setting(
        1 << 16, "most tokens of /detokenize, where the model's context is not longer", least=1
    )
    # English has 4 to 5; a longer token of the vocabulary raises it.
    bytes_per_token_max: int = setting(
        64, "a prompt with more bytes of text for each token of the context is refused before it is encoded", least=1
    )
    tokenize_bytes_max: int = setting(
        256 << 10, "longest text of /tokenize, where the bound for prompts is not above it", least=1
    )
    # Counts for nothing while the schema of the release before is in force (goals.SCHEMA_LEAST).
    slo_enforce: bool = setting(
        False, "end a request that has missed the latency goals of its x-slo headers; else they are judged and counted"
    )
    round_seconds: float = setting(0.5, "between two rounds of renewing reader entries and sweeping", least=0.001)
    # Proxies cut connections that are quiet for a minute, and clients do well to give up on those that are dead.
    keep_alive_seconds: float = setting(
        15.0, "a stream quiet for so long gets a comment, which clients skip", least=0.001
    )
    # A first token mostly takes longer, so it is not later for it.
    proxy_pause_seconds: float = setting(
        0.05,
        "from the end of a forwarded request to its answer, at least, for proxies written in Go (behind_proxy.py);"
        " others need none: 0 also lets the headers of a stream go before its first event",
        least=0,
    )
    drain_seconds: float = setting(
        300.0, "open answers may take so long to end after SIGTERM; a second signal cuts them at once", least=0
    )
    log_format: str = log_format_setting()
    log_level: str = log_level_setting()

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in ("port", "metrics_port"):
            # The system would take its lower 16 bits.
            require((getattr(self, name) or 0) <= PORT_MAX, self, name, f"{PORT_MAX} or less")
        require(self.name is None or bool(self.name.strip()), self, "name", "a name")
        require(all(map(_is_model, self.other_models)), self, "other_models", "folders, as in its help")
        require(self.unread_seconds_max <= 32_767, self, "unread_seconds_max", "32767 or less, as Linux wants it")
        require(self.bodies_bytes_max >= self.body_bytes_max, self, "bodies_bytes_max", "at least body_bytes_max")


def _is_model(word: str) -> bool:
    try:
        OtherModel.from_text(word)
    except ValueError:
        return False
    return True


def parse_settings(argv: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Raises: SettingError that names the setting; SystemExit only for --help."""
    return read_settings(
        Settings,
        argv,
        environment,
        prefix=PREFIX,
        prog="orca gateway",
        description="Serve the OpenAI API in front of a pool.",
    )
