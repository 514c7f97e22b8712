// Requests to the server: JSON, and server-sent events that are read by fetch, which can send the API key.

export class Server {
  constructor() { this.key = ""; }
  headers(more) {
    return { ...(this.key ? { Authorization: `Bearer ${this.key}` } : {}), ...more };
  }
  // Send a request. `body` is sent as JSON. Throws an Error whose message is for people.
  async fetch(path, body, options = {}) {
    const response = await fetch(path, {
      method: body === undefined ? "GET" : "POST", cache: "no-store", signal: options.signal,
      headers: this.headers({ ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...options.headers }),
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    if (!response.ok) {
      let text = `The server answered ${response.status}.`;
      try { text = (await response.json()).error.message || text; } catch { /* no JSON */ }
      throw Object.assign(new Error(text), { status: response.status });
    }
    return response;
  }
  async json(path, body, options) { return (await this.fetch(path, body, options)).json(); }
}

// Yield the data of each event of a response; the lines of one event are joined by \n.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(line[5] === " " ? 6 : 5));
      if (data.length) yield data.join("\n");
    }
  }
}
