"""`orca keys make NAME`: a new API key, and the line by which a gateway knows it.

The key is printed once and kept nowhere; the line holds its hash and goes into the file that ORCA_GATEWAY_API_KEYS_FILE
names. Running gateways take over a changed file within a second or two.
"""

import argparse
from collections.abc import Sequence
from dataclasses import fields

from orca.core.api_keys import ApiKey, KeyFileError, KeyLimits, is_name, key_digest, key_line, make_key, parse_keys
from orca.core.domain.errors import SettingError
from orca.core.process.command_line import CommandLineParser


def main(argv: Sequence[str]) -> int:
    """Print a key and its line. Returns: 0. Raises: SettingError for a bad name or limit."""
    options = _parser().parse_args(argv)
    if not is_name(options.name):
        raise SettingError(f"NAME {options.name!r} is not up to 64 letters, digits, dots, dashes and underscores")
    key = make_key()
    limits = KeyLimits(**{limit.name: getattr(options, limit.name) for limit in fields(KeyLimits)})
    written = key_line(ApiKey(options.name, key_digest(key), limits))
    try:
        parse_keys(written)
    except KeyFileError as error:
        raise SettingError(str(error).removeprefix("line 1: ")) from error
    print(f"the key, shown this once: {key}\nthe line for the file:    {written}")
    return 0


def _parser() -> CommandLineParser:
    parser = CommandLineParser(
        prog="orca keys", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=CommandLineParser)
    make = actions.add_parser("make", help="a new key")
    make.add_argument("name", metavar="NAME", help="of its owner; appears in logs and metrics")
    make.add_argument("--requests-per-minute", type=int, metavar="N", help="prompts x n of its calls, at each gateway")
    make.add_argument(
        "--calls",
        type=int,
        metavar="N",
        help="answers under way at each gateway; one to a call in the background ends at once, so its requests count"
        " for --requests-per-minute only",
    )
    make.add_argument("--queue-percent", type=int, metavar="N", help="refused once the pool's queue is so full")
    return parser
