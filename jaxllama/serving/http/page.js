// The chat page: one conversation over POST /v1/chat/completions, streamed.
// A model without a chat template continues the text instead, over /v1/completions.

const $ = (id) => document.getElementById(id);
const SETTINGS = ["system", "temperature", "top_p", "max_tokens", "seed"];

let model = null; // an entry of /v1/models
let messages = [];
let running = null; // the AbortController of the answer that is being written

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function connect() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw new Error(await reason(response));
  model = (await response.json()).data[0];
  const note = model.chat ? "" : ": no chat template, it continues your text";
  $("model").textContent = `${model.id}, ${model.max_model_len} tokens of context${note}`;
  showError("");
}

async function reason(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

function showError(text) {
  $("error").textContent = text;
  $("error").hidden = !text;
}

function show(role, text) {
  const item = document.createElement("li");
  item.className = role;
  const name = document.createElement("h2");
  name.textContent = role === "user" ? "You" : model.id;
  const body = document.createElement("p");
  body.textContent = text;
  item.append(name, body);
  $("log").append(item);
  item.scrollIntoView({ block: "end" });
  return body;
}

function request() {
  const number = (id) => Number($(id).value);
  const given = (id) => $(id).value && { [id]: number(id) }; // else the model's own, or a new one
  const body = {
    model: model.id,
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: number("max_tokens"),
    ...given("temperature"),
    ...given("top_p"),
    ...given("seed"),
  };
  const system = $("system").value.trim();
  if (model.chat) {
    const opening = system ? [{ role: "system", content: system }] : [];
    return ["v1/chat/completions", { ...body, messages: [...opening, ...messages] }];
  }
  const texts = [system, ...messages.map((message) => message.content)];
  return ["v1/completions", { ...body, prompt: texts.filter(Boolean).join("\n") }];
}

// The JSON of every "data:" line, until [DONE].
async function* chunks(response) {
  let rest = "";
  for await (const text of pieces(response.body.pipeThrough(new TextDecoderStream()))) {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
  throw new Error("the connection ended before the answer did");
}

async function* pieces(stream) {
  const reader = stream.getReader();
  try {
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
      yield piece.value;
    }
  } finally {
    reader.releaseLock();
  }
}

async function answer() {
  const [url, body] = request();
  const conversation = messages;
  const start = performance.now();
  let target = null;
  let text = "";
  let usage = null;
  let finish = null;
  running = new AbortController();
  busy(true);
  $("status").textContent = "waiting …";
  try {
    const response = await fetch(url, {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(body),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await reason(response));
    target = show("assistant", "");
    for await (const chunk of chunks(response)) {
      usage = chunk.usage ?? usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      finish = choice.finish_reason ?? finish;
      const isThinking = choice.delta?.reasoning_content !== undefined;
      text += choice.delta?.content ?? choice.text ?? "";
      // Follow the text unless the reader has scrolled away.
      const log = $("log");
      const below = log.scrollHeight - log.scrollTop - log.clientHeight;
      target.textContent = text;
      if (below < 40) log.scrollTop = log.scrollHeight;
      $("status").textContent = isThinking ? "thinking …" : "writing …";
    }
    const seconds = (performance.now() - start) / 1000;
    const tokens = usage.completion_tokens;
    const end = finish === "length" ? ", cut at the limit" : "";
    $("status").textContent =
      `${tokens} tokens, ${(tokens / seconds).toFixed(1)} a second${end}`;
  } catch (error) {
    if (messages !== conversation) {
      $("status").textContent = "";
    } else if (error.name === "AbortError") {
      $("status").textContent = "stopped";
    } else {
      $("status").textContent = "";
      showError(error.message);
    }
  } finally {
    running = null;
    busy(false);
  }
  if (messages !== conversation) return; // a new conversation has begun
  if (target && text) {
    messages.push({ role: "assistant", content: text });
  } else {
    // Nothing was answered: the message goes back to where it can be sent again.
    target?.parentElement.remove();
    $("log").lastElementChild?.remove();
    const message = messages.pop();
    if (message && !$("input").value) $("input").value = message.content;
  }
}

function busy(is) {
  $("log").setAttribute("aria-busy", String(is)); // read aloud once it is whole
  $("send").disabled = is;
  $("stop").disabled = !is;
  if (!is) $("input").focus();
}

async function send() {
  const text = $("input").value.trim();
  if (running || !text) return;
  const wrong = SETTINGS.map($).find((field) => !field.checkValidity());
  if (wrong) {
    $("settings").open = true;
    wrong.reportValidity();
    return;
  }
  showError("");
  try {
    if (!model) await connect();
  } catch (error) {
    showError(error.message);
    return;
  }
  $("input").value = "";
  messages.push({ role: "user", content: text });
  show("user", text);
  await answer();
}

function stop() {
  running?.abort();
}

$("fields").addEventListener("submit", (event) => event.preventDefault());
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
$("stop").addEventListener("click", stop);
$("reset").addEventListener("click", () => {
  stop();
  messages = [];
  $("log").replaceChildren();
  $("status").textContent = "";
  showError("");
  $("input").focus();
});

for (const id of SETTINGS) {
  const kept = localStorage.getItem(`jaxllama.${id}`);
  if (kept !== null) $(id).value = kept;
  $(id).addEventListener("change", () => localStorage.setItem(`jaxllama.${id}`, $(id).value));
}
$("key").value = sessionStorage.getItem("jaxllama.key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("jaxllama.key", $("key").value);
  connect().catch((error) => showError(error.message));
});
connect().catch((error) => {
  $("model").textContent = "not connected";
  $("settings").open ||= /key/i.test(error.message);
  showError(error.message);
});
$("input").focus();
