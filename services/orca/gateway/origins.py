"""The origins of web pages, as the setting `cors_origins` names them."""

import re

ANY_ORIGIN = "*"

ORIGINS_RULE = "a list of origins, such as https://chat.example.com without a path, or *"
"""The setting's rule, for an error."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]*,]+)(:[0-9]{1,5})?", re.IGNORECASE)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def is_origin(text: str) -> bool:
    """Return whether a setting names one origin, or is `*`. `null` is none: any page can have it."""
    return text == ANY_ORIGIN or _ORIGIN.fullmatch(text) is not None


def as_browsers_write(origin: str) -> str:
    """Return an origin in lower case, without the port that its scheme has anyway."""
    origin = origin.lower()
    return origin.removesuffix(_DEFAULT_PORTS.get(origin.partition("://")[0], " "))
