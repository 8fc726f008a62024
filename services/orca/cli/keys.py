"""`orca keys make NAME` makes an API key and the line that lets a gateway accept it.

The key is printed once and not stored. The line holds its hash: add it to the file that ORCA_GATEWAY_API_KEYS_FILE
names. Running gateways read a changed file within two seconds.
"""

import argparse
from collections.abc import Sequence
from dataclasses import fields

from orca.core.api_keys import ApiKey, KeyFileError, KeyLimits, is_name, key_digest, key_line, make_key, parse_keys
from orca.core.domain.errors import SettingError
from orca.core.process.command_line import CommandLineParser


def main(argv: Sequence[str]) -> int:
    """Print a new key and its line. Returns: 0. Raises: SettingError for a bad name or limit."""
    options = _parser().parse_args(argv)
    if not is_name(options.name):
        raise SettingError(
            f"NAME {options.name!r} is not valid: use up to 64 letters, digits, dots, dashes and underscores"
        )
    key = make_key()
    limits = KeyLimits(**{limit.name: getattr(options, limit.name) for limit in fields(KeyLimits)})
    written = key_line(ApiKey(options.name, key_digest(key), limits))
    try:
        parse_keys(written)
    except KeyFileError as error:
        raise SettingError(str(error).removeprefix("line 1: ")) from error
    print(f"the key, shown only once: {key}\nthe line for the file:    {written}")
    return 0


def _parser() -> CommandLineParser:
    parser = CommandLineParser(
        prog="orca keys", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=CommandLineParser)
    make = actions.add_parser("make", help="make a new key")
    make.add_argument("name", metavar="NAME", help="name of the owner; appears in logs and metrics")
    make.add_argument(
        "--requests-per-minute",
        type=int,
        metavar="N",
        help="most requests per minute at each gateway; a call counts as its prompts times its n",
    )
    make.add_argument(
        "--calls",
        type=int,
        metavar="N",
        help="most calls in progress at each gateway; a background call ends at once, so its requests count only for"
        " --requests-per-minute",
    )
    make.add_argument(
        "--queue-percent", type=int, metavar="N", help="refuse calls while the pool's queue is at least N %% full"
    )
    make.add_argument(
        "--most-urgent-priority",
        type=int,
        metavar="N",
        help="most urgent `priority` that calls may have, from -8 to 8; a lower number is more urgent; default: 0; if N"
        " is above 0, calls that name no priority get N",
    )
    return parser
