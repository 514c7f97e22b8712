// What the page has seen: it can be saved as a trace, and as one HTML file that replays it.

const MAX_BYTES = 32 << 20, NOT_IN_A_TRACE = new Set(["server", "own", "pace", "lost", "held"]);

export class Recording {
  constructor() { this.lines = []; this.bytes = 0; this.full = false; }
  // Keep an event, from the last state on.
  add(event, line) {
    if (event.event === "header") { this.lines = []; this.bytes = 0; this.full = false; }
    if (NOT_IN_A_TRACE.has(event.event) || this.full) return;
    this.bytes += line.length;
    if (this.bytes > MAX_BYTES) { this.full = true; return; }
    // A page that was open from the first request on has a whole trace, which needs no state.
    if (event.event === "now" && !event.step && !event.requests.length && !event.added) return;
    this.lines.push(line);
  }
  get text() { return this.lines.join("\n") + "\n"; }
  saveTrace() {
    if (this.lines.length < 2) return "Nothing has happened yet: there is nothing to save.";
    download("live.jsonl", "application/jsonl", this.text);
    const whole = !this.lines[1].startsWith('{"event":"now"');
    return `Saved live.jsonl${this.full ? ", up to the first 32 MiB" : ""}: ` + (whole ? "python -m minisgl.trace live.jsonl checks it." : "it begins with the state at which this page was opened.");
  }
}

export async function savePage(recording, transcript) {
  if (recording.lines.length < 2) return "Nothing has happened yet: there is nothing to save.";
  const get = async (name) => (await fetch(`live/page/${name}`)).text();
  const [css, ...scripts] = await Promise.all(["live.css", "tree.js", "model.js", "history.js", "words.js", "draw.js", "replay.js"].map(get));
  const script = scripts.map((each) => each.replace(/^import .*\n/gm, "").replace(/^export /gm, "")).join("\n");
  const data = JSON.stringify({ lines: recording.lines, transcript }).replace(/</g, "\\u003c");
  // Only the files of this package are put in as they are. The data are JSON without "<".
  const policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:";
  const head = `<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">` +
    `<meta http-equiv="Content-Security-Policy" content="${policy}"><title>minisgl, a recorded run</title><style>${css}</style>`;
  const body = `<script type="application/json" id="data">${data}</script><script type="module">${script}</script>`;
  download("live.html", "text/html", `<!doctype html>\n<html lang="en"><head>${head}</head><body>${body}</body></html>\n`);
  return "Saved live.html: it replays what this page has seen, in any browser, without a network.";
}

function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
