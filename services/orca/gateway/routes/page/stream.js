// A call of the API as a stream: headers, events, resuming after a break, and errors in plain words.

const byId = id => document.getElementById(id);

// A new element. Children are nodes or text, never HTML.
function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

const RESUME_TRIES = 20, RESUME_PAUSE_MS = 500;
const NO_ANSWER = "The server does not answer. Check that it runs and that this device can reach it.";

function headers() {
  const key = byId("key").value.trim();
  if (/[^\x21-\x7e]/.test(key)) throw new Error("The API key has characters that a key cannot have.");
  const own = key ? {authorization: "Bearer " + key} : {};
  return {"content-type": "application/json", accept: "text/event-stream", ...own};
}

// The chunks of a call's answer. A stream that breaks goes on after its last event, at any gateway. An abort cancels
// the call: the server would also do so by itself, but some seconds later.
async function* chunks(path, body, signal) {
  let response = await send(path, {method: "POST", headers: headers(), body: JSON.stringify(
    {...body, stream: true, stream_options: {include_usage: true}}), signal});
  const call = response.headers.get("x-request-id");
  const cancel = () => call && fetch("/v1/requests/" + encodeURIComponent(call),
    {method: "DELETE", headers: headers(), keepalive: true}).catch(() => {});
  signal.addEventListener("abort", cancel);
  try {
    for (let last = "0.start", breaks = 0;;) {
      try {
        for await (const {id, data} of events(response)) {
          signal.throwIfAborted();
          if (data === "[DONE]") return;
          const chunk = JSON.parse(data);
          if (chunk.error?.code === "gateway_draining") break;
          if (chunk.error) throw new Error("The answer ended early: " + sentence(chunk.error.message));
          last = id ?? last;
          breaks = 0;
          yield chunk;
        }
      } catch (error) {
        // Reading fails so when a connection breaks.
        if (!(error instanceof TypeError)) throw error;
      }
      if (!call) throw new Error("The stream broke off. The text is not complete.");
      do {
        if (breaks) await new Promise(resolve => setTimeout(resolve, RESUME_PAUSE_MS));
        if ((breaks += 1) > RESUME_TRIES) throw new Error(
          "The stream broke off, and the server has not sent the rest since. The text is not complete.");
        response = await resume(call, last, signal);
      } while (!response);
    }
  } finally {
    signal.removeEventListener("abort", cancel);
  }
}

// The answer that goes on after an event; null if no server can give it now.
async function resume(call, last, signal) {
  signal.throwIfAborted();
  const response = await fetch(`/v1/requests/${encodeURIComponent(call)}/events`,
    {headers: {...headers(), "last-event-id": last}, signal}).catch(unlessAborted);
  if (!response || response.status >= 500 || response.status === 429) return null;
  if (!response.ok) throw await failure(response);
  return response;
}

// Of a fetch: undefined if the server was not reached.
function unlessAborted(error) {
  if (error.name === "AbortError") throw error;
}

async function send(path, options) {
  const response = await fetch(path, options).catch(unlessAborted);
  if (!response) throw new Error(NO_ANSWER);
  if (!response.ok) throw await failure(response);
  return response;
}

async function* events(response) {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const fields = Object.fromEntries(part.split("\n").map(fieldOf));
        if (fields.data !== undefined) yield fields;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function fieldOf(line) {
  const colon = line.indexOf(": ");
  return [line.slice(0, Math.max(0, colon)), line.slice(colon + 2)];
}

// An error answer as a sentence for somebody who has never read the API.
async function failure(response) {
  const error = (await response.json().catch(() => null))?.error;
  const again = response.headers.get("retry-after");
  const later = again ? ` Try again in ${again} s.` : "";
  const why = error?.message ? sentence(error.message) : `it sent HTTP ${response.status} without an explanation.`;
  switch (response.status) {
    case 401: return new Error(byId("key").value ? "The server does not accept this API key. Check it in the settings."
      : "The server needs an API key. Enter yours in the settings.");
    case 429: return new Error("The server takes no more calls from you at the moment: " + why + later);
    case 503: return new Error("The server cannot answer at the moment: " + why + later);
    default:
      return new Error((response.status < 500 ? "The server refused the call: " : "The server failed: ") + why + later);
  }
}

function sentence(text) {
  return /[.!?)]$/.test(text) ? text : text + ".";
}

// The speed of an answer: tokens, time until the first, and tokens per second.
class Speed {
  constructor() {
    this.started = performance.now();
    this.first = null;
    this.tokens = 0;
  }

  count(chunk) {
    // One event per token, besides that of the end.
    for (const choice of chunk.choices) if ((choice.finish_reason ?? null) === null) this.tokens += 1;
    this.tokens = chunk.usage?.completion_tokens ?? this.tokens;
    this.first ??= performance.now();
    this.last = performance.now();
  }

  toString() {
    if (this.first === null) return "";
    const wait = (this.first - this.started) / 1000, seconds = Math.max(.001, (this.last - this.started) / 1000);
    const tokens = this.tokens === 1 ? "1 token" : this.tokens + " tokens";
    return `${tokens}, first after ${wait.toFixed(2)} s, ${(this.tokens / seconds).toFixed(1)} tokens/s`;
  }
}
