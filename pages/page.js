"use strict";
const byId = id => document.getElementById(id);

function make(kind, className, text) {
  const node = document.createElement(kind);
  node.className = className;
  node.textContent = text;
  return node;
}

function makeOption(value, text) {
  const node = make("option", "", text);
  node.value = value;
  return node;
}

// Text is only ever put in as text; matches of the search field are marked.
function makeSearched(kind, className, text) {
  const node = make(kind, className, ""), wanted = byId("search").value.toLowerCase(), lower = text.toLowerCase();
  if (!wanted || lower.length !== text.length) {
    node.textContent = text;
    return node;
  }
  for (let from = 0; from < text.length;) {
    const hit = lower.indexOf(wanted, from);
    node.append(text.slice(from, hit < 0 ? text.length : hit));
    if (hit < 0) break;
    node.append(make("mark", "", text.slice(hit, hit + wanted.length)));
    from = hit + wanted.length;
  }
  return node;
}

byId("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme || (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
});
