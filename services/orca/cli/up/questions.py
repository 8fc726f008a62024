"""Short questions to a process, each bounded in time."""

import asyncio


async def http_status(address: str, path: str, within_s: float) -> int | None:
    """The status that `GET path` has at host:port; None without an answer in time."""
    host, _, port = address.rpartition(":")
    request = f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    try:
        async with asyncio.timeout(within_s):
            words = (await _first_line(await asyncio.open_connection(host.strip("[]"), int(port)), request)).split()
    except (OSError, TimeoutError):
        return None
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else None


async def is_redis_answering(socket_path: str, within_s: float) -> bool:
    """Whether the Redis at a Unix socket says anything to a PING in time: that it loads, or wants a password, too."""
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
