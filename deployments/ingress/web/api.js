// Calls of the server that these pages came from: JSON, events, errors in words, and the key of whoever uses them.

import { texts } from "./texts.js";

const KEY = "atelier.key";
const MAX_EVENT_CHARS = 64 * 2 ** 20;

let asked = null; // the promise of a key, while a dialog asks for one
let askForKey = async () => false;
const listeners = new Set();

export const keys = {
  get: () => sessionStorage.getItem(KEY) || "",
  set(key) {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
    for (const listen of listeners) listen(Boolean(key));
  },
  // `ask(error)` resolves to whether there is another key to try.
  askWith(ask) {
    askForKey = ask;
  },
  onChange(listen) {
    listeners.add(listen);
    return () => listeners.delete(listen);
  },
};

export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfterS = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
    this.retryAfterS = retryAfterS;
  }

  get isGone() {
    return this.status === 404 || this.code === "job_not_found";
  }

  get isKeyMatter() {
    return this.status === 401 || this.status === 403;
  }
}

function headersOf(options) {
  const headers = new Headers(options.headers);
  const key = keys.get();
  if (key) headers.set("authorization", `Bearer ${key}`);
  if (options.json !== undefined) headers.set("content-type", "application/json"); // of a form, the browser says it
  return headers;
}

async function send(path, options) {
  const body = options.form ?? (options.json === undefined ? undefined : JSON.stringify(options.json));
  try {
    return await fetch(new URL(`../${path}`, import.meta.url), {
      method: options.method ?? (body === undefined ? "GET" : "POST"),
      headers: headersOf(options),
      body,
      signal: options.signal,
      credentials: "same-origin",
      cache: "no-store",
    });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError(texts.errors.noServer);
  }
}

async function errorOf(response) {
  const text = (await response.text().catch(() => "")).slice(0, 4000);
  const retryAfterS = Number(response.headers.get("retry-after")) || null;
  let found = {};
  try {
    const body = JSON.parse(text);
    found = typeof body.error === "object" && body.error ? body.error : { message: body.error ?? body.detail };
  } catch {
    // Not JSON: a proxy's page, say.
  }
  const message = typeof found.message === "string" && found.message ? found.message : `${response.status} ${text}`;
  return new ApiError(message.trim().slice(0, 2000), { status: response.status, param: found.param, retryAfterS });
}

// Return a response that is no error. Asks for a key, once for all who wait, when the server wants another one.
export async function request(path, options = {}) {
  for (;;) {
    const key = keys.get();
    const response = await send(path, options);
    if (response.ok) return response;
    const error = await errorOf(response);
    if (!error.isKeyMatter || options.quiet) throw error;
    if (keys.get() !== key) continue; // somebody else was asked meanwhile
    asked ??= askForKey(error).finally(() => (asked = null));
    if (!(await asked)) throw error;
  }
}

export async function getJson(path, options = {}) {
  const response = await request(path, options);
  try {
    return await response.json();
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError(texts.errors.notJson);
  }
}

// Yield {id, event, data} of a response of server-sent events (HTML, section 9.2). Data is parsed where it is JSON.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      kept += value;
      if (kept.length > MAX_EVENT_CHARS) throw new ApiError(texts.errors.broken);
      let end;
      while ((end = kept.indexOf("\n\n")) >= 0) {
        const found = eventOf(kept.slice(0, end));
        kept = kept.slice(end + 2);
        if (found) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function eventOf(block) {
  const found = { id: "", event: "message", data: "" };
  const data = [];
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    if (colon <= 0) continue;
    const name = line.slice(0, colon);
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") data.push(value);
    else if (name in found) found[name] = value;
  }
  if (!data.length) return null;
  const text = data.join("\n");
  try {
    found.data = JSON.parse(text);
  } catch {
    found.data = text;
  }
  return found;
}

// Return the error that an event tells, if it tells one.
export function errorOfEvent({ event, data }) {
  const told = data?.error;
  if (event !== "error" && !told) return null;
  return new ApiError(String(told?.message ?? texts.errors.broken).slice(0, 2000), { code: told?.code ?? "broken", param: told?.param });
}

export const isAbort = (error) => error?.name === "AbortError";

export const sleep = (ms, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
