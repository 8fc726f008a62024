"""The origins of web pages, as the setting `cors_origins` names them."""

import re

ANY_ORIGIN = "*"

ORIGINS_RULE = "a list of origins, such as https://chat.example.com without a path, or *"
"""The setting's rule, for an error."""

# Browsers write a host in ASCII only, as xn--... if need be. The operator's CRD has the same rule.
_HOST = r"[a-z0-9._-]+|\[[0-9a-f:.]+\]"
_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]*://({_HOST})(:(?P<port>[0-9]{{1,5}}))?", re.IGNORECASE | re.ASCII)
_PORT_MAX = 65_535
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def is_origin(text: str) -> bool:
    """Return whether a setting names one origin, or is `*`. `null` is none: any page can have it."""
    if text == ANY_ORIGIN:
        return True
    found = _ORIGIN.fullmatch(text)
    return found is not None and int(found["port"] or 0) <= _PORT_MAX


def as_browsers_write(origin: str) -> str:
    """Return an origin in lower case, without the port that its scheme has anyway."""
    origin = origin.lower()
    return origin.removesuffix(_DEFAULT_PORTS.get(origin.partition("://")[0], " "))
