// The page Create: a form, the images that are being made, and the gallery of those that were.

import {
  Area,
  Choices,
  Dialog,
  Field,
  Slider,
  clamp,
  html,
  icon,
  open,
  seconds,
  sharp,
  tell,
  useDrops,
  useEffect,
  useKept,
  useRef,
  useState,
  useUrl,
} from "./parts.js";
import { EMPTY, MAX_SEED, checkedForm, drawSeed, enlarged, formWith, originOf, parametersOf, sizesOf } from "./form.js";
import { Enlarge, Gallery } from "./gallery.js";
import { EntryStore } from "./entry_store.js";
import { GridFields, cellsOf, sheetOf } from "./grid.js";
import { MAX_FILE_BYTES, download, parametersOf as parametersOfFile } from "./image_files.js";
import { Jobs } from "./image_jobs.js";
import { MaskDialog } from "./mask.js";
import { ModelPicker, firstOf, makes, useModels, useSchedulers } from "./models.js";
import { texts } from "./texts.js";

const words = texts.create;
const store = new EntryStore("images");
const MAX_CELLS = 64;
const NO_IMAGES = { start: null, mask: null, control: null, ipAdapter: null };

function Create() {
  const all = useModels();
  const [form, setForm] = useKept("create", EMPTY, checkedForm);
  const [images, setImages] = useState(NO_IMAGES);
  const [grid, setGrid] = useKept("grid", null);
  const [entries, setEntries] = useState([]);
  const [, redraw] = useState(0);
  const jobs = useJobs(() => redraw((count) => count + 1), setEntries, setForm);
  const models = all?.filter((model) => makes("/v1/images/generations")(model) || isAway(model));
  const model = models?.find((one) => one.id === form.model);
  useEffect(() => {
    if (models?.length && !model) setForm((old) => ({ ...old, model: firstOf(models).id }));
  }, [models?.length, Boolean(model)]);
  useEffect(() => void store.all().then(setEntries), []);
  const set = (change) => setForm((old) => ({ ...old, ...change }));
  const [found, setFound] = useState(null); // a file that carries parameters, until it is said what to take of it
  const start = (blob) => setImages((old) => ({ ...old, start: blob, mask: null }));
  const takeFile = (file, place) => useFile(file, place, { all, start, setFound, setImages });
  const takeParameters = ({ file, parameters }) => {
    const isKnown = models?.some((one) => one.id === parameters.model);
    if (parameters.model && !isKnown) tell(words.unknownModel(parameters.model), { isError: true });
    setForm((old) => formWith(old, isKnown ? parameters : { ...parameters, model: old.model }));
    tell(words.readParameters(file.name));
  };
  const generate = () => {
    const asked = grid ? cellsOf(grid, form).map(({ change }) => change.model ?? form.model) : [form.model];
    const unknown = [...new Set(asked)].filter((id) => !models?.some((one) => one.id === id));
    if (unknown.length) return tell(words.unknownModels(unknown.join(", ")), { isError: true });
    const lacking = Object.keys(READING).find((place) => !images[place] && models.some((one) => asked.includes(one.id) && takenOf(all, one, form, place)));
    if (lacking) return tell(words.lacksImage(form[lacking]), { isError: true });
    const requests = requestsOf({ form, model, models, images, grid, all });
    if (requests.length) jobs.start(requests);
    document.querySelector(".stage").scrollIntoView({ block: "nearest" });
    if (form.seedMode === "drawn" || form.seed === null) set({ seed: requests.at(-1)?.parameters.seed ?? form.seed });
  };
  const reuse = (entry) => {
    setForm((old) => formWith(old, originOf(entry.parameters)));
    document.getElementById("main").scrollIntoView({ block: "start" });
  };
  const enlarging = useEnlarging(all, jobs);
  useDrops((file) => takeFile(file, null));
  const props = { form, set, model, models, all, images, setImages, takeFile, grid, setGrid, generate, jobs };
  return html`<h1 class="unseen">Create</h1>
    ${found && html`<${FoundParameters} found=${found} onParameters=${takeParameters} onStart=${start} onClose=${() => setFound(null)} />`}
    <div class="create">
      <${Form} ...${props} />
      <div class="work">
        <${Stage} jobs=${jobs} enlarging=${enlarging} />
        <${Gallery} entries=${entries} setEntries=${setEntries} store=${store} enlarging=${enlarging} onReuse=${reuse} onStart=${start} />
      </div>
    </div>`;
}

