// Where answers come from: the server of trainfit serve, or the files of trainfit export-page.

import { flat, same, set } from "./state.js";

export class Refused extends Error {
  constructor(error) {
    super(error.text ?? "no answer");
    this.field = error.field ?? "";
    this.problem = error.problem ?? error.text;
    this.remedy = error.remedy ?? "";
  }
}

export async function source() {
  const manifest = document.querySelector('meta[name="trainfit-static"]');
  return manifest ? Files.opened(manifest.content) : Server.opened();
}

class Server {
  isLive = true;

  static async opened() {
    const made = new Server();
    made.page = await (await fetch("api/page")).json();
    return made;
  }

  // The answer to a question. `progress` is called with {text, seconds} meanwhile; aborting `signal` ends the trace.
  async ask(name, content, { signal, progress = () => {} } = {}) {
    const response = await fetch(`api/${name}`, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content), signal,
    });
    if ((response.headers.get("content-type") ?? "").startsWith("application/json")) {
      const found = await response.json();
      if (found.error) throw new Refused(found.error);
      return found.answer ?? found;
    }
    for await (const event of events(response.body)) {
      if (event.progress) progress(event.progress);
      else if (event.error) throw new Refused(event.error);
      else if (event.answer) return event.answer;
    }
    throw new Refused({ text: "the server closed the connection" });
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

class Files {
  isLive = false;

  static async opened(path) {
    const made = new Files();
    made.page = await (await fetch(path)).json();
    return made;
  }

  // Which choice of each axis a recipe has; null: the page has no answer to it.
  choices(recipe) {
    const wanted = flat(recipe);
    const axes = this.page.axes;
    const chosen = axes.map(axis => axis.values.findIndex(one => axis.fields.every(name => same(wanted[name], flat(one.set)[name]))));
    return chosen.includes(-1) ? null : chosen;
  }

  recipeOf(places) {
    let recipe = this.page.base;
    for (const [number, axis] of this.page.axes.entries()) {
      for (const [path, value] of Object.entries(flat(axis.values[places[number]].set))) recipe = set(recipe, path, value);
    }
    return recipe;
  }

  async ask(name, content, { signal } = {}) {
    if (name === "widget") {
      const found = this.page.widgets[content.preset ?? ""];
      if (found && !Object.keys(content.inputs ?? {}).length) return found;
      throw new Refused({ text: "this page has the presets alone; trainfit serve takes any input" });
    }
    const chosen = content.recipe && this.choices(content.recipe);
    if (!chosen || !["predict", "course"].includes(name)) {
      throw new Refused({ text: "this page has no answer to it; trainfit serve answers everything" });
    }
    const response = await fetch(`answers/${chosen.join("-")}.json`, { signal });
    if (!response.ok) throw new Refused({ text: "this page has no answer to it" });
    const found = (await response.json())[name];
    if (found.error) throw new Refused(found.error);
    return found;
  }
}
