// The chat page: one conversation over POST /v1/chat/completions, streamed.
// A model without a chat template continues the text instead, over /v1/completions.

import { copy, rendered } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const SETTINGS = ["system", "temperature", "top_p", "max_tokens", "seed", "tools"];

const DRAW_AFTER = 40; // ms: Markdown is made anew for all chunks that came meanwhile
const LOAD_EVERY = 5000; // ms between two looks at the server's load

let model = null; // an entry of /v1/models
let messages = []; // as the API has them
let removed = []; // the conversation before messages were removed, for "Undo"
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
  $("model").title = $("model").textContent;
  showError("");
  showLoad();
}

// The requests that run and wait on the server. Nothing is shown where the server hides them.
async function showLoad() {
  if (document.hidden) return;
  try {
    const response = await fetch("metrics", { headers: headers() });
    const text = response.ok ? await response.text() : "";
    const count = (name) => Number(text.match(new RegExp(`^jaxllama_${name} (\\S+)`, "m"))?.[1]);
    const [active, waiting] = [count("requests_active"), count("requests_waiting")];
    const known = Number.isFinite(active + waiting);
    $("load").textContent = known ? `${active} running, ${waiting} waiting` : "";
  } catch {
    $("load").textContent = "";
  }
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

// The conversation on the page

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  made.className = className;
  made.append(...children);
  return made;
}

function folded(title, text, className) {
  const body = element("pre", "", text);
  return element("details", className, element("summary", "", title), body);
}

function action(title, run) {
  const button = element("button", "small", title);
  button.type = "button";
  button.addEventListener("click", run);
  return button;
}

// The elements of a message: reasoning and calls are folded.
function contents(message) {
  const made = [];
  if (message.reasoning_content) {
    made.push(folded("Reasoning", message.reasoning_content, "thought"));
  }
  if (message.role === "assistant") {
    made.push(element("div", "said markdown", rendered(message.content ?? "")));
  } else {
    made.push(element("div", "said", message.content));
  }
  for (const call of message.tool_calls ?? []) {
    made.push(folded(`Call of ${call.function.name}`, call.function.arguments, "call"));
  }
  return made;
}

const NAMES = { user: "You", tool: "Result", assistant: null };

function show(message) {
  const name = element("h2", "", NAMES[message.role] ?? model?.id ?? "Model");
  const item = element("li", message.role, name, ...contents(message));
  $("log").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

// Change the conversation on the page, and keep its end in sight unless the reader has scrolled away.
function following(change) {
  const log = $("log");
  const below = log.scrollHeight - log.scrollTop - log.clientHeight;
  change();
  if (below < 40) log.scrollTop = log.scrollHeight;
}

function update(item, message) {
  const isOpen = item.querySelector("details.thought")?.open;
  const fresh = contents(message);
  const [text] = fresh.filter((part) => part.matches(".said"));
  const shown = item.querySelector(".said");
  shown.replaceChildren(...text.childNodes);
  for (const old of item.querySelectorAll(":scope > details")) old.remove();
  for (const part of fresh.filter((part) => part.matches("details"))) {
    if (part.matches(".thought")) {
      part.open = Boolean(isOpen);
      shown.before(part);
    } else {
      item.append(part);
    }
  }
}

// What can be done with each message: the last answer is written anew, a message of the user's is
// edited, which removes what follows it.
function showActions() {
  for (const old of document.querySelectorAll("#log .actions")) old.remove();
  [...$("log").children].forEach((item, index) => {
    const message = messages[index];
    if (!message) return;
    const actions = [action("Copy", () => copy(message.content ?? ""))];
    if (message.role === "user") actions.push(action("Edit", () => edit(index)));
    if (message.role === "assistant" && index === messages.length - 1) {
      actions.push(action("Regenerate", regenerate));
    }
    item.append(element("div", "actions", ...actions));
  });
}

function render() {
  $("log").replaceChildren();
  messages.forEach(show);
  showActions();
}

function keep() {
  try {
    localStorage.setItem("jaxllama.conversation", JSON.stringify(messages));
    localStorage.setItem("jaxllama.removed", JSON.stringify(removed));
    localStorage.setItem("jaxllama.draft", $("input").value);
  } catch {
    // a full store: the conversation lasts until the page is left
  }
}

function kept(name) {
  try {
    const found = JSON.parse(localStorage.getItem(`jaxllama.${name}`) ?? "[]");
    return Array.isArray(found) ? found : [];
  } catch {
    return [];
  }
}

// Keep the first `length` messages. "Undo" restores the conversation until the next message is sent.
function shorten(length, draft) {
  const count = messages.length - length;
  if (count) removed = messages;
  messages = messages.slice(0, length);
  $("input").value = draft;
  keep();
  render();
  showRemoved();
  $("input").focus();
}

function showRemoved() {
  const count = removed.length - messages.length;
  $("removed").hidden = count <= 0;
  $("removed").firstElementChild.textContent = `${count} message${count === 1 ? "" : "s"} removed.`;
}

function undo() {
  if (running) return;
  messages = removed;
  removed = [];
  $("input").value = "";
  keep();
  render();
  showRemoved();
  $("input").focus();
}

function edit(index) {
  if (!running) shorten(index, messages[index].content);
}

async function regenerate() {
  if (running || messages.at(-1)?.role !== "assistant") return;
  removed = messages;
  messages = messages.slice(0, -1);
  render();
  await answer();
}

function download() {
  const system = $("system").value.trim();
  const opening = system ? [{ role: "system", content: system }] : [];
  const text = JSON.stringify({ model: model?.id, messages: [...opening, ...messages] }, null, 2);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = "conversation.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
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
    const tools = $("tools").value.trim();
    if (tools) body.tools = JSON.parse(tools);
    return ["v1/chat/completions", { ...body, messages: [...opening, ...messages] }];
  }
  const texts = [system, ...messages.map((message) => message.content)];
  return ["v1/completions", { ...body, prompt: texts.filter(Boolean).join("\n") }];
}

