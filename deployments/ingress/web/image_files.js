// Parameters that image files carry: as this server writes them into PNGs, and as the Stable Diffusion WebUI does.

const SIGNATURE = [137, 80, 78, 71, 13, 10, 26, 10];
const MAX_TEXT = 2 ** 20;
const MAX_CHUNKS = 4096;
export const MAX_FILE_BYTES = 32 * 2 ** 20;

// Return the texts of a PNG by keyword (PNG specification, section 11.3.3); {} of any other file.
export async function textsOf(file) {
  const view = new DataView(await file.arrayBuffer());
  const found = {};
  if (view.byteLength < 8 || SIGNATURE.some((byte, place) => view.getUint8(place) !== byte)) return found;
  let at = 8;
  for (let number = 0; number < MAX_CHUNKS && at + 12 <= view.byteLength; number++) {
    const length = view.getUint32(at);
    if (at + 12 + length > view.byteLength) break;
    const type = latin(view, at + 4, 4);
    if ((type === "tEXt" || type === "iTXt") && length <= MAX_TEXT) readText(view, at + 8, length, type, found);
    if (type === "IEND") break;
    at += 12 + length;
  }
  return found;
}

function readText(view, start, length, type, found) {
  const bytes = new Uint8Array(view.buffer, start, length);
  const end = bytes.indexOf(0);
  if (end < 1) return;
  const keyword = latin(view, start, end);
  if (type === "tEXt") {
    found[keyword] = new TextDecoder("latin1").decode(bytes.subarray(end + 1));
    return;
  }
  if (bytes[end + 1] !== 0) return; // compressed
  const language = bytes.indexOf(0, end + 3);
  const translated = bytes.indexOf(0, language + 1);
  if (language < 0 || translated < 0) return;
  found[keyword] = new TextDecoder().decode(bytes.subarray(translated + 1));
}

function latin(view, start, length) {
  let text = "";
  for (let place = 0; place < length; place++) text += String.fromCharCode(view.getUint8(start + place));
  return text;
}

// Return the parameters of a file as a form has them, null where it carries none.
export async function parametersOf(file) {
  const found = await textsOf(file);
  if (!found.parameters) return null;
  const parameters = parsed(found.parameters);
  try {
    Object.assign(parameters, facts(JSON.parse(found.Description)));
  } catch {
    // another program's file: the text alone
  }
  return parameters;
}

function facts(told) {
  const known = {};
  if (typeof told.model === "string") known.model = told.model;
  if (typeof told.scheduler === "string") known.scheduler = told.scheduler;
  if (Number.isFinite(told.seed)) known.seed = told.seed;
  if (Number.isFinite(told.strength)) known.strength = told.strength;
  if (Array.isArray(told.lora)) known.loras = scalesOf(told.lora);
  return known;
}

const scalesOf = (uses) =>
  Object.fromEntries(uses.filter((use) => typeof use?.name === "string").map((use) => [use.name, Number(use.scale) || 0]));

// Read the text that the WebUI writes: prompt, negative prompt, and a last line of options.
export function parsed(text) {
  const lines = text.split("\n");
  const options = {};
  const pattern = /\s*([\w ]+):\s*("(?:\\.|[^"\\])*"|[^,]*)(?:,|$)/g;
  if (/^Steps: \d/.test(lines.at(-1))) {
    for (const [, name, value] of lines.pop().matchAll(pattern)) options[name.trim()] = unquoted(value);
  }
  const whole = lines.join("\n");
  const cut = whole.indexOf("\nNegative prompt: ");
  const loras = {};
  const prompt = (cut < 0 ? whole : whole.slice(0, cut)).replace(/ ?<lora:([^:>]+):([-\d.]+)>/g, (_, name, scale) => {
    loras[name] = Number(scale) || 0;
    return "";
  });
  const [width, height] = (options.Size ?? "").split("x").map(Number);
  const parameters = { prompt, negative: cut < 0 ? "" : whole.slice(cut + 18), loras };
  if (width && height) Object.assign(parameters, { width, height });
  if (options.Model) parameters.model = options.Model;
  for (const [name, option] of [["steps", "Steps"], ["guidance", "CFG scale"], ["seed", "Seed"], ["strength", "Denoising strength"]]) {
    const value = Number(options[option]);
    if (options[option] !== undefined && Number.isFinite(value)) parameters[name] = value;
  }
  return parameters;
}

function unquoted(value) {
  if (!value.startsWith('"')) return value.trim();
  try {
    return JSON.parse(value);
  } catch {
    return value;
  }
}

export async function base64Of(blob) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  const parts = [];
  for (let at = 0; at < bytes.length; at += 0x8000) parts.push(String.fromCharCode(...bytes.subarray(at, at + 0x8000)));
  return btoa(parts.join(""));
}

export function blobOf(base64, type = "image/png") {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place++) bytes[place] = text.charCodeAt(place);
  return new Blob([bytes], { type });
}

export function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replace(/[^\w.-]+/g, "-").slice(0, 120);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