const isAway = (model) => model.state === "unavailable" && (model.kind === null || model.kind === "diffusion") && !model.base.length;

// Return the networks that enlarge, which one is chosen, and what begins it; null where there are none.
function useEnlarging(all, jobs) {
  const [last, choose] = useKept("upscaler", "");
  const upscalers = (all ?? []).filter(makes("/v1/images/variations")).map((one) => one.id);
  if (!upscalers.length) return null;
  const chosen = upscalers.includes(last) ? last : upscalers[0];
  const begin = ({ file, width, height, parameters }) => {
    jobs.enlarge({ parameters: enlarged(parameters, chosen), images: { start: file }, shape: { width, height } });
    document.querySelector(".stage").scrollIntoView({ block: "nearest" });
  };
  return { upscalers, chosen, choose, begin };
}

function useJobs(redraw, setEntries, setForm) {
  const jobs = useRef();
  if (!jobs.current) {
    const onDone = async (job, blob, answer) => {
      const entry = await entryOf(job, blob, answer);
      job.entry = entry;
      setEntries((old) => [entry, ...old.filter((one) => one.key !== entry.key)]);
      if (!(await store.put(entry))) tell(texts.errors.noStorage, { isError: true });
      if (job.parameters.source) return;
      setForm((old) => (old.seedMode === "next" ? { ...old, seed: ((old.seed ?? entry.parameters.seed) + 1) % MAX_SEED } : old));
    };
    jobs.current = new Jobs({ onDone, onChange: redraw });
  }
  useEffect(() => {
    if (jobs.current.restore()) tell(words.restored);
  }, []);
  return jobs.current;
}

async function entryOf(job, blob, answer) {
  const bitmap = await createImageBitmap(blob);
  const { width, height } = bitmap;
  bitmap.close();
  const parameters = { ...job.parameters, width, height };
  if (Number.isFinite(answer.seed)) parameters.seed = answer.seed;
  if (answer.num_inference_steps) parameters.steps = answer.num_inference_steps;
  const { timings_ms, switch: switched, warnings } = answer;
  const tookS = (timings_ms?.total ?? 0) / 1000;
  const key = job.stream || crypto.getRandomValues(new Uint32Array(4)).join("-");
  return { key, at: Date.now(), file: blob, width, height, parameters, timings_ms, switched, warnings, tookS };
}

// Return what one press of the button asks for: the cells of a grid, or so many images.
function requestsOf({ form, model, models, images, grid, all }) {
  if (!model || !form.prompt.trim()) return [];
  const first = form.seedMode === "drawn" || form.seed === null ? drawSeed() : form.seed;
  if (!grid) return Array.from({ length: form.count }, (_, number) => requestOf({ form, model, images, all, seed: (first + number) % MAX_SEED }));
  return cellsOf(grid, form).map(({ change, cell }) => {
    const own = { ...form, ...change };
    const one = models.find((other) => other.id === own.model);
    return { ...requestOf({ form: own, model: one, images, all, seed: change.seed ?? first }), cell };
  });
}

