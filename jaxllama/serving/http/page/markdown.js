// Markdown as safe elements: marked writes HTML, DOMPurify keeps what cannot run or load anything.

import { marked } from "./marked.js";

const ALLOWED = {
  ALLOWED_TAGS: [
    "p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "ul", "ol", "li",
    "pre", "code", "em", "strong", "del", "a", "table", "thead", "tbody", "tr", "th", "td",
    "sub", "sup", "input",
  ],
  ALLOWED_ATTR: ["href", "title", "class", "start", "align", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: /^(https?:|mailto:|#)/i,
  RETURN_DOM_FRAGMENT: true,
};

// The elements of a text. Each block of code has a button that copies it.
export function rendered(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text, { gfm: true }), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const box of fragment.querySelectorAll("input")) {
    // only the boxes of a list of tasks, which do nothing
    if (box.type !== "checkbox") box.remove();
    box.disabled = true;
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = document.createElement("div");
    frame.className = "wide-table";
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const block of fragment.querySelectorAll("pre")) {
    const frame = document.createElement("div");
    frame.className = "code";
    block.replaceWith(frame);
    frame.append(copyButton(block), block);
  }
  return fragment;
}

function copyButton(block) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await copy(block.textContent);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea"); // a page without TLS has no clipboard
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
