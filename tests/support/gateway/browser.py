"""A headless Chromium of the distribution, driven by the DevTools protocol over two pipes.

Its pages may reach this machine only. Tests find elements by CSS selectors, and wait for conditions in JavaScript.
"""

import asyncio
import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Path of the browser; None if this machine has none."""

LIMIT_SECONDS = 60.0
"""Longer than anything takes on a busy machine."""

HAS_ENDED = "!writing && !!document.querySelector('.again')"
"""Condition of the page at `/`: the last answer is there."""

MESSAGE_BYTES_MAX = 64 << 20

_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, where it does not start
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)


class Browser:
    """A running browser. One reader task takes what it sends: answers to commands, and events of pages."""

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, commands: int) -> None:
        """Args: commands: file descriptor of the pipe into the browser."""
        self._process = process
        self._reader = reader
        self._commands = commands
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    async def command(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its result. Raises: AssertionError if the browser refuses it."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        found = await asyncio.wait_for(answer, LIMIT_SECONDS)
        assert "error" not in found, f"{method}: {found['error']}"
        result: dict[str, Any] = found["result"]
        return result

    async def read(self) -> None:
        """Hand over what the browser sends, until it ends."""
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                if (answer := self._answers.pop(message.get("id"), None)) is not None:
                    answer.set_result(message)
                elif (page := self._pages.get(message.get("sessionId"))) is not None:
                    page.take_event(message["method"], message["params"])

    @contextlib.asynccontextmanager
    async def page(self, url: str, *, width: int = 1280) -> AsyncIterator["Page"]:
        """Open a page in a profile of its own, and close it after the block. Args: width: of the screen, CSS pixels."""
        context = (await self.command("Target.createBrowserContext"))["browserContextId"]
        target = await self.command("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.command("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        try:
            for domain in ("Network", "Page", "Runtime"):
                await page.command(f"{domain}.enable")
            await page.show_on(width=width)
            await page.command("Page.navigate", url=url)
            await page.until("document.readyState === 'complete'")
            yield page
        finally:
            del self._pages[page.session]
            await self.command("Target.disposeBrowserContext", browserContextId=context)

    async def close(self) -> None:
        """End the browser with all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        os.close(self._commands)


@dataclass
class Page:
    """A page of the browser, with what it asked the network for and the errors of its script."""

    browser: Browser
    session: str
    urls: list[str] = field(default_factory=list)  # of its requests, also of those that a policy stopped
    errors: list[str] = field(default_factory=list)  # exceptions that nothing caught

    def take_event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))

    async def command(self, method: str, **params: Any) -> dict[str, Any]:
        return await self.browser.command(method, self.session, **params)

    async def run(self, script: str) -> Any:
        """Return the value of an expression, or of its promise. Raises: AssertionError if it throws."""
        answer = await self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression is true. Raises: AssertionError with the text of the page if it stays false."""
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                while not await self.run(f"Boolean({condition})"):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            shown = await self.run("document.body.innerText")
            raise AssertionError(f"not true within {LIMIT_SECONDS:g} s: {condition}\n{self.errors}\n{shown}") from None

    async def fill(self, selector: str, text: str) -> None:
        """Put text into a field as a user who pastes it. A select gets the option with this value."""
        await self.run(
            f"(() => {{ const field = document.querySelector({json.dumps(selector)}); field.focus();"
            f" field.value = {json.dumps(text)};"
            " for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, {bubbles: true})); })()"
        )

    async def click(self, selector: str) -> None:
        await self.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def press_enter(self, *, shift: bool = False) -> None:
        """Press Enter as the keyboard does, in the field that has the focus, as soon as one has it.

        A page that still loads is hidden, and no field of it can have the focus: the key would go nowhere.
        """
        await self.until("document.activeElement !== document.body")
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r", "modifiers": 8 * shift}
        await self.command("Input.dispatchKeyEvent", type="keyDown", **key)
        await self.command("Input.dispatchKeyEvent", type="keyUp", **key)

    async def text(self, selector: str) -> str:
        """Return the text of the last such element as it is shown; empty if there is none."""
        found = await self.run(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1)?.innerText ?? ''")
        return str(found)

    async def texts(self, selector: str) -> list[str]:
        """Return the texts of all such elements, folded ones too."""
        found = await self.run(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(element => element.textContent)"
        )
        return [str(text) for text in found]

    async def say(self, text: str, condition: str = HAS_ENDED) -> None:
        """Send a message of the chat, and wait until it is answered, or until another condition."""
        await self.until("!byId('chat').hidden")
        await self.fill("#message", text)
        await self.press_enter()
        await self.until(condition)

    async def show_on(self, *, width: int, height: int = 800, is_dark: bool = False) -> None:
        """Give the page a screen of this size in CSS pixels, and light or dark colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        await self.command("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.command("Emulation.setEmulatedMedia", features=[feature])

    async def screenshot(self) -> bytes:
        """Return the page as a PNG image, for a person to look at."""
        return base64.b64decode((await self.command("Page.captureScreenshot", format="png"))["data"])


def is_alone_with_its_server(page: Page) -> bool:
    """Has the page asked its own server only, and has its script not failed?"""
    assert not page.errors
    return len({url.split("/")[2] for url in page.urls}) == 1


@contextlib.asynccontextmanager
async def running_browser(profile: Path) -> AsyncIterator[Browser]:
    """Start a browser, and end it after the block. Args: profile: an empty folder."""
    assert PROGRAM is not None
    (theirs_in, ours_out), (ours_in, theirs_out) = _pipe(), _pipe()
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        # The browser takes commands from descriptor 3 and answers on 4.
        f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}',
        "bash",
        PROGRAM,
        *_FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        pass_fds=(theirs_in, theirs_out),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        env=os.environ | {"HOME": str(profile)},
    )
    os.close(theirs_in)
    os.close(theirs_out)
    reader = asyncio.StreamReader(limit=MESSAGE_BYTES_MAX)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours_in, "rb", buffering=0)
    )
    browser = Browser(process, reader, ours_out)
    reading = asyncio.create_task(browser.read())
    try:
        yield browser
    finally:
        await browser.close()
        await reading
        transport.close()


def _pipe() -> tuple[int, int]:
    """Return both ends of a pipe, with numbers above those that the browser expects."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
