"""The page's script, run by node with the few parts of a browser that it touches."""

import shutil
import subprocess
from pathlib import Path

import pytest

from orca.gateway.routes import about

BROWSER = """
const elements = {};
const document = {getElementById: id => elements[id] ??= {value: "", textContent: "", disabled: false, on: {},
  append() {}, addEventListener(kind, handler) { this.on[kind] = handler; }}};
const calls = [];
const fetch = (path, options) => path === "/ready"
  ? Promise.resolve({json: () => Promise.resolve({model: "tiny"})})
  : new Promise((_, reject) => {
      calls.push(options);
      options.signal.addEventListener("abort", () => reject(Object.assign(new Error("x"), {name: "AbortError"})));
    });
const submit = () => elements.form.on.submit({preventDefault() {}});
const settled = () => new Promise(resolve => setTimeout(resolve, 20));
"""


def run(steps: str) -> str:
    """Return the output of the steps, run after the page's own script."""
    page = Path(about.__file__).with_name("playground.html").read_text(encoding="utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    program = f"{BROWSER}{script}\n(async () => {{ {steps} }})();"
    return subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=20, check=True).stdout


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_replaced_call_does_not_change_stop_button_and_status_of_the_new_one() -> None:
    steps = """submit(); await settled(); submit(); await settled();
    console.log(calls.length, calls[0].signal.aborted, elements.stop.disabled, elements.status.textContent);
    elements.stop.on.click(); await settled(); console.log(elements.stop.disabled, elements.status.textContent);"""
    assert run(steps) == "2 true false waiting\ntrue stopped\n"


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_key_that_no_header_can_hold_is_reported_before_anything_is_sent() -> None:
    steps = """at("key").value = "ключ"; submit(); await settled();
    console.log(calls.length, elements.stop.disabled, elements.status.textContent);"""
    assert run(steps) == "0 true Error: the API key has characters that a key cannot have\n"
