"""The page's script, run by node with the few parts of a browser that it touches."""

import ast
import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from orca.gateway.routes import about

BROWSER = """
const elements = {}, location = {origin: "http://host:8000"};
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
console.log(at("api").options.join(), at("temperature").value, at("prompt").value);
at("prefix").value = "fra_Latn"; submit(); await settled();
console.log(JSON.parse(calls[0].body).decoder_prefix);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_decoder_only_model_has_no_source_and_no_prefix() -> None:
    assert run(SHOWN) == "· tiny undefined true true\ncompletion,chat  \nundefined\n"


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_an_encoder_decoder_model_shows_source_prefix_and_target() -> None:
    shown = run(SHOWN, is_encoder_decoder=True, has_chat_template=False)
    assert shown == "· tiny Source false false\ncompletion 0 is mr darcy at home\nfra_Latn\n"


PROGRAMS = """
at("tokens").value = "64"; TYPED elements.form.on.input();
console.log(JSON.stringify([at("curl").textContent, at("client").textContent]));
"""


def programs(typed: str, **state: object) -> tuple[list[str], dict[str, Any], str]:
    """Return the words of the curl example, its body and the example of the client, after a user has typed."""
    curl, client = json.loads(run(PROGRAMS.replace("TYPED", typed), **state))
    words = shlex.split(curl)
    assert compile(client, "example", "exec")
    return words, json.loads(words[-1]), client


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_page_shows_the_call_of_an_encoder_decoder_model_for_curl_and_the_client() -> None:
    words, body, client = programs("", model="orca-restore", is_encoder_decoder=True, has_chat_template=False)
    assert words[:2] == ["curl", "http://host:8000/v1/completions"]
    assert body == {"model": "orca-restore", "max_tokens": 64, "temperature": 0, "prompt": "is mr darcy at home"}
    assert 'base_url="http://host:8000/v1", api_key="none"' in client
    assert 'client.completions.create(\n    model="orca-restore",\n    max_tokens=64,\n    temperature=0,' in client


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_examples_hold_what_the_form_holds_with_any_characters() -> None:
    text = 'it\'s "odd" \\ $HOME\n`end` \U0001f600'
    typed = f"at('prefix').value = at('prompt').value = {json.dumps(text)};"
    _, body, client = programs(typed, is_encoder_decoder=True)
    assert body["prompt"] == body["decoder_prefix"] == text
    [created] = [node for node in ast.walk(ast.parse(client)) if isinstance(node, ast.Call) and len(node.keywords) > 2]
    given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in created.keywords}
    assert given["prompt"] == text
    assert given["extra_body"] == {"decoder_prefix": text}


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_examples_of_a_chat_name_the_variable_of_the_key_and_not_the_key() -> None:
    words, body, client = programs('at("api").value = "chat"; at("key").value = "secret"; at("prompt").value = "hi";')
    assert words[1] == "http://host:8000/v1/chat/completions"
    assert "Authorization: Bearer $ORCA_API_KEY" in words
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert 'api_key=os.environ["ORCA_API_KEY"]' in client
    assert "client.chat.completions.create(" in client
    assert "secret" not in client + " ".join(words)
