"""The page's script, run by node with the few parts of a browser that it touches."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from orca.gateway.routes import about

BROWSER = """
const elements = {};
const document = {getElementById: id => elements[id] ??= {value: "", textContent: "", disabled: false, on: {},
  hidden: id === "prefixed" || id === "target", options: ["completion", "chat"],
  querySelector(which) { return {remove: () => this.options = this.options.filter(one => !which.includes(one))}; },
  append() {}, addEventListener(kind, handler) { this.on[kind] = handler; }}};
const calls = [];
const fetch = (path, options) => path === "/ready"
  ? Promise.resolve({json: () => Promise.resolve(STATE)})
  : new Promise((_, reject) => {
      calls.push(options);
      options.signal.addEventListener("abort", () => reject(Object.assign(new Error("x"), {name: "AbortError"})));
    });
const submit = () => elements.form.on.submit({preventDefault() {}});
const settled = () => new Promise(resolve => setTimeout(resolve, 20));
"""


DECODER_ONLY = {"model": "tiny", "is_encoder_decoder": False, "has_chat_template": True}


def run(steps: str, **state: object) -> str:
    """Return the output of the steps, run after the page's own script. Args: state: of the gateway (/ready)."""
    page = Path(about.__file__).with_name("playground.html").read_text(encoding="utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    stated = json.dumps(DECODER_ONLY | state)
    program = f"const STATE = {stated};{BROWSER}{script}\n(async () => {{ await settled(); {steps} }})();"
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


SHOWN = """
console.log(elements.model.textContent, elements.input?.textContent, at("prefixed").hidden, at("target").hidden);
console.log(at("api").options.join(), at("temperature").value);
at("prefix").value = "fra_Latn"; submit(); await settled();
console.log(JSON.parse(calls[0].body).decoder_prefix);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_decoder_only_model_has_no_source_and_no_prefix() -> None:
    assert run(SHOWN) == "· tiny undefined true true\ncompletion,chat \nundefined\n"


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_an_encoder_decoder_model_shows_source_prefix_and_target() -> None:
    shown = run(SHOWN, is_encoder_decoder=True, has_chat_template=False)
    assert shown == "· tiny Source false false\ncompletion 0\nfra_Latn\n"
