// Replays one run, or two runs side by side. Reads the data that minisgl/trace/view.py computes, not the trace format.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const NS = "http://www.w3.org/2000/svg", HUES = 8, FREE = -1, RETIRING = -2, CACHE = -3;
  const $ = (id) => document.getElementById(id);
  const hue = (uid) => "q" + (((uid % HUES) + HUES) % HUES);
  const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
  // Whether this page is in an <iframe> of the site. Then it keeps its address and uses the colours of the site.
  const framed = location.protocol === "about:";
  let at = 0, focus = null, timer = null, stop = -1; // stop: index into the tour, -1 outside of it

  function el(parent, tag, attributes, words) {
    const e = document.createElementNS(NS, tag);
    for (const [key, value] of Object.entries(attributes || {})) if (value !== undefined) e.setAttribute(key, value);
    if (words !== undefined) e.textContent = words;
    parent.appendChild(e);
    return e;
  }
  const tip = (e, words) => { el(e, "title", {}, words); return e; };
  function html(parent, tag, cls, words) {
    const e = document.createElement(tag);
    if (cls) e.className = cls;
    if (words !== undefined) e.textContent = words;
    parent.appendChild(e);
    return e;
  }
  function follow(e, uid) {
    const toggle = () => { focus = focus === uid ? null : uid; stop = -1; draw(); };
    e.classList.add("hit");
    e.addEventListener("click", toggle);
    return toggle;
  }
  // A mark that the keyboard reaches. A picture is drawn anew at each step, so draw() gives the focus back to it.
  function key(e, uid) {
    const toggle = follow(e, uid);
    for (const [name, value] of [["tabindex", 0], ["role", "button"], ["aria-label", `Follow request ${uid}`],
                                 ["aria-pressed", focus === uid], ["data-key", uid]]) e.setAttribute(name, value);
    e.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); event.stopPropagation(); toggle(); }
    });
  }

  // ---- one run: its state at a step, and its panels -------------------------------------------------------

  class Run {
    constructor(raw, place) {
      Object.assign(this, raw);
      this.last = this.steps.length - 1;
      this.reset();
      const box = html(place, "section", "run");
      const head = html(box, "div", "head");
      html(head, "h2", "", this.name);
      html(head, "small", "", this.options);
      if (this.violation) html(head, "small", "bad-text", this.violation.text);
      const panels = html(box, "div", "panels");
      this.panel = {};
      for (const [key, title, wide] of [["timeline", "Timeline", true], ["run", "", true], ["tree", "Radix tree", false],
                                        ["pages", "Page map", false], ["events", "Events", true]]) {
        const panel = html(panels, "div", `panel ${key}` + (wide ? " wide" : ""));
        this.panel[key] = { box: panel, title: html(panel, "h3", "", title), body: html(panel, "div", "body") };
      }
      this.order = [];
      const seen = new Set();
      for (const step of this.steps)
        for (const uid of [...step.r.map((r) => r[0]), ...step.w]) if (!seen.has(uid)) { seen.add(uid); this.order.push(uid); }
      this.work = this.steps.map((s) => s.r.reduce((sum, r) => sum + r[2], 0));
      this.most = Math.max(1, ...this.work);
    }
    reset() {
      this.now = -1;
      this.owner = new Int32Array(this.spec.num_pages).fill(FREE);
      this.users = new Int32Array(this.spec.num_pages);
      this.tables = new Map();
    }
    go(step) {
      const target = Math.max(0, Math.min(step, this.last));
      if (target < this.now) this.reset();
      while (this.now < target) {
        const s = this.steps[++this.now];
        for (const [page, owner] of s.p || []) this.owner[page] = owner;
        for (const [page, users] of s.u || []) this.users[page] = users;
        for (const [uid, keep, more] of s.t || [])
          if (more) this.tables.set(uid, [...(this.tables.get(uid) || []).slice(0, keep), ...more]); else this.tables.delete(uid);
      }
    }
    draw() {
      if (this.last < 0) return;
      this.go(at);
      const s = this.steps[this.now];
      this.mine = new Set(this.tables.get(focus) || []);
      this.timeline(s);
      this.tree(s);
      this.pages(s);
      this.events(s);
    }

    timeline(s) {
      const { body, title } = this.panel.timeline;
      const wide = Math.max(body.clientWidth, 260), left = 40;
      const cell = Math.max(16, Math.min(26, Math.floor((wide - left - 4) / (this.last + 1))));
      const columns = Math.max(8, Math.floor((wide - left - 4) / cell));
      const from = Math.max(0, Math.min(this.now - Math.floor(columns * 0.6), this.last + 1 - columns));
      const to = Math.min(this.last, from + columns - 1);
      const alive = new Set();
      for (let i = from; i <= to; i++) {
        for (const r of this.steps[i].r) alive.add(r[0]);
        for (const uid of this.steps[i].w) alive.add(uid);
      }
      const all = this.order.filter((uid) => alive.has(uid));
      const lines = all.slice(0, 40);
      const high = 18, top = 14, bottom = top + lines.length * high, y = new Map(lines.map((uid, i) => [uid, top + i * high]));
      const decode = s.r.filter((r) => r[3] & 1).length;
      title.textContent = `Step ${s.s}: ${plural(decode, "decode row")}, ${plural(s.r.length - decode, "prefill chunk")}, ` +
        `${plural(this.work[this.now], "token")} computed, ${s.w.length} waiting`;
      this.overview(this.panel.run.body, wide, left);
      const svg = this.canvas(body, wide, bottom + 20, "Timeline around this step");
      svg.setAttribute("role", "group"); // it contains buttons
      const x = (i) => left + (i - from) * cell;
      if (this.now >= from && this.now <= to) el(svg, "rect", { class: "now", x: x(this.now), y: 0, width: cell, height: bottom + 20 });
      for (let i = from; i <= to; i++) {
        if (i % 5 === 0) {
          el(svg, "path", { class: "line", d: `M${x(i)} ${top - 2}V${bottom + 2}` });
          el(svg, "text", { class: "soft mid", x: x(i) + cell / 2, y: bottom + 14 }, this.steps[i].s);
        }
      }
      for (const uid of lines) {
        const name = el(svg, "g", {});
        el(name, "circle", { class: hue(uid) + (focus === uid ? " focus" : ""), cx: 6, cy: y.get(uid) + high / 2, r: 5 });
        el(name, "text", { x: 15, y: y.get(uid) + high / 2 + 4 }, uid);
        const q = this.requests[uid] || {};
        tip(name, `request ${uid}: ${q.prompt} prompt tokens, at most ${q.most} output tokens` + (q.reason ? `; ended by ${q.reason}` : ""));
        key(name, uid);
      }
      for (let i = from; i <= to; i++) {
        const step = this.steps[i];
        for (const uid of step.w) if (y.has(uid) && !step.r.some((r) => r[0] === uid))
          el(svg, "path", { class: "wait", d: `M${x(i) + 2} ${y.get(uid) + high / 2}h${cell - 3}` });
        for (const [uid, start, count, flags, cached, drafts, accepted] of step.r) {
          if (!y.has(uid)) continue;
          const decode = flags & 1, lost = flags & 2, h = high - 4, known = drafts && accepted !== null, part = h / count;
          const faint = focus !== null && focus !== uid ? " dim" : "";
          const words = `step ${step.s}, request ${uid}: ${decode ? "decode" : "prefill"}, position ${start}` +
            (count > 1 ? ` to ${start + count - 1}` : "") + (cached ? `, ${cached} tokens from the cache` : "") + (lost ? "; its token is discarded" : "") +
            (known ? `; ${accepted} of ${drafts} drafts accepted` : "");
          const box = (cls, y0, tall, attributes) => {
            const e = el(svg, "rect", { class: cls + faint, x: x(i) + 1, y: y.get(uid) + 2 + y0, width: cell - 2, height: tall, rx: 2, ...attributes });
            tip(e, words);
            follow(e, uid);
          };
          // From the bottom: the row's own token, accepted drafts, rejected ones. No box is below another: dimmed colours do not mix.
          const share = cached / (start + count); // of the cache, at the bottom
          box(lost ? "lost" : decode ? "decode" : "prefill", known ? part * drafts : 0, (known ? h - part * drafts : h) * (1 - share),
            { "data-step": step.s, "data-uid": uid, "data-kind": decode ? "decode" : "prefill", "data-count": count });
          if (known) {
            const rejected = drafts - accepted;
            for (const [cls, n, below] of [["rejected", rejected, 0], ["accepted", accepted, rejected]])
              if (n) box(cls, part * below, part * n, { "data-kind": cls, "data-count": n });
          }
          if (cached) box("cache", h * (1 - share), h * share, { "data-kind": "cached", "data-count": cached });
        }
      }
      if (all.length > lines.length) el(svg, "text", { class: "soft", x: left, y: 10 }, `and ${all.length - lines.length} more requests`);
    }
    overview(body, wide, left) {
      // The whole run: one bar for each step (or for several), as high as the number of computed tokens. A click shows the step.
      const top = 8, svg = this.canvas(body, wide, 50, "Tokens computed in each step of the run");
      const width = wide - left - 4, high = 36, bins = Math.min(this.steps.length, Math.floor(width / 2));
      const w = width / bins, per = this.steps.length / bins;
      for (let b = 0; b < bins; b++) {
        let decode = 0, prefill = 0, n = 0;
        for (let i = Math.floor(b * per); i < Math.max(Math.floor((b + 1) * per), Math.floor(b * per) + 1); i++, n++)
          for (const r of this.steps[i].r) if (r[3] & 1) decode += r[2]; else prefill += r[2];
        let y = top + high;
        for (const [cls, tokens] of [["decode", decode / n], ["prefill", prefill / n]]) {
          const h = high * tokens / this.most;
          if (h > 0) el(svg, "rect", { class: cls, x: left + b * w, y: (y -= h), width: Math.max(w - 0.5, 0.5), height: h });
        }
      }
      const mark = left + (this.now + 0.5) * width / this.steps.length;
      el(svg, "path", { class: "edge", d: `M${mark} ${top - 4}V${top + high + 4}` });
      if (this.violation && this.violation.step !== null) {
        const bad = left + (Math.min(this.violation.step, this.last) + 0.5) * width / this.steps.length;
        tip(el(svg, "circle", { class: "bad", cx: bad, cy: top - 4, r: 4 }), this.violation.text);
      }
      el(svg, "text", { class: "soft end", x: left - 5, y: top + high }, "run");
      const catcher = el(svg, "rect", { class: "hit", x: left, y: top, width, height: high, fill: "transparent" });
      catcher.addEventListener("click", (event) => {
        const box = catcher.getBoundingClientRect();
        show(Math.floor((event.clientX - box.left) / box.width * this.steps.length));
      });
    }

    tree(s) {
      const { body, title } = this.panel.tree;
      const nodes = this.trees[s.n].map(([parent, list, ...rest]) => [parent, this.lists[list], ...rest, this.texts[list] || ""]), depth = [], children = nodes.map(() => []), roots = [];
      let deepest = 1, held = 0;
      nodes.forEach(([parent, pages], i) => {
        depth[i] = parent < 0 ? 0 : depth[parent] + nodes[parent][1].length;
        deepest = Math.max(deepest, depth[i] + pages.length);
        held += pages.length;
        (parent < 0 ? roots : children[parent]).push(i);
      });
      title.textContent = `Radix tree: ${plural(nodes.length, "node")}, ${plural(held, "page")}`;
      if (!nodes.length) { body.replaceChildren(); html(body, "div", "soft", "empty"); return; }
      const wide = Math.max(body.clientWidth, 260), unit = Math.max(2, Math.min(26, (wide - 130) / deepest)), box = 18;
      const place = [], more = [];
      let y = 4;
      const idle = (i) => !nodes[i][2] && !children[i].length;
      const lay = (list) => {
        const old = list.filter(idle).sort((a, b) => nodes[b][3] - nodes[a][3]).slice(4);
        const hidden = new Set(old.length > 1 ? old : []);
        list.forEach((i, k) => {
          if (hidden.has(i)) return;
          place[i] = y;
          const before = y;
          lay(children[i]);
          y = Math.max(y, before + 24);
        });
        if (hidden.size) { more.push([old, y]); y += 24; }
      };
      lay(roots);
      const svg = this.canvas(body, wide, y + 16, "Radix tree at this step");
      el(svg, "path", { class: "edge", d: `M1 2V${y - 4}` });
      nodes.forEach(([parent, pages, users, used, ends, words], i) => {
        if (place[i] === undefined) return;
        const x = 2 + depth[i] * unit, w = pages.length * unit, age = Math.max(0, s.s - used);
        if (parent >= 0 && place[parent] !== place[i])
          el(svg, "path", { class: "edge", d: `M${x} ${place[parent] + box / 2}V${place[i] + box / 2}` });
        const hit = focus !== null && pages.every((page) => this.mine.has(page));
        const e = el(svg, "rect", { class: "cache" + (users ? " used" : "") + (hit ? " focus" : ""), x: x + 1, y: place[i],
          width: Math.max(w - 2, 1.5), height: box, rx: 3, opacity: users ? 1 : Math.max(0.2, 0.4 * 0.93 ** age).toFixed(2),
          "data-pages": pages.join(" "), "data-users": users });
        tip(e, `${plural(pages.length, "page")}: ${pages.join(", ")}; ${plural(users, "user")}; last used ` +
          (age ? `${plural(age, "step")} ago` : "now") + (words ? `\n“${words}”` : ""));
        if (unit >= 16) pages.forEach((page, k) => el(svg, "text", { class: users ? "on mid" : "mid", x: x + (k + 0.5) * unit, y: place[i] + 12.5, "pointer-events": "none" }, page));
        const leaf = !children[i].length;
        ends.slice(0, 6).forEach((uid, k) => {
          const cx = leaf ? x + w + 11 + 19 * k : x + w - 8 - 16 * k, cy = place[i] + (leaf ? box / 2 : box + 1);
          const g = el(svg, "g", {});
          el(g, "circle", { class: hue(uid) + (focus === uid ? " focus" : ""), cx, cy, r: 8 });
          el(g, "text", { class: "on mid", x: cx, y: cy + 3.5 }, uid);
          tip(g, `request ${uid} uses the prefix that ends here`);
          follow(g, uid);
        });
        if (leaf) el(svg, "text", { class: "soft", x: x + w + 6 + 19 * Math.min(ends.length, 6), y: place[i] + 13 },
          (users ? plural(users, "user") : age ? `${age} ago` : "just now") + (words ? ` · ${words.replace(/\s+/g, " ")}` : ""));
      });
      for (const [old, top] of more) {
        const x = 2 + depth[old[0]] * unit;
        el(svg, "rect", { class: "cache", x: x + 1, y: top, width: Math.max(unit - 2, 4), height: box, rx: 3, opacity: 0.2 });
        el(svg, "text", { class: "soft", x: x + Math.max(unit, 6) + 4, y: top + 13 }, `and ${old.length} older leaves`);
      }
    }

    pages(s) {
      const { body, title } = this.panel.pages;
      const [free, cached, evictable, retiring] = s.q, count = this.spec.num_pages;
      title.textContent = `Page map: ${free} free, ${count - free - cached - retiring} of requests, ` +
        `${cached} cached (${evictable} evictable), ${retiring} retiring`;
      const wide = Math.max(body.clientWidth, 240);
      const cell = Math.max(5, Math.min(26, Math.sqrt(wide * 300 / Math.max(this.map.length, 1)))), columns = Math.max(1, Math.floor(wide / cell));
      const shown = this.map.slice(0, columns * 120), bottom = Math.ceil(shown.length / columns) * cell;
      const more = shown.length < this.map.length ? `and ${plural(this.map.length - shown.length, "more page")}` : "";
      const rest = [more, this.unused].filter(Boolean).join(", ");
      const svg = this.canvas(body, wide, bottom + (rest ? 18 : 2), "Page map at this step");
      shown.forEach((page, i) => {
        const owner = this.owner[page], users = this.users[page], x = i % columns * cell, y = Math.floor(i / columns) * cell;
        const cls = owner === FREE ? "free" : owner === RETIRING ? "retire" : owner === CACHE ? (users ? "cache used" : "cache") : hue(owner);
        const gap = cell > 9 ? 1.5 : 0.75, tiny = cell <= 12 ? " tiny" : "";
        const e = el(svg, "rect", { class: cls + tiny + (this.mine.has(page) ? " focus" : ""), x: x + gap, y: y + gap, width: cell - 2 * gap,
          height: cell - 2 * gap, rx: 2, opacity: owner === CACHE && !users ? 0.4 : undefined, "data-page": page, "data-owner": owner });
        if (this.violation && this.violation.page === page && this.violation.step === s.s) e.setAttribute("class", "bad");
        tip(e, `page ${page}: ` + (owner === FREE ? "free" : owner === RETIRING ? "retiring: a launched step may still access it"
          : owner === CACHE ? `owned by the cache, ${plural(users, "user")}` : `owned by request ${owner}`));
        if (owner >= 0) follow(e, owner);
        if (cell >= 19 && `${page}`.length * 5.6 < cell) el(svg, "text", { class: (cls === "free" ? "soft" : cls === "cache" ? "" : "on") + " mid", x: x + cell / 2, y: y + cell / 2 + 4,
          "pointer-events": "none", style: "font-size:11px" }, page);
      });
      if (rest) el(svg, "text", { class: "soft", x: 0, y: bottom + 13 }, rest);
    }

    events(s) {
      const { body, title } = this.panel.events;
      title.textContent = `Events from step ${s.s} until the next step`;
      body.replaceChildren();
      const list = html(body, "ul", "list");
      for (const [kind, uid, words] of s.e) {
        const item = html(list, "li", kind === "discard" || kind === "retract" ? "bad-text" : "");
        html(item, "span", "k", kind);
        if (uid !== null) {
          const chip = html(item, "span", "chip", uid);
          chip.style.background = `var(--mg-${hue(uid)})`;
          follow(chip, uid);
        }
        html(item, "span", "", words);
      }
      if (!s.e.length) html(list, "li", "", "Every request gained one token, in pages that it already had.");
    }

    canvas(body, width, height, label) {
      const svg = document.createElementNS(NS, "svg");
      svg.setAttribute("width", width); svg.setAttribute("height", height); svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.setAttribute("role", "img"); svg.setAttribute("aria-label", label);
      body.replaceChildren(svg);
      return svg;
    }
  }

  // ---- the page ---------------------------------------------------------------------------------------------

  const runs = data.runs.map((raw) => new Run(raw, $("runs")));
  const last = Math.max(0, ...runs.map((run) => run.last));
  $("slider").max = last;
  if (runs.length === 2) $("runs").classList.add("two");

  const tour = data.tour || [];

  function draw() {
    const held = document.activeElement && document.activeElement.dataset.key;
    for (const run of runs) run.draw();
    if (held !== undefined) {
      const again = document.querySelector(`[data-key="${held}"]`);
      if (again) again.focus();
    }
    const spot = tour[stop];
    for (const run of runs) for (const [name, panel] of Object.entries(run.panel)) panel.box.classList.toggle("spot", !!spot && spot.panel === name);
    $("tour").textContent = spot ? (stop + 1 < tour.length ? "Next stop" : "End of the tour") : "Tour";
    $("slider").value = at;
    $("where").textContent = `step ${at} of ${last}`;
    const broken = runs.map((r) => r.violation).find((v) => v && v.step === at), differ = data.difference;
    $("message").className = broken ? "bad" : spot ? "tour" : "";
    $("message").textContent = broken ? broken.text : spot ? `${stop + 1} of ${tour.length}: ${spot.text}`
      : differ && differ.step === at ? `The runs differ here for the first time: ${differ.text}`
      : focus !== null ? `Following request ${focus}: its pages and its prefix are outlined. Click the request again to stop following it.` : "";
  }
  function show(step, ofTour = -1) {
    at = Math.max(0, Math.min(last, step));
    if (stop >= 0 && ofTour < 0) focus = null; // the tour followed a request
    stop = ofTour;
    if (stop >= 0) focus = tour[stop].uid;
    if (!framed) location.replace("#" + at);
    draw();
  }
  function play(on) {
    clearInterval(timer);
    timer = on ? setInterval(() => { if (at >= last) play(false); else show(at + 1); }, 350) : null;
    $("play").textContent = on ? "❚❚" : "▶";
    $("play").setAttribute("aria-label", on ? "Pause" : "Play");
  }
  $("slider").addEventListener("input", (event) => show(+event.target.value));
  $("back").addEventListener("click", () => show(at - 1));
  $("next").addEventListener("click", () => show(at + 1));
  $("play").addEventListener("click", () => play(!timer));
  if (runs.length === 2) {
    $("differ").hidden = false;
    if (data.difference) $("differ").addEventListener("click", () => show(data.difference.step));
    else { $("differ").disabled = true; $("differ").textContent = "No difference"; }
  }
  function nextStop() {
    const next = stop + 1 < tour.length ? stop + 1 : -1;
    play(false);
    show(next < 0 ? at : tour[next].step, next);
  }
  if (tour.length) {
    $("tour").hidden = false;
    $("tour").addEventListener("click", nextStop);
  }
  if (framed) {
    const page = parent.document.body, match = () => { document.documentElement.dataset.mdColorScheme = page.dataset.mdColorScheme || ""; };
    $("theme").hidden = true;
    new MutationObserver(match).observe(page, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
    match();
  }
  $("theme").addEventListener("click", () => {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = root.dataset.mdColorScheme || (dark ? "slate" : "default");
    root.dataset.mdColorScheme = now === "slate" ? "default" : "slate";
  });
  document.addEventListener("keydown", (event) => {
    if (event.target.tagName === "BUTTON" && event.key === " ") return;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 10, PageDown: at + 10, Home: 0, End: last }[event.key];
    if (to !== undefined) { event.preventDefault(); show(to); }
    if (event.key === " ") { event.preventDefault(); play(!timer); }
    if (event.key === "d" && data.difference) show(data.difference.step);
    if (event.key === "t" && tour.length) nextStop();
    if (event.key === "Escape") { focus = null; stop = -1; draw(); }
  });
  addEventListener("resize", draw);
  const asked = framed ? NaN : parseInt(location.hash.slice(1), 10);
  const violation = runs[0].violation;
  if (!Number.isNaN(asked)) show(asked);
  else if (data.difference) show(data.difference.step);
  else if (violation) show(violation.step || 0);
  else if (tour.length) nextStop();
  else show(0);
})();
