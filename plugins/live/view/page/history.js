// The states of earlier steps: copies of the model, and the events after each. Its memory is bounded.

const STEPS_OF_PART = 100, MAX_KEPT_BYTES = 64 << 20, PAGE_BYTES = 16, CACHED_PAGE_BYTES = 64, NOT_OF_A_STATE = new Set(["server", "own", "pace", "lost", "held"]);

export class History {
  constructor(model) { Object.assign(this, { model, parts: [], bytes: 0, last: null }); }
  // Note an event that the model has just applied.
  add(event, line) {
    if (NOT_OF_A_STATE.has(event.event)) return;
    if (event.event === "header") Object.assign(this, { parts: [], bytes: 0, last: null });
    const part = this.parts.at(-1);
    if (event.event === "header" || event.event === "now") { this.begin(); return; }
    if (!part) return;
    part.lines.push(line);
    part.lineBytes += line.length;
    part.bytes += line.length;
    this.bytes += line.length;
    if (event.event === "batch") {
      part.steps.add(event.step);
      if (part.steps.size >= STEPS_OF_PART || part.lineBytes > MAX_KEPT_BYTES / 8) this.begin();
    }
  }
  begin() {
    if (this.parts.length && !this.parts.at(-1).steps.size) this.bytes -= this.parts.pop().bytes;
    const bytes = this.model.owner.length * PAGE_BYTES + this.model.tree.nodeOf.size * CACHED_PAGE_BYTES;
    this.parts.push({ state: this.model.copy(), lines: [], lineBytes: 0, bytes, steps: new Set() });
    this.bytes += bytes;
    const first = this.model.steps.length ? this.model.steps[0].s : 0;
    while (this.parts.length > 1 && (this.bytes > MAX_KEPT_BYTES || Math.max(...this.parts[0].steps) < first)) this.bytes -= this.parts.shift().bytes;
  }
  // The model as it was when a step was launched, or null if that is not kept.
  at(step) {
    if (this.last && this.last.step === step) return this.last.model;
    const part = this.parts.find((each) => each.steps.has(step));
    if (!part) return null;
    const model = part.state.copy();
    for (const line of part.lines) {
      model.apply(JSON.parse(line));
      if (model.lastLaunched === step) break;
    }
    model.pool = model.countPool();
    this.last = { step, model };
    return model;
  }
}
