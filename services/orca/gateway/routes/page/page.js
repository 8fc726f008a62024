// The frame of the page: what the model can do, the mode, the settings, and the same call for a program.

const READY_PAUSE_MS = 1000;

let model = "";

// A mistake in this page shows as itself, so that it can be reported.
function plain(error) {
  return error instanceof SyntaxError ? "The server sent something that is no answer. " + error.message : error.message;
}

// The fields of the settings that have a value. The server has a default for each of the others.
function settings() {
  const fields = {};
  for (const input of byId("options").querySelectorAll("[data-field]"))
    if (input.value !== "") fields[input.dataset.field] = Number(input.value);
  const stops = byId("stops").value.split("\n").filter(Boolean);
  const prefix = byId("prefixed").hidden ? "" : byId("prefix").value;
  return {
    ...fields,
    ...(stops.length ? {stop: stops} : {}),
    ...(prefix ? {decoder_prefix: prefix} : {}),
    ...readJson("extra", isObject),
  };
}

function chatSettings() {
  const tools = readJson("tools", Array.isArray), choice = byId("tool-choice").value;
  return {...settings(), ...(tools?.length ? {tools, ...(choice ? {tool_choice: choice} : {})} : {})};
}

const isObject = value => typeof value === "object" && value !== null && !Array.isArray(value);

function readJson(id, fits) {
  const text = byId(id).value.trim();
  if (!text) return null;
  const value = JSON.parse(text);
  if (!fits(value)) throw new SyntaxError("it has another kind of value");
  return value;
}

// Show what is wrong with a field of JSON, in words, under it.
function checkJson(id, fits, kind) {
  let words = "";
  try {
    readJson(id, fits);
  } catch (error) {
    words = `This must be a JSON ${kind}: ${error.message}.`;
  }
  byId(id).setCustomValidity(words);
  byId(id).parentElement.querySelector(".error").textContent = words;
}

// Are all settings usable? If not, show the first that is not.
function settingsAreValid() {
  const options = byId("options");
  if (options.checkValidity()) return true;
  byId("settings").hidden = false;
  options.reportValidity();
  return false;
}

function showMode() {
  const isChat = byId("api").value === "chat";
  byId("chat").hidden = byId("new").hidden = !isChat;
  byId("completion").hidden = isChat;
  for (const node of document.querySelectorAll(".chat-only")) node.hidden = !isChat;
  // Of a chat the server knows best how long an answer may be. A completion of a model that never ends is long.
  if (!byId("tokens").dataset.isOwn) byId("tokens").value = isChat ? "" : "64";
  byId(isChat ? "message" : "prompt").focus();
}

function thisCall() {
  if (byId("api").value !== "chat") return {path: "/v1/completions", body: completionBody()};
  const body = conversationBody(), typed = byId("message").value.trim();
  if (typed || !body.messages.length) body.messages.push({role: "user", content: typed || "Hello!"});
  return {path: "/v1/chat/completions", body};
}

function showPrograms() {
  if (!settingsAreValid()) return;
  const {curl, client} = programs(thisCall(), model, byId("key").value !== "");
  byId("curl").textContent = curl;
  byId("client").textContent = client;
  byId("programs").showModal();
}

// An encoder-decoder model reads a source and writes a target, which is most useful without chance. The source that is
// there at first is text as the small model of Orca reads it.
function showModel(state) {
  model = state.model;
  byId("model").textContent = "· " + model;
  if (!state.has_chat_template) byId("api").querySelector("[value=chat]").remove();
  byId("api").hidden = !state.has_chat_template;
  if (state.is_encoder_decoder) {
    byId("input").textContent = "Source";
    byId("prefixed").hidden = byId("target").hidden = false;
    byId("temperature").value = "0";
    byId("prompt").value = "is mr darcy at home";
  }
  if (!state.ready) waitForModel();
  showMode();
}

async function waitForModel() {
  showNotice("The server is not ready yet. It stores calls, and answers them when the model is loaded.");
  do {
    await new Promise(resolve => setTimeout(resolve, READY_PAUSE_MS));
  } while (!(await readState().catch(() => null))?.ready);
  byId("notice").hidden = true;
}

async function readState() {
  return (await fetch("/ready")).json();
}

function showNotice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = false;
}

byId("api").addEventListener("change", showMode);
byId("tokens").addEventListener("input", () => byId("tokens").dataset.isOwn = "yes");
byId("tools").addEventListener("input", () => checkJson("tools", Array.isArray, "list"));
byId("extra").addEventListener("input", () => checkJson("extra", isObject, "object"));
byId("options").addEventListener("submit", event => event.preventDefault());
byId("show-settings").addEventListener("click", () => byId("settings").hidden = !byId("settings").hidden);
byId("hide-settings").addEventListener("click", () => byId("settings").hidden = true);
byId("show-programs").addEventListener("click", showPrograms);
byId("hide-programs").addEventListener("click", () => byId("programs").close());

// On a narrow screen the settings cover the page, so they are closed until somebody asks for them.
const narrow = matchMedia("(max-width: 48rem)");
narrow.addEventListener("change", () => byId("settings").hidden = narrow.matches);
byId("settings").hidden = narrow.matches;

readState().then(showModel, () => showNotice(NO_ANSWER + " Then load this page again."));
