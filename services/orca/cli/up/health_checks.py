"""Health checks of one process, each with a time limit."""

import asyncio


async def http_status(address: str, path: str, within_s: float) -> int | None:
    """Return the HTTP status of `GET path` at host:port; None if no answer comes in time."""
    host, _, port = address.rpartition(":")
    request = f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    try:
        async with asyncio.timeout(within_s):
            words = (await _first_line(await asyncio.open_connection(host.strip("[]"), int(port)), request)).split()
    except (OSError, TimeoutError):
        return None
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else None


async def is_redis_answering(socket_path: str, within_s: float) -> bool:
    """Return whether the Redis at a Unix socket answers a PING in time.

    Any answer counts, also that Redis is loading its data or wants a password.
    """
    try:
        async with asyncio.timeout(within_s):
            return bool(await _first_line(await asyncio.open_unix_connection(socket_path), "PING\r\n"))
    except (OSError, TimeoutError):
        return False


async def _first_line(link: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: str) -> bytes:
    reader, writer = link
    try:
        writer.write(request.encode())
        return await reader.readline()
    finally:
        writer.close()
