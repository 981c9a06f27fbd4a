// What the form of Create holds, and the request that it becomes. Nothing of the page is here.

import { base64Of } from "./image_files.js";

export const EMPTY = {
  model: "",
  prompt: "",
  negative: "",
  width: null,
  height: null,
  steps: null,
  guidance: null,
  seed: null,
  seedMode: "drawn",
  count: 1,
  scheduler: "",
  loras: {},
  strength: 0.7,
  control: "",
  controlScale: 1,
  controlStart: 0,
  controlEnd: 1,
  ipAdapter: "",
  ipAdapterScale: 1,
};
export const MAX_SEED = 2 ** 32;
const STREAMED = { stream: true, progress: true };
const SHAPES = [
  ["1:1", 1, 1],
  ["4:3", 4, 3],
  ["3:4", 3, 4],
  ["16:9", 16, 9],
  ["9:16", 9, 16],
];
export const drawSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

// What a visit before this one has kept, as far as it is of the kind that is expected now.
export function checkedForm(value) {
  const form = { ...EMPTY };
  for (const [name, initial] of Object.entries(EMPTY)) {
    const found = value?.[name];
    const isNumber = initial === null ? found === null || Number.isFinite(found) : typeof found === typeof initial;
    if (found !== undefined && isNumber) form[name] = found;
  }
  form.loras = Object.fromEntries(Object.entries(form.loras ?? {}).filter(([, scale]) => Number.isFinite(scale)));
  return form;
}

// Sizes of about as many pixels as the model's own, in shapes that people use; sides are multiples of 16.
export function sizesOf(model) {
  const { width = 1024, height = 1024 } = model?.defaults ?? {};
  const found = [];
  for (const [label, x, y] of SHAPES) {
    const scale = Math.sqrt((width * height) / (x * y));
    const size = [x * scale, y * scale].map((side) => Math.max(16, Math.round(side / 16) * 16));
    if (x === y && width === height) size[0] = size[1] = width;
    if (!found.some((one) => one.width === size[0] && one.height === size[1])) {
      found.push({ label, width: size[0], height: size[1] });
    }
  }
  if (!found.some((one) => one.width === width && one.height === height)) found.unshift({ label: "", width, height });
  return found;
}

// Return one image's parameters: what the gallery keeps, and what makes the same image again.
export function parametersOf(form, model, seed) {
  const parameters = { model: form.model, prompt: form.prompt, seed };
  if (model?.kind === "pipeline") return parameters;
  const loras = Object.fromEntries(Object.entries(form.loras).filter(([, scale]) => scale !== 0));
  if (form.negative.trim()) parameters.negative = form.negative;
  if (form.width && form.height) Object.assign(parameters, { width: form.width, height: form.height });
  for (const name of ["steps", "guidance"]) if (form[name] !== null) parameters[name] = form[name];
  if (form.scheduler.trim()) parameters.scheduler = form.scheduler.trim();
  if (Object.keys(loras).length) parameters.loras = loras;
  return parameters;
}

// Return the body of a request. `images` are blobs: `start`, `mask`, `control`, `ipAdapter`, each where there is one.
export async function bodyOf(parameters, images, isPipeline) {
  const { model, prompt, seed } = parameters;
  if (isPipeline) return { model, prompt };
  const body = { model, prompt, seed, ...STREAMED, partial_images: 3 };
  const fields = { negative: "negative_prompt", steps: "num_inference_steps", guidance: "guidance_scale" };
  for (const [name, field] of Object.entries(fields)) if (parameters[name] !== undefined) body[field] = parameters[name];
  for (const name of ["width", "height", "scheduler"]) if (parameters[name]) body[name] = parameters[name];
  if (parameters.loras) body.lora = Object.entries(parameters.loras).map(([name, scale]) => ({ name, scale }));
  if (images.start) {
    body.init_image = await base64Of(images.start);
    body.strength = parameters.strength;
    if (images.mask) body.mask_image = await base64Of(images.mask);
  }
  if (images.control) {
    const { name, scale, start, end } = parameters.control;
    body.control = [{ name, scale, start, end, image: await base64Of(images.control) }];
  }
  if (images.ipAdapter) body.ip_adapter = [{ ...parameters.ipAdapter, image: await base64Of(images.ipAdapter) }];
  return body;
}

// Return the parameters of an image that a network enlarges: those of the image that it was are its `source`.
export const enlarged = (source, model) => ({ model, prompt: source.prompt, source });

// Return the parameters of the image that was made from a prompt, however often it was enlarged since.
export function originOf(parameters) {
  let origin = parameters;
  while (origin.source) origin = origin.source;
  return origin;
}

// Return the form of a request to enlarge the image `start`.
export function enlargementOf({ model }, { start }) {
  const form = new FormData();
  for (const [name, value] of Object.entries({ model, ...STREAMED })) form.set(name, value);
  if (start) form.set("image", start, "image.png"); // a reload loses it
  return form;
}

// Return the form with an image's parameters in it.
export function formWith(form, parameters) {
  const blank = { ...EMPTY, seedMode: "kept", count: 1, strength: form.strength };
  const { control, ipAdapter, ...rest } = parameters;
  const named = ipAdapter ? { ipAdapter: ipAdapter.name, ipAdapterScale: ipAdapter.scale } : {};
  if (control) Object.assign(named, { control: control.name, controlScale: control.scale, controlStart: control.start, controlEnd: control.end });
  return checkedForm({ ...blank, ...rest, ...named, model: parameters.model || form.model });
}
