// Uploads of models in parts: one that broke off goes on where it was, also after a reload, with the same file.

import { ApiError, getJson, sleep } from "./api.js";
import { kept } from "./parts.js";
import { texts } from "./texts.js";

const PART_BYTES = 8 * 2 ** 20;
const MAX_TRIES = 6; // without another byte
const PAUSE_MS = 500; // before the second try, and twice that before each further one
const PASSING = [0, 408, 429, 500, 502, 503, 504];

const nameOf = ({ name, size, lastModified }) => `${name}/${size}/${lastModified}`;

// Send a file, and return its path on the server. `onBytes` gets the number of bytes that are there.
export async function upload(file, signal, onBytes) {
  let found = await begun(file, signal);
  for (let tries = 0; found.bytes < file.size; ) {
    signal.throwIfAborted();
    if (tries > MAX_TRIES) throw new ApiError(texts.errors.broken);
    onBytes(found.bytes);
    const before = found.bytes;
    try {
      const part = file.slice(before, before + PART_BYTES, "application/octet-stream");
      found = await getJson(`admin/uploads/${found.id}?offset=${before}`, { method: "PUT", form: part, signal });
    } catch (error) {
      if (!PASSING.includes(error.status) || tries === MAX_TRIES) throw error;
      await sleep(PAUSE_MS * 2 ** tries, signal);
    }
    tries = found.bytes > before ? 0 : tries + 1;
  }
  onBytes(file.size);
  if (!found.is_whole) found = await getJson(`admin/uploads/${found.id}?bytes=${file.size}`, { method: "POST", signal });
  return found.path;
}

// A model is registered from the file: the next upload of it is another one.
export function forget(file) {
  const { [nameOf(file)]: _, ...others } = kept.get("uploads", {});
  kept.set("uploads", others);
}

async function begun(file, signal) {
  const known = kept.get("uploads", {});
  const id = known[nameOf(file)];
  if (id) {
    try {
      return await getJson(`admin/uploads/${encodeURIComponent(id)}`, { signal });
    } catch (error) {
      if (error.status !== 404) throw error;
    }
  }
  const made = await getJson("admin/uploads", { json: { name: file.name, bytes: file.size }, signal });
  kept.set("uploads", { ...known, [nameOf(file)]: made.id });
  return made;
}
