// One answer of the model: the message for the history, and its place on the page, both of which grow with the stream.

class Answer {
  constructor() {
    this.text = this.reasoning = "";
    this.calls = [];  // {id, name, text}, where `text` are the arguments as the model writes them
    this.reason = null;  // why it ended: OpenAI's word; null if it was stopped or broke
    this.hasEnded = false;
    this.isAnswered = false;  // the results of all its calls are in the history
    this.markdown = new MarkdownView();
    this.summary = make("summary", {}, "Reasoning");
    this.thoughts = make("div", {className: "reasoning-text"});
    this.fold = make("details", {className: "reasoning", hidden: true}, this.summary, this.thoughts);
    this.results = make("form", {className: "results", noValidate: true, hidden: true});
    this.status = make("span", {className: "status"}, "waiting");
    this.meta = make("p", {className: "meta"}, this.status);
    this.node = make("article", {className: "assistant"}, this.fold, this.markdown.node, this.results, this.meta);
  }

  add(choice) {
    const delta = choice.delta ?? {};
    this.reason = choice.finish_reason ?? this.reason;
    this.text += delta.content ?? "";
    this.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
    for (const piece of delta.tool_calls ?? []) {
      const index = piece.index ?? 0;
      const call = this.calls[index] ??= {id: "call_" + index, name: "", text: ""};
      call.id = piece.id ?? call.id;
      call.name += piece.function?.name ?? "";
      call.text += piece.function?.arguments ?? "";
    }
  }

  // A call without all of its arguments has no result, and a chat template cannot write it.
  get wholeCalls() {
    const isWhole = this.reason !== null && this.reason !== "length";
    return this.calls.filter(call => call && (isWhole || isJson(call.text)));
  }

  get waitsForResults() {
    return this.wholeCalls.length > 0 && !this.isAnswered;
  }

  get isEmpty() {
    return !this.text && !this.reasoning && !this.wholeCalls.length;
  }

  get message() {
    const calls = this.wholeCalls;
    return {
      role: "assistant",
      content: this.text || (calls.length ? null : ""),
      ...(this.reasoning ? {reasoning_content: this.reasoning} : {}),
      ...(calls.length ? {tool_calls: calls.map(call =>
        ({id: call.id, type: "function", function: {name: call.name, arguments: call.text}}))} : {}),
    };
  }

  // Show what has come so far.
  show() {
    this.markdown.show(this.text);
    this.fold.hidden = !this.reasoning;
    if (this.thoughts.textContent.length !== this.reasoning.length) this.thoughts.textContent = this.reasoning;
    this.summary.textContent = this.text || this.calls.length || this.hasEnded ? "Reasoning" : "Reasoning …";
    this.results.hidden = !this.calls.length;
    this.calls.forEach(call => {
      call.node ??= this.results.appendChild(callNode());
      call.node.querySelector("summary").textContent = `Call of ${call.name}: ${call.text}`;
      call.node.querySelector(".arguments").textContent = call.text;
    });
  }

  // Show how it ended, and ask for the results of its calls. Args: send: takes the results, in the order of the calls.
  end(words, send) {
    this.hasEnded = true;
    this.show();
    this.status.textContent = words;
    this.calls.filter(call => !this.wholeCalls.includes(call)).forEach(call =>
      call.node.append(make("p", {className: "error"}, "This call is not complete, so it can have no result.")));
    if (!this.waitsForResults) return;
    const inputs = this.wholeCalls.map(call => {
      const input = make("textarea", {rows: 2, className: "result", placeholder: "What the function returns"});
      call.node.append(make("label", {}, `Result of ${call.name} `, input));
      return input;
    });
    const note = make("span", {className: "error"});
    note.setAttribute("role", "alert");
    const button = make("button", {className: "primary"}, inputs.length > 1 ? "Send results" : "Send result");
    this.results.append(make("p", {className: "row"}, button, note));
    this.results.addEventListener("submit", event => {
      event.preventDefault();
      const missing = inputs.find(input => !input.value.trim());
      note.textContent = missing ? "Every call needs a result." : "";
      if (missing) missing.focus();
      else send(inputs.map(input => input.value));
    });
  }

  // Fold the results into their calls.
  showResults(texts) {
    this.isAnswered = true;
    this.results.querySelector(".row").remove();
    this.wholeCalls.forEach((call, index) => {
      call.node.querySelector("label").remove();
      call.node.querySelector("details").append(make("pre", {className: "given"}, texts[index]));
    });
  }
}

function callNode() {
  return make("div", {className: "call"}, make("details", {}, make("summary"), make("pre", {className: "arguments"})));
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}