// Add a chunk's delta to the message that is being written.
function add(message, delta) {
  message.content += delta.content ?? "";
  if (delta.reasoning_content) {
    message.reasoning_content = (message.reasoning_content ?? "") + delta.reasoning_content;
  }
  for (const piece of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    message.tool_calls[piece.index] ??= {
      id: piece.id,
      type: "function",
      function: { name: piece.function.name, arguments: "" },
    };
    message.tool_calls[piece.index].function.arguments += piece.function.arguments ?? "";
  }
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
  const conversation = messages;
  const start = performance.now();
  const message = { role: "assistant", content: "" };
  let item = null;
  let drawn = 0; // the timer after which the message is shown next
  let usage = null;
  let finish = null;
  running = new AbortController();
  busy(true);
  $("status").textContent = "waiting …";
  try {
    const [url, body] = request();
    const response = await fetch(url, {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(body),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await reason(response));
    item = show(message);
    for await (const chunk of chunks(response)) {
      usage = chunk.usage ?? usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      finish = choice.finish_reason ?? finish;
      add(message, choice.delta ?? { content: choice.text });
      drawn ||= setTimeout(() => {
        drawn = 0;
        following(() => update(item, message));
      }, DRAW_AFTER);
      const isThinking = choice.delta?.reasoning_content !== undefined;
      $("status").textContent = isThinking ? "thinking …" : "writing …";
    }
    const seconds = (performance.now() - start) / 1000;
    const tokens = usage.completion_tokens;
    let end = finish === "length" ? ", cut at the limit" : "";
    if (message.tool_calls) end = ": your next message is the call's result";
    $("status").textContent = `${tokens} tokens, ${(tokens / seconds).toFixed(1)} a second${end}`;
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
    clearTimeout(drawn);
    running = null;
    busy(false);
  }
  if (messages !== conversation) return; // a new conversation has begun
  const isAnswered = message.content || message.reasoning_content || message.tool_calls;
  if (item && isAnswered) {
    following(() => {
      update(item, message);
      messages.push(message);
      showActions();
    });
  } else {
    // Nothing was answered: the message goes back to where it can be sent again.
    const last = messages.pop();
    if (last?.role === "user" && !$("input").value) $("input").value = last.content;
    render();
  }
  keep();
  showRemoved();
  showLoad();
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
  removed = [];
  showRemoved();
  const calls = messages.at(-1)?.tool_calls;
  const said = calls
    ? calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: text }))
    : [{ role: "user", content: text }];
  for (const message of said) {
    messages.push(message);
    show(message);
  }
  keep();
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
  $("status").textContent = "";
  showError("");
  shorten(0, "");
});
$("undo").addEventListener("click", undo);
$("input").addEventListener("input", keep);

for (const id of SETTINGS) {
  const kept = localStorage.getItem(`jaxllama.${id}`);
  if (kept !== null) $(id).value = kept;
  $(id).addEventListener("change", () => localStorage.setItem(`jaxllama.${id}`, $(id).value));
}
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  const isDark = name ? name === "dark" : prefersDark.matches;
  $("theme").textContent = isDark ? "Light" : "Dark"; // what the button gives
}

$("export").addEventListener("click", download);
$("theme").addEventListener("click", () => {
  const name = $("theme").textContent.toLowerCase();
  localStorage.setItem("jaxllama.theme", name);
  setTheme(name);
});
setTheme(localStorage.getItem("jaxllama.theme"));
prefersDark.addEventListener("change", () => setTheme(localStorage.getItem("jaxllama.theme")));
messages = kept("conversation");
removed = kept("removed");
$("input").value = localStorage.getItem("jaxllama.draft") ?? "";
render();
showRemoved();
setInterval(showLoad, LOAD_EVERY);
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
