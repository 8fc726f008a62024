// The completion mode: a prompt, or the source of an encoder-decoder model, and the text that follows.

let completing = null;  // the AbortController of the call

function completionBody() {
  return {...settings(), prompt: byId("prompt").value};
}

function showStatus(text, isError = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("error", isError);
}

async function complete(signal) {
  const speed = new Speed();
  for await (const chunk of chunks("/v1/completions", completionBody(), signal)) {
    speed.count(chunk);
    for (const choice of chunk.choices) byId("answer").append(choice.text);
    showStatus(speed.toString());
  }
}

byId("form").addEventListener("submit", async event => {
  event.preventDefault();
  if (!settingsAreValid()) return;
  completing?.abort();
  const own = completing = new AbortController();
  byId("answer").textContent = "";
  showStatus("waiting");
  byId("stop").disabled = false;
  try {
    await complete(own.signal);
  } catch (error) {
    // Answer, status and Stop belong to the newest call.
    if (own !== completing) return;
    if (error.name === "AbortError") showStatus("stopped");
    else showStatus(plain(error), true);
  } finally {
    if (own === completing) byId("stop").disabled = true;
  }
});

byId("stop").addEventListener("click", () => completing?.abort());