function requestOf({ form, model, images, all, seed }) {
  const isPipeline = model.kind === "pipeline";
  const used = {};
  if (!isPipeline && images.start) Object.assign(used, { start: images.start, mask: images.mask ?? undefined });
  for (const place of Object.keys(READING)) if (!isPipeline && takenOf(all, model, form, place)) used[place] = images[place];
  const parameters = parametersOf(fitting(form, model, all), model, seed);
  if (used.start) parameters.strength = form.strength;
  if (used.control) {
    const { control: name, controlScale: scale, controlStart: start, controlEnd: end } = form;
    parameters.control = { name, scale, start, end };
  }
  if (used.ipAdapter) parameters.ipAdapter = { name: form.ipAdapter, scale: form.ipAdapterScale };
  return { parameters, images: used, isPipeline, cell: null, shape: shapeOf(parameters, model) };
}

// The room that an image gets before it is there, so that nothing moves when it comes.
function shapeOf({ width, height }, { defaults }) {
  return { width: width ?? defaults.width ?? 1, height: height ?? defaults.height ?? 1 };
}

// The form, without adapters that the model does not take: they stay in the form for the next one that does.
function fitting(form, model, all) {
  const taken = new Set(all.filter((one) => one.base.includes(model.id)).map((one) => one.id));
  return { ...form, loras: Object.fromEntries(Object.entries(form.loras).filter(([name]) => taken.has(name))) };
}

// Take a file: an image to start from, or, as `setFound` asks, the parameters that it carries. `place` says where it
// was dropped.
async function useFile(file, place, { all, start, setFound, setImages }) {
  if (file.size > MAX_FILE_BYTES) return tell(texts.errors.tooLarge(file.name), { isError: true });
  if (!(await isImage(file))) return tell(texts.errors.notAnImage(file.name), { isError: true });
  if (place) return setImages((old) => ({ ...old, [place]: file, ...(place === "start" ? { mask: null } : {}) }));
  const parameters = await parametersOfFile(file);
  if (parameters && !all?.some((one) => one.id === parameters.model && one.kind === "upscaler")) return setFound({ file, parameters });
  start(file);
  return tell(words.usedAsStart(file.name));
}

// Ask what to take of a file that carries parameters.
function FoundParameters({ found, onParameters, onStart, onClose }) {
  const take = (how) => (how(), onClose());
  return html`<${Dialog} title=${words.hasParameters} className="narrow" onClose=${onClose}>
    <p>${words.hasParametersHint}</p>
    <div class="row end wrap">
      <button onClick=${() => take(() => (onStart(found.file), tell(words.usedAsStart(found.file.name))))}>${words.useAsStart}</button>
      <button class="primary" onClick=${() => take(() => onParameters(found))}>${words.useParameters}</button>
    </div>
  <//>`;
}

async function isImage(file) {
  try {
    (await createImageBitmap(file)).close();
    return true;
  } catch {
    return false;
  }
}

function Form({ form, set, model, models, all, images, setImages, takeFile, grid, setGrid, generate, jobs }) {
  const isPipeline = model?.kind === "pipeline";
  const numCells = grid ? cellsOf(grid, form).length : form.count;
  const canGenerate = model && form.prompt.trim() && numCells >= 1 && numCells <= MAX_CELLS;
  const onSubmit = (event) => (event.preventDefault(), canGenerate && generate());
  const onKeyDown = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && onSubmit(event);
  return html`<form class="panel options" onSubmit=${onSubmit} onKeyDown=${onKeyDown}>
    <div class="fields">
      <${ModelPicker} models=${models} value=${form.model} onChange=${(id) => set({ model: id })} />
      <${Field} label=${words.prompt}>
        ${(id) => html`<${Area} id=${id} rows="3" placeholder=${words.promptHint} value=${form.prompt} onInput=${(prompt) => set({ prompt })} />`}
      <//>
      ${!isPipeline && html`<${ImageFields} ...${{ form, set, model, all, images, setImages, takeFile }} />`}
      ${grid && !isPipeline && html`<${GridFields} grid=${grid} setGrid=${setGrid} form=${form} loras=${adaptersOf(all, model, "adapter")} models=${(models ?? []).map((one) => one.id)} most=${MAX_CELLS} />`}
    </div>
    <div class="submit">
      <button class="primary wide" disabled=${!canGenerate}>${numCells > 1 ? texts.grid.make(numCells) : words.generate}</button>
      ${jobs.inProgress.length > 0 && html`<button type="button" onClick=${() => jobs.inProgress.forEach((job) => jobs.cancel(job))}>
        ${icon("stop")}<span>${jobs.inProgress.length > 1 ? words.cancelAll : words.cancel}</span>
      </button>`}
      ${!isPipeline && html`<button type="button" class="toggle-grid" aria-label=${words.grid} aria-pressed=${Boolean(grid)} onClick=${() => setGrid(grid ? null : { across: "seed", acrossValues: "", down: "", downValues: "" })}>
        ${icon("grid")}<span>${words.grid}</span>
      </button>`}
    </div>
  </form>`;
}

