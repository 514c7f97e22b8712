// A slider over recorded runs. Reads the counts that chapters/site/sliders.py writes.
"use strict";
(() => {
  const { kind, runs } = /* data */;
  const root = document.currentScript.parentElement, NS = "http://www.w3.org/2000/svg";
  const labels = {
    chunk: {
      name: "Chunk", unit: "tokens", start: 128,
      tiles: [["gap", "worst gap between two tokens of an answer, in tokens computed", -1],
              ["first", "time to the first token of a prompt of 1,200 tokens, in tokens computed", -1],
              ["steps", "steps until all 44 requests are finished", -1]],
    },
    page: {
      name: "Page", unit: "tokens", start: 16,
      tiles: [["running", "most requests that run at the same time (at most 16)", 1],
              ["wasted", "KV memory allocated but unused, in tokens, at the worst step (of 8,192)", -1],
              ["prefilled", "tokens prefilled (only complete pages of a prefix are reused)", -1],
              ["writes", "page-table entries written", -1]],
    },
  }[kind];
  const number = (n) => n.toLocaleString("en");
  const add = (parent, tag, cls, words) => {
    const e = document.createElement(tag);
    if (cls) e.className = cls;
    if (words !== undefined) e.textContent = words;
    return parent.appendChild(e);
  };
  const head = add(root, "div", "mg-head"), id = `mg-slider-${kind}`;
  add(head, "label", "", labels.name).htmlFor = id;
  const out = add(head, "output"), input = add(head, "input");
  Object.assign(input, { id, type: "range", min: 0, max: runs.length - 1, step: 1 });
  input.value = Math.max(0, runs.findIndex((run) => run.value === labels.start));
  const tiles = add(root, "div", "mg-tiles"), shown = [];
  for (const [key, name, better] of labels.tiles) {
    const tile = add(tiles, "div");
    add(tile, "span", "mg-name", name);
    const value = add(tile, "span", "mg-number"), best = add(tile, "span", "mg-best");
    const all = runs.map((run) => run[key]);
    shown.push({ key, value, best, bar: add(add(tile, "div", "mg-track"), "i"), most: Math.max(...all),
                 good: better > 0 ? Math.max(...all) : Math.min(...all) });
  }
  const svg = document.createElementNS(NS, "svg");
  svg.setAttribute("class", "mg-work"); svg.setAttribute("role", "img"); svg.setAttribute("preserveAspectRatio", "none");
  root.appendChild(svg);
  const note = add(root, "p", "mg-note"), longest = Math.max(...runs.map((run) => run.work.length));
  for (const [words, colour] of [["prefill", "prefill"], ["decode", "decode"]]) {
    add(note, "i").style.background = `var(--mg-${colour})`;
    note.append(words);
  }
  const summary = document.createElement("span");
  note.append(" · ", summary);

  function draw() {
    const run = runs[+input.value], high = 96;
    out.textContent = `${number(run.value)} ${run.value === 1 ? "token" : labels.unit}`;
    input.setAttribute("aria-valuetext", out.textContent);
    for (const { key, value, best, bar, most, good } of shown) {
      value.textContent = number(run[key]);
      best.textContent = run[key] === good ? "best" : "";
      bar.style.width = `${100 * run[key] / most}%`;
    }
    const top = Math.max(...run.work.map(([a, b]) => a + b)), scale = kind === "chunk" ? Math.max(...runs.map((r) =>
      Math.max(...r.work.map(([a, b]) => a + b)))) : top;
    svg.setAttribute("viewBox", `0 0 ${longest} ${high}`);
    svg.setAttribute("aria-label", `Tokens computed in each of ${run.work.length} steps, at most ${top}`);
    svg.replaceChildren();
    run.work.forEach(([prefill, decode], i) => {
      let y = high;
      // Square root of the share, so that a step of 20 tokens is visible next to a step of 1,200.
      const whole = high * Math.sqrt((prefill + decode) / scale);
      for (const [tokens, colour] of [[decode, "decode"], [prefill, "prefill"]]) {
        if (!tokens) continue;
        const h = whole * tokens / (prefill + decode), bar = document.createElementNS(NS, "rect");
        for (const [k, v] of Object.entries({ x: i + 0.08, y: (y -= h), width: 0.84, height: h, fill: `var(--mg-${colour})` })) bar.setAttribute(k, v);
        svg.appendChild(bar);
      }
    });
    summary.textContent = `${number(run.work.length)} steps of at most ${number(top)} tokens; heights are square roots`;
  }
  input.addEventListener("input", draw);
  draw();
})();
