// Finds the sections that hold every word that was typed, the last one perhaps unfinished.
"use strict";

function find(query) {
  const asked = query.toLowerCase().match(/[\p{L}\p{N}]+(?:-[\p{L}\p{N}]+)*/gu) || [];
  let found = null;
  for (const word of asked) {
    const here = new Map();
    for (const known of Object.keys(WORDS)) {
      if (!known.startsWith(word)) continue;
      const factor = known === word ? 2 : 1;
      const pairs = WORDS[known];
      for (let at = 0; at < pairs.length; at += 2) {
        here.set(pairs[at], (here.get(pairs[at]) || 0) + factor * pairs[at + 1]);
      }
    }
    found = found === null ? here : new Map([...found].filter(([s]) => here.has(s)).map(([s, w]) => [s, w + here.get(s)]));
  }
  const asIs = query.trim().toLowerCase();
  for (const section of (found || new Map()).keys()) {
    if (SECTIONS[section].title.toLowerCase().startsWith(asIs)) found.set(section, found.get(section) + 100);
  }
  return [...(found || [])].sort((a, b) => b[1] - a[1] || a[0] - b[0]).slice(0, 20).map(([s]) => SECTIONS[s]);
}

function show(query) {
  const list = document.getElementById("found");
  const hits = find(query);
  list.replaceChildren(...hits.map((hit) => {
    const link = document.createElement("a");
    link.href = hit.url;
    link.textContent = hit.title === hit.page ? hit.title : `${hit.page}: ${hit.title}`;
    const text = document.createElement("small");
    text.textContent = hit.text;
    const item = document.createElement("li");
    item.append(link, text);
    return item;
  }));
  document.getElementById("found-count").textContent =
    query.trim() === "" ? "" : hits.length === 0 ? "nothing found" : `${hits.length} sections`;
}

const box = document.getElementById("search");
box.addEventListener("input", () => show(box.value));
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== box) {
    event.preventDefault();
    box.focus();
  } else if (event.key === "Escape") {
    box.value = "";
    show("");
  }
});