// Adapters that read an image: their places in the form, and their kinds.
const READING = { control: "controlnet", ipAdapter: "ip_adapter" };

// Return whether the form has an adapter in a place that the model takes.
const takenOf = (all, model, form, place) => adaptersOf(all, model, READING[place]).some((one) => one.id === form[place]);

const adaptersOf = (all, model, kind) => (all ?? []).filter((one) => one.kind === kind && model && one.base.includes(model.id));

function ImageFields({ form, set, model, all, images, setImages, takeFile }) {
  const defaults = model?.defaults ?? {};
  const loras = adaptersOf(all, model, "adapter");
  const schedulers = useSchedulers(model);
  const isOther = form.scheduler.trim() && schedulers.length > 0 && !schedulers.includes(form.scheduler.trim());
  const isNegative = defaults.guidance_scale !== undefined || form.negative;
  return html`<${SizeField} form=${form} set=${set} model=${model} />
    <div class="pair">
      <${Slider} label=${words.steps} value=${form.steps} own=${defaults.num_inference_steps ?? words.auto} min="1" max="60" step="1" onInput=${(steps) => set({ steps: steps && Math.round(clamp(steps, 1, 10000)) })} />
      <${Slider} label=${words.guidance} value=${form.guidance} own=${defaults.guidance_scale ?? words.auto} min="0" max="15" step="0.5" onInput=${(guidance) => set({ guidance })} />
    </div>
    <${SeedField} form=${form} set=${set} />
    ${loras.length > 0 && html`<${LoraFields} loras=${loras} form=${form} set=${set} />`}
    <${StartField} ...${{ form, set, images, setImages, takeFile }} />
    <${ReadingFields} place="control" ...${{ all, model, form, set, images, setImages, takeFile }}>
      <div class="pair">
        <${Slider} label=${words.controlStart} value=${form.controlStart} min="0" max="1" step="0.05" onInput=${(v) => set({ controlStart: clamp(v ?? 0, 0, 1) })} />
        <${Slider} label=${words.controlEnd} value=${form.controlEnd} min="0" max="1" step="0.05" onInput=${(v) => set({ controlEnd: clamp(v ?? 1, 0, 1) })} />
      </div>
    <//>
    <${ReadingFields} place="ipAdapter" ...${{ all, model, form, set, images, setImages, takeFile }} />
    <details open=${Boolean(isNegative || form.scheduler)}>
      <summary>${words.more}</summary>
      <div class="fields">
        <${Field} label=${words.negative}>
          ${(id) => html`<${Area} id=${id} rows="2" placeholder=${words.negativeHint} value=${form.negative} onInput=${(negative) => set({ negative })} />`}
        <//>
        <${Field} label=${words.scheduler} hint=${isOther && words.schedulerOther(form.model)}>
          ${(id) => html`<input id=${id} list="schedulers" placeholder=${words.schedulerHint} spellcheck=${false} value=${form.scheduler} onInput=${(e) => set({ scheduler: e.target.value })} />
            <datalist id="schedulers">${schedulers.map((name) => html`<option value=${name} />`)}</datalist>`}
        <//>
      </div>
    </details>`;
}

