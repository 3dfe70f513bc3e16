"use strict";
(() => {
  const root = document.getElementById("review");
  const data = JSON.parse(document.getElementById("review-data").textContent);
  const cards = [...root.querySelectorAll(".card")];
  const find = (name) => root.querySelector(`[data-part="${name}"]`);
  const store = `fineprune-review-${data.digest}`;
  const done = new Map(); // index of a sample -> its new class, "keep" or "drop"
  const history = []; // what was decided before: [index, earlier decision or undefined]
  let current = null;

  const load = () => {
    try {
      for (const [index, choice] of Object.entries(JSON.parse(localStorage.getItem(store)) || {}))
        done.set(Number(index), choice);
    } catch { /* Without storage, the decisions last as long as the page is open. */ }
  };
  const save = () => {
    try {
      localStorage.setItem(store, JSON.stringify(Object.fromEntries(done)));
    } catch { /* As above. */ }
  };

  const indexOf = (card) => Number(card.dataset.index);
  const nameOf = (label) => data.classes[label] ?? String(label);
  const kindOf = (choice) => (typeof choice === "number" ? "accept" : choice);
  const paint = (card) => {
    const choice = done.get(indexOf(card));
    for (const name of ["accept", "keep", "drop"])
      card.classList.toggle(name, name === kindOf(choice));
    const said = { accept: `label accepted: ${nameOf(choice)}`, keep: "kept", drop: "dropped" };
    card.querySelector(".state").textContent = said[kindOf(choice)] ?? "";
  };
  const count = () => {
    const shown = cards.filter((card) => !card.hidden);
    const here = cards.filter((card) => done.has(indexOf(card))).length;
    const counts = { accept: 0, keep: 0, drop: 0 };
    for (const choice of done.values()) counts[kindOf(choice)] += 1;
    find("count").textContent =
      `${here} of ${cards.length} reviewed` +
      (here < done.size ? ` and ${done.size - here} that are not on this page` : "") +
      `: ${counts.accept} accepted, ${counts.keep} kept, ${counts.drop} dropped` +
      (shown.length < cards.length ? `; ${shown.length} shown` : "");
  };

  const go = (card, quiet) => {
    if (current) {
      current.classList.remove("current");
      current.removeAttribute("aria-current");
    }
    current = card || null;
    if (!current) return;
    current.classList.add("current");
    current.setAttribute("aria-current", "true");
    if (quiet) return;
    current.focus({ preventScroll: true }); // A screen reader reads the card.
    current.scrollIntoView({ block: "nearest" });
  };
  const move = (step, open) => {
    const shown = cards.filter((card) => !card.hidden);
    const start = shown.indexOf(current);
    for (let place = start + step; place >= 0 && place < shown.length; place += step)
      if (!open || !done.has(indexOf(shown[place]))) return go(shown[place]);
    if (start < 0) go(shown[0]);
  };
  const accept = () => {
    const suggestion = Number(current?.dataset.suggestion ?? -1);
    if (suggestion >= 0) decide(suggestion);
  };
  const decide = (choice) => {
    if (!current) return;
    const index = indexOf(current);
    history.push([index, done.get(index)]);
    done.set(index, choice);
    save();
    paint(current);
    move(1, true);
    filter(true);
  };
  const undo = () => {
    const last = history.pop();
    if (!last) return;
    const [index, before] = last;
    if (before === undefined) done.delete(index);
    else done.set(index, before);
    save();
    const card = cards.find((one) => indexOf(one) === index);
    paint(card);
    filter(true);
    if (!card.hidden) go(card);
  };

  const filter = (stay) => {
    const [label, suggestion, state] =
      ["label", "suggestion", "state"].map((name) => find(name).value);
    for (const card of cards) {
      const reviewed = done.has(indexOf(card));
      card.hidden =
        (label !== "" && card.dataset.label !== label) ||
        (suggestion !== "" && card.dataset.suggestion !== suggestion) ||
        (state === "open" && reviewed && card !== current) ||
        (state === "done" && !reviewed);
    }
    if (!stay || (current && current.hidden)) go(cards.find((card) => !card.hidden), true);
    count();
  };

  const quoted = (text) => (/[",\r\n]|^\s|\s$/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const table = async () => {
    const bytes = Uint8Array.from(atob(data.table), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const { keys, labels } = JSON.parse(await new Response(stream).text());
    for (const [index, choice] of done)
      if (choice !== "keep") labels[index] = choice === "drop" ? -1 : choice;
    const name = (label) => (label < 0 ? "drop" : quoted(nameOf(label)));
    const lines = labels.map((label, index) => `${keys ? quoted(keys[index]) : ""},${index},${name(label)}`);
    return `key,index,label\n${lines.join("\n")}\n`;
  };
  const download = async () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([await table()], { type: "text/csv" }));
    link.download = "labels.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  };

  const actions = {
    a: accept, k: () => decide("keep"), d: () => decide("drop"), u: undo,
    n: () => move(1, false), p: () => move(-1, false),
    ArrowRight: () => move(1, false), ArrowLeft: () => move(-1, false),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select, input")) return;
    if (root.closest("details:not([open])")) return; // Nobody sees what would be decided.
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  root.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) return button.dataset.part === "download" ? download() : actions[button.dataset.key]();
    const card = event.target.closest(".card");
    if (card) go(card);
  });
  const options = (name) => {
    const values = new Set(cards.map((card) => card.dataset[name]));
    for (const value of [...values].map(Number).sort((one, other) => one - other))
      if (value >= 0)
        find(name).append(new Option(nameOf(value), String(value)));
  };
  options("label");
  options("suggestion");
  for (const name of ["label", "suggestion", "state"])
    find(name).addEventListener("change", () => filter(false));
  load();
  cards.forEach(paint);
  find("download").hidden = data.table === null; // The labels of some samples are not known.
  root.querySelector(".bar").hidden = false;
  filter(false);
})();
