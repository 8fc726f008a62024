// The call of the page as curl and as the openai client send it. The key stays in its field: both read ORCA_API_KEY.

// Parameters that the client has. It takes others in `extra_body`.
const CLIENT_FIELDS = new Set(["model", "messages", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop",
  "presence_penalty", "frequency_penalty", "tools", "tool_choice", "parallel_tool_calls", "response_format",
  "reasoning_effort", "n", "logprobs"]);

function programs({path, body}, model, hasKey) {
  const url = location.origin + path, isChat = path.includes("chat");
  const fields = Object.entries({model, ...body});
  const own = fields.filter(([name]) => CLIENT_FIELDS.has(name));
  const extra = Object.fromEntries(fields.filter(([name]) => !CLIENT_FIELDS.has(name)));
  if (Object.keys(extra).length) own.push(["extra_body", extra]);
  const key = hasKey ? 'os.environ["ORCA_API_KEY"]' : '"none"';
  return {
    curl: `curl ${url} -H 'Content-Type: application/json' \\\n` +
      (hasKey ? '     -H "Authorization: Bearer $ORCA_API_KEY" \\\n' : "") +
      `     -d '${JSON.stringify({model, ...body}).replaceAll("'", "'\\''")}'`,
    client: (hasKey ? "import os\n\n" : "") + "from openai import OpenAI\n\n" +
      `client = OpenAI(base_url="${location.origin}/v1", api_key=${key})\n` +
      `answer = client.${isChat ? "chat.completions" : "completions"}.create(\n` +
      own.map(([name, value]) => `    ${name}=${python(value)},\n`).join("") + ")\n" +
      `print(answer.choices[0].${isChat ? "message" + (body.tools ? "" : ".content") : "text"})`,
  };
}

// A value of JSON as Python writes it.
function python(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${python(item)}`).join(", ")}}`;
}