function SizeField({ form, set, model }) {
  const sizes = sizesOf(model);
  const isOwn = form.width === null || form.height === null;
  const place = isOwn ? 0 : sizes.findIndex((one) => one.width === form.width && one.height === form.height);
  const [isCustom, setCustom] = useState(false);
  const choose = (key) => {
    setCustom(key === "custom");
    const size = sizes[isOwn ? 0 : Math.max(0, place)];
    if (key === "custom") set({ width: form.width ?? size.width, height: form.height ?? size.height });
    else set(key === 0 ? { width: null, height: null } : { width: sizes[key].width, height: sizes[key].height });
  };
  const side = (name) => html`<${Field} label=${words[name]}>
    ${(id) => html`<input id=${id} type="number" min="1" max="16384" value=${form[name]} onInput=${(e) => set({ [name]: Math.round(Number(e.target.value)) || null })} />`}
  <//>`;
  const shows = isCustom || place < 0;
  const choices = sizes.map((size, number) => [number, html`${drawn(size)}${size.width} × ${size.height}`]);
  return html`<${Choices} className="sizes" label=${words.size} value=${shows ? "custom" : place} onChange=${choose} choices=${[...choices, ["custom", words.custom]]} />
    ${shows && html`<div class="pair">${side("width")}${side("height")}</div>`}`;
}

function drawn({ width, height }) {
  const scale = 14 / Math.max(width, height);
  const [x, y] = [width * scale, height * scale];
  return html`<svg class="shape" viewBox="0 0 16 16" aria-hidden="true"><rect x=${8 - x / 2} y=${8 - y / 2} width=${x} height=${y} rx="1.5" /></svg>`;
}

function SeedField({ form, set }) {
  const modes = [
    ["drawn", words.seedDrawn],
    ["kept", words.seedKept],
    ["next", words.seedNext],
  ];
  const onSeed = (event) => {
    const seed = event.target.value === "" ? null : Math.round(clamp(Number(event.target.value), 0, Number.MAX_SAFE_INTEGER));
    set({ seed, seedMode: seed !== null && form.seedMode === "drawn" ? "kept" : form.seedMode });
  };
  return html`<div class="seeds">
    <${Field} label=${words.seed}>
      ${(id) => html`<input id=${id} type="number" min="0" placeholder=${words.seedDrawn} value=${form.seed ?? ""} onInput=${onSeed} />`}
    <//>
    <${Choices} className="segments" label=${words.seedLabel} value=${form.seedMode} choices=${modes} onChange=${(seedMode) => set({ seedMode })} />
    <${Field} label=${words.count}>
      ${(id) => html`<input id=${id} type="number" min="1" max="16" value=${form.count} onInput=${(e) => set({ count: clamp(Math.round(Number(e.target.value)) || 1, 1, 16) })} />`}
    <//>
  </div>`;
}

function LoraFields({ loras, form, set }) {
  const setScale = (name, scale) => set({ loras: { ...form.loras, [name]: scale ?? 0 } });
  return html`<fieldset class="group">
    <legend>${words.loras}</legend>
    ${loras.map(
      ({ id, description }) => html`<div class="lora" key=${id}>
        <${Slider} label=${id} value=${form.loras[id] ?? 0} min="0" max="2" step="0.05" onInput=${(scale) => setScale(id, scale)} />
        ${description && html`<small>${description}</small>`}
      </div>`,
    )}
  </fieldset>`;
}

