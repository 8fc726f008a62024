// The conversation: its messages in order, the answer that is being written, and what a user may do with either.

// Each turn: {message, node}, and `answer` if the model wrote it. A result of a call has no node of its own.
const turns = [];
let writing = null;  // the AbortController of the answer that is being written

const log = byId("log");

function conversationBody() {
  const system = byId("system").value.trim();
  const messages = [...(system ? [{role: "system", content: system}] : []), ...turns.map(turn => turn.message)];
  return {...chatSettings(), messages};
}

function say(text) {
  // A message without an answer does not come twice: what follows it takes its place.
  if (turns.at(-1)?.message.role === "user") turns.pop().node.classList.add("left-out");
  const edit = make("button", {type: "button", className: "small"}, "Edit");
  const node = make("article", {className: "user"},
    make("div", {className: "text"}, text), make("p", {className: "meta"}, edit));
  const turn = {message: {role: "user", content: text}, node};
  edit.addEventListener("click", () => {
    takeBack(turns.indexOf(turn));
    node.remove();
    byId("message").value = text;
    byId("message").focus();
    updateComposer();
  });
  turns.push(turn);
  log.append(node);
  return ask();
}

// Remove this turn and all that came after it. A turn that is out of the conversation already takes nothing with it.
function takeBack(index) {
  if (index < 0) return;
  writing?.abort();
  while (log.lastElementChild && log.lastElementChild !== turns[index].node) log.lastElementChild.remove();
  turns.splice(index).forEach(turn => turn.node?.remove());
}

function startAgain() {
  writing?.abort();
  turns.length = 0;
  log.replaceChildren();
  updateComposer();
  byId("message").focus();
}

// Let the model answer the conversation as it is.
async function ask() {
  const own = writing = new AbortController(), answer = new Answer(), speed = new Speed();
  const turn = {answer, node: answer.node, get message() { return answer.message; }};
  const body = conversationBody();
  // Only the last answer can be tried again: others have been built upon.
  for (const button of log.querySelectorAll(".again")) button.remove();
  log.append(answer.node);
  scrollToEnd();
  updateComposer();
  let error = null;
  const frames = new Frames(() => keepEnd(() => {
    answer.show();
    answer.status.textContent = speed.toString();
  }));
  try {
    for await (const chunk of chunks("/v1/chat/completions", body, own.signal)) {
      speed.count(chunk);
      chunk.choices.forEach(choice => answer.add(choice));
      frames.request();
    }
  } catch (caught) {
    error = caught;
  }
  frames.cancel();
  if (own === writing) writing = null;
  if (!answer.node.isConnected) return updateComposer();  // taken back meanwhile
  if (!answer.isEmpty || !error) turns.push(turn);
  updateComposer();
  keepEnd(() => endTurn(turn, speed, error));
}

function endTurn({answer}, speed, error) {
  const isStopped = error?.name === "AbortError";
  const words = [speed.toString(), isStopped ? "stopped" : "",
    answer.reason === "length" ? "cut off: Max tokens, or the model's context, allows no more" : ""];
  answer.end(words.filter(Boolean).join(" · "), texts => giveResults(answer, texts));
  if (error && !isStopped)
    answer.meta.before(make("p", {className: "error"}, plain(error)));
  const again = make("button", {type: "button", className: "small again"}, "Try again");
  again.addEventListener("click", () => {
    if (!settingsAreValid()) return;
    const index = turns.findIndex(turn => turn.answer === answer);
    if (index >= 0) takeBack(index);
    answer.node.remove();
    ask();
  });
  answer.meta.append(again);
}

function giveResults(answer, texts) {
  if (!settingsAreValid()) return;
  answer.showResults(texts);
  answer.wholeCalls.forEach((call, index) =>
    turns.push({message: {role: "tool", tool_call_id: call.id, content: texts[index]}, node: null}));
  ask();
}

// Draw once per frame, however many tokens have come.
class Frames {
  constructor(draw) {
    this.draw = draw;
    this.pending = null;
  }

  request() {
    this.pending ??= requestAnimationFrame(() => {
      this.pending = null;
      this.draw();
    });
  }

  cancel() {
    if (this.pending !== null) cancelAnimationFrame(this.pending);
    this.pending = null;
  }
}

// Change the log. A reader at its end stays there, and one who has scrolled up is left alone.
function keepEnd(change) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (isAtEnd) scrollToEnd();
}

function scrollToEnd() {
  log.scrollTop = log.scrollHeight;
}

function updateComposer() {
  const waits = turns.at(-1)?.answer?.waitsForResults ?? false;
  byId("say").hidden = writing !== null;
  byId("chat-stop").hidden = writing === null;
  byId("say").disabled = waits;
  byId("message").placeholder = waits ? "First give the results of the calls above." : "Message";
}

byId("composer").addEventListener("submit", event => {
  event.preventDefault();
  const text = byId("message").value;
  if (writing || byId("say").disabled || !text.trim() || !settingsAreValid()) return;
  byId("message").value = "";
  say(text);
});

byId("message").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});

byId("chat-stop").addEventListener("click", () => writing?.abort());
byId("new").addEventListener("click", startAgain);
