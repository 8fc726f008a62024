"""Markdown of the page at `/`, in a real browser: what it becomes, and that HTML of a model stays text."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.gateway.browser import Browser, Page
from support.gateway.scripted_chat import scripted_chat

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def page(browser: Browser) -> AsyncIterator[Page]:
    async with scripted_chat() as chat, browser.page(chat.url) as one:
        yield one


async def html_of(page: Page, text: str, *, in_pieces: bool = False) -> str:
    """Return the HTML of a text that came whole, or one character after the other."""
    steps = "for (let end = 1; end < text.length; end += 1) view.show(text.slice(0, end));" if in_pieces else ""
    script = f"(() => {{ const view = new MarkdownView(), text = {json.dumps(text)}; {steps} view.show(text);"
    return str(await page.run(script + " return view.node.innerHTML; })()"))


BLOCKS = {
    "One\ntwo\n\nthree": "<p>One<br>two</p><p>three</p>",
    "# One #\n## Two": "<h1>One</h1><h2>Two</h2>",
    "#hash": "<p>#hash</p>",
    "```py\nif a < b:\n    *x*\n```\nend": '<pre data-language="py"><code>if a &lt; b:\n    *x*</code></pre><p>end</p>',
    "~~~\nopen": "<pre><code>open</code></pre>",
    "    code\n    more": "<pre><code>code\nmore</code></pre>",
    "- a\n- b\n  - c\n\n  d": "<ul><li>a</li><li>b<ul><li>c</li></ul><p>d</p></li></ul>",
    "2. a\n3. b": '<ol start="2"><li>a</li><li>b</li></ol>',
    "- a\n1. b": '<ul><li>a</li></ul><ol start="1"><li>b</li></ol>',
    "42.": "<p>42.</p>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "a\n***\nb": "<p>a</p><hr><p>b</p>",
    "| a | b |\n|---|:-:|\n| 1 \\| 2 |": '<div class="table"><table><thead><tr><th>a</th><th class="center">b</th></tr>'
    '</thead><tbody><tr><td>1 | 2</td><td class="center"></td></tr></tbody></table></div>',
    "a | b\nc": "<p>a | b<br>c</p>",
}
INLINE = {
    "*a* **b** ***c*** ~~d~~ __e__ _f_": "<em>a</em> <strong>b</strong> <strong><em>c</em></strong> <s>d</s> "
    "<strong>e</strong> <em>f</em>",
    "**a *b* c**": "<strong>a <em>b</em> c</strong>",
    "2 * 3 * 4, snake_case_name, a ** b, **open": "2 * 3 * 4, snake_case_name, a ** b, **open",
    "`a *b*` ``c ` d`` `open": "<code>a *b*</code> <code>c ` d</code> `open",
    "\\*a\\* \\d": "*a* \\d",
}
LINKS = {
    '[a](https://x.test/b_(c) "t")': ("a", "https://x.test/b_(c)"),
    "<mailto:ann@x.test>": ("mailto:ann@x.test", "mailto:ann@x.test"),
    "(see https://x.test/a?b=1&c=_d_.)": ("https://x.test/a?b=1&c=_d", "https://x.test/a?b=1&c=_d"),
    "![a cat](http://x.test/cat.png)": ("Image: a cat", "http://x.test/cat.png"),
    "[](https://x.test)": ("https://x.test", "https://x.test"),
}


async def test_blocks_and_inline_marks_become_elements_whole_or_in_pieces(page: Page) -> None:
    for text, html in {**BLOCKS, **{text: f"<p>{html}</p>" for text, html in INLINE.items()}}.items():
        assert await html_of(page, text) == html
        assert await html_of(page, text, in_pieces=True) == html
    everything = "\n\n".join((*BLOCKS, *INLINE, *LINKS))
    assert await html_of(page, everything, in_pieces=True) == await html_of(page, everything)
    assert not page.errors


async def test_links_of_the_web_and_of_mail_open_apart_and_tell_nothing(page: Page) -> None:
    for text, (label, address) in LINKS.items():
        script = f"(() => {{ const view = new MarkdownView(); view.show({json.dumps(text)});"
        script += "const [link, other] = view.node.querySelectorAll('a');"
        script += "return [link.textContent, link.getAttribute('href'), link.target, link.rel, !other]; })()"
        assert await page.run(script) == [label, address, "_blank", "noopener noreferrer", True], text


HOSTILE = (
    "<script>hacked = 1</script>",
    '<img src="https://evil.test/a.png" onerror="hacked = 1">',
    '<iframe src="https://evil.test"></iframe><object data="https://evil.test"></object>',
    '<svg onload="hacked = 1"></svg><style>@import "https://evil.test/a.css";</style>',
    '<a href="javascript:hacked = 1" onclick="hacked = 1">x</a>',
    '<form action="https://evil.test"><button formaction="https://evil.test">x</button></form>',
    "[x](javascript:hacked=1) [y](JaVaScRiPt:hacked=1) [z](data:text/html,<script>hacked=1</script>) <javascript:x>",
    "[x](vbscript:x) [y](file:///etc/passwd) [z](//evil.test) [w](blob:x) ![v](data:image/svg+xml,x) [u](https://)",
    '```"><script>hacked = 1</script>\n</code></pre><script>hacked = 1</script>\n```',
    "| <img src=x onerror=hacked=1> |\n|---|\n| <script>hacked = 1</script> |",
    "- <details open ontoggle=hacked=1>\n\n> <video src=https://evil.test/v onerror=hacked=1>",
    "&lt;script&gt; &#60;script&#62; <!-- <script> --> </div></article><script>hacked = 1</script>",
)


TAGS = ["DIV", "P", "H1", "H2", "PRE", "CODE", "HR", "BLOCKQUOTE", "UL", "OL", "LI", "BR", "EM", "STRONG", "S", "A"]
TAGS += ["TABLE", "THEAD", "TBODY", "TR", "TH", "TD"]
ATTRIBUTES = ["class", "data-language", "start", "href", "title", "target", "rel"]


async def test_html_stays_text_and_nothing_is_run_or_loaded(page: Page) -> None:
    for text in HOSTILE:
        script = f"(() => {{ const view = new MarkdownView(); view.show({json.dumps(text)}); log.append(view.node);"
        script += "const all = [view.node, ...view.node.querySelectorAll('*')];"
        script += "return [all.map(one => one.tagName), all.flatMap(one => one.getAttributeNames()),"
        tags, attributes, links = await page.run(script + "all.filter(one => one.href).map(one => one.protocol)]; })()")
        assert set(tags) <= set(TAGS), text
        assert set(attributes) <= set(ATTRIBUTES), text
        assert set(links) <= {"http:", "https:", "mailto:"}, text
    shown = await page.text("#log")
    for piece in (
        "<script>hacked = 1</script>",
        'onerror="hacked = 1"',
        "javascript:hacked=1",
        "&#60;script&#62;",
        "<!--",
    ):
        assert piece in shown
    assert await page.run("new Promise(resolve => requestAnimationFrame(() => resolve(typeof hacked)))") == "undefined"
    assert {url.split("/")[2] for url in page.urls} == {page.urls[0].split("/")[2]}
    assert not page.errors


async def test_even_a_mistake_of_the_page_could_not_make_html_of_text(page: Page) -> None:
    for script in (
        "document.body.innerHTML = '<b>x</b>'",
        "document.write('x')",
        "document.createElement('script').text = 'x'",
    ):
        assert "Error" in await page.run(
            f"(() => {{ try {{ {script}; return 'done'; }} catch (e) {{ return e.name; }} }})()"
        )


LONG = (
    *(
        piece * 10_000
        for piece in ("*", "*a ", "**a", "`", "``` ", "[", "[a](", "![", "_a", "~~a", "<", "h", "\\", "*`_")
    ),
    *(piece * 10_000 + "a" for piece in ("> ", "- ", "# ", "#", "[a](" + "(", " ")),
    *("\n".join([line] * 10_000) for line in ("a", "- a", "> a", "```", "|", "1. a", "  - a", "a\n=")),
    "|a" * 10_000 + "\n" + "|-" * 10_000,
)


async def test_text_that_is_meant_to_take_long_is_shown(page: Page) -> None:
    for text in LONG:
        assert await html_of(page, text), repr(text[:8])