function StartField({ form, set, images, setImages, takeFile }) {
  const [isPainting, setPainting] = useState(false);
  const { start, mask } = images;
  const keepMask = (blob) => (setImages((old) => ({ ...old, mask: blob })), setPainting(false));
  return html`<fieldset class="group">
    <legend>${words.start}</legend>
    <${ImageBox} image=${start} mask=${mask} label=${words.start} onFile=${(file) => takeFile(file, start ? "start" : null)} onRemove=${() => setImages((old) => ({ ...old, start: null, mask: null }))} />
    ${start
      ? html`<${Slider} label=${words.strength} value=${form.strength} min="0.05" max="1" step="0.05" onInput=${(strength) => set({ strength: clamp(strength ?? 0.7, 0.01, 1) })} />
          <div class="row">
            <button type="button" onClick=${() => setPainting(true)}>${icon("brush")}<span>${mask ? words.editMask : words.paintMask}</span></button>
            ${mask && html`<button type="button" class="quiet" onClick=${() => keepMask(null)}>${words.removeMask}</button>`}
          </div>`
      : html`<small>${words.dropParameters}</small>`}
    ${isPainting && html`<${MaskDialog} image=${start} mask=${mask} onUse=${keepMask} onClose=${() => setPainting(false)} />`}
  </fieldset>`;
}

// The adapters of one kind that read an image: which of them, its image, and its scale. Nothing where the model has none.
function ReadingFields({ place, all, model, form, set, images, setImages, takeFile, children }) {
  const names = adaptersOf(all, model, READING[place]).map((one) => one.id);
  const chosen = names.includes(form[place]) ? form[place] : "";
  const scale = `${place}Scale`;
  if (!names.length) return null;
  return html`<fieldset class="group">
    <legend>${words[place]}</legend>
    <${Choices} className="segments" label=${words[place]} value=${chosen} onChange=${(name) => set({ [place]: name })} choices=${[["", words.noAdapter], ...names.map((name) => [name, name])]} />
    ${chosen &&
    html`<${ImageBox} image=${images[place]} label=${words[`${place}Image`]} onFile=${(file) => takeFile(file, place)} onRemove=${() => setImages((old) => ({ ...old, [place]: null }))} />
      <${Slider} label=${words.scale} value=${form[scale]} min="0" max="2" step="0.05" onInput=${(value) => set({ [scale]: value ?? 1 })} />
      ${children}`}
  </fieldset>`;
}

// A place for an image: dropped, or chosen by a click or the keyboard.
function ImageBox({ image, mask, label, onFile, onRemove }) {
  const [isOver, setOver] = useState(false);
  const url = useUrl(image);
  const maskUrl = useUrl(mask);
  const take = (files) => files[0] && onFile(files[0]);
  const drop = (event) => {
    event.preventDefault();
    setOver(false);
    take(event.dataTransfer.files);
  };
  const over = (event) => (event.preventDefault(), setOver(true));
  return html`<div class=${isOver ? "drop over" : "drop"} onDragOver=${over} onDragLeave=${() => setOver(false)} onDrop=${drop}>
    <label>
      <input type="file" accept="image/png,image/jpeg,image/webp" aria-label=${label} onChange=${(e) => (take(e.target.files), (e.target.value = ""))} />
      ${url
        ? html`<span class="thumb"><img src=${url} alt=${label} />${maskUrl && html`<img class="over" src=${maskUrl} alt=${words.hasMask} />`}</span>`
        : html`<span class="row">${icon("image")}<span>${words.dropHere}</span></span>`}
    </label>
    ${url && html`<button type="button" class="quiet" aria-label=${words.remove} onClick=${onRemove}>${icon("close")}</button>`}
  </div>`;
}

// What was asked for last: one image large, several side by side, a grid with its labels.
function Stage({ jobs, enlarging }) {
  const { list } = jobs;
  const cells = list.filter((job) => job.cell);
  if (!list.length) {
    return html`<section class="stage empty" aria-label=${words.generate}><div class="frame"><p>${words.empty}</p></div></section>`;
  }
  const tiles = list.filter((job) => !job.cell).map((job) => html`<${Tile} key=${job.id} job=${job} jobs=${jobs} enlarging=${enlarging} />`);
  return html`<section class=${`stage ${list.length > 1 || cells.length ? "many" : "one"}`} aria-label=${words.generate} aria-busy=${jobs.inProgress.length > 0}>
    ${tiles} ${cells.length > 0 && html`<${Sheet} list=${cells} jobs=${jobs} />`}
  </section>`;
}

function Sheet({ list, jobs }) {
  const columns = [...new Set(list.map((job) => job.cell.across))];
  const rows = [...new Set(list.map((job) => job.cell.down))];
  const at = (across, down) => list.find((job) => job.cell.across === across && job.cell.down === down);
  const isDone = list.every((job) => job.state === "done");
  const save = async () => download(await sheetOf(list.map((job) => ({ ...job.cell, blob: job.entry?.file }))), "grid.png");
  return html`<div class="sheet">
    <div class="scroll" tabindex="0" role="region" aria-label=${texts.grid.title}>
      <table>
        <thead><tr>${rows.length > 1 && html`<td></td>`}${columns.map((across) => html`<th scope="col">${across}</th>`)}</tr></thead>
        <tbody>${rows.map((down) => html`<tr>
          ${rows.length > 1 && html`<th scope="row">${down}</th>`}
          ${columns.map((across) => html`<td>${at(across, down) && html`<${Tile} job=${at(across, down)} jobs=${jobs} />`}</td>`)}
        </tr>`)}</tbody>
      </table>
    </div>
    <button type="button" disabled=${!isDone} onClick=${save}>${icon("download")}<span>${texts.grid.download}</span></button>
  </div>`;
}

const showSharp = ({ target }) => target.classList.toggle("pixels", sharp({ width: target.naturalWidth, height: target.naturalHeight }) !== "");
const STATES = { cancelled: words.cancelled, failed: words.failed };

function Tile({ job, jobs, enlarging }) {
  const { parameters, state, step, steps, leftS, preview, error } = job;
  const ratio = `${job.shape?.width ?? 1} / ${job.shape?.height ?? 1}`;
  const isOn = state === "waiting" || state === "running";
  const left = leftS ? `, ${words.left(seconds(leftS))}` : "";
  const stepOf = parameters.source ? words.tile : words.step;
  const says = isOn ? (steps ? stepOf(step, steps) + left : words.waiting) : STATES[state];
  return html`<figure class=${`tile ${state}`}>
    <div class="frame" style=${{ aspectRatio: ratio }}>
      ${preview && html`<img src=${preview} alt=${parameters.prompt} onLoad=${showSharp} />`}
      ${isOn && html`<div class="bar" role="progressbar" aria-label=${says} aria-valuemin="0" aria-valuemax=${steps || 1} aria-valuenow=${step}><i style=${{ width: `${(100 * step) / (steps || 1)}%` }}></i></div>`}
      ${state === "failed" && html`<p class="problem" role="alert">${error.message} ${error.retryAfterS ? texts.errors.retryIn(error.retryAfterS) : ""}</p>`}
    </div>
    <figcaption>
      <span aria-live="polite">${says ?? html`<${Made} job=${job} />`}</span>
      ${isOn && html`<button class="quiet" onClick=${() => jobs.cancel(job)}>${words.cancel}</button>`}
      ${STATES[state] && !job.lacksImages && html`<button class="quiet" onClick=${() => jobs.retry(job)}>${words.retry}</button>`}
      ${enlarging && job.entry && html`<${Enlarge} entry=${job.entry} enlarging=${enlarging} />`}
    </figcaption>
  </figure>`;
}

function Made({ job }) {
  const { entry } = job;
  if (job.cell) return entry ? seconds(entry.tookS) : "";
  const seed = entry?.parameters.seed;
  const facts = entry && [words.done(seconds(entry.tookS)), seed === undefined ? "" : `${texts.facts.seed} ${seed}`, ...entry.warnings].filter(Boolean);
  return html`${facts ? facts.join(" · ") : ""}`;
}

open(html`<${Create} />`);
