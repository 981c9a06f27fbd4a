// The gallery: images of this browser with their parameters; one large, two beside each other.

import { Dialog, copy, html, icon, seconds, sharp, useEffect, useRef, useState, useUrl } from "./parts.js";
import { imageAsCurl, imageAsPython, imageRequest } from "./as_code.js";
import { download } from "./image_files.js";
import { texts } from "./texts.js";

const words = texts.gallery;
const PAGE = 60;

export function Gallery({ entries, setEntries, store, enlarging, onReuse, onStart }) {
  const [shown, setShown] = useState(PAGE);
  const [viewed, setViewed] = useState(null);
  const [compared, setCompared] = useState(null); // keys, while two are being chosen
  if (!entries.length) return null;
  const remove = async (entry) => {
    const place = entries.indexOf(entry);
    setEntries((old) => old.filter((one) => one.key !== entry.key));
    setViewed(entries[place + 1]?.key ?? entries[place - 1]?.key ?? null);
    await store.remove(entry.key);
  };
  const clear = async () => {
    if (!confirm(words.clearSure(entries.length))) return;
    setEntries([]);
    await store.clear();
  };
  const pick = (key) => {
    if (!compared) return setViewed(key);
    setCompared(compared.includes(key) ? compared.filter((one) => one !== key) : [...compared, key].slice(-2));
  };
  const entry = entries.find((one) => one.key === viewed);
  const pair = compared?.map((key) => entries.find((one) => one.key === key)).filter(Boolean) ?? [];
  const act = { onReuse: (one) => (setViewed(null), onReuse(one)), onStart: (one) => (setViewed(null), onStart(one.file)) };
  const enlargingHere = enlarging && { ...enlarging, begin: (one) => (setViewed(null), enlarging.begin(one)) };
  return html`<section class="gallery" aria-label=${words.title}>
    <div class="section-head">
      <h2>${words.title}</h2>
      <small>${compared ? words.comparing : words.count(entries.length)}</small>
      <span class="space"></span>
      <button class="quiet" aria-pressed=${Boolean(compared)} disabled=${entries.length < 2} onClick=${() => setCompared(compared ? null : [])}>
        ${icon("compare")}<span>${compared ? words.stopComparing : words.compare}</span>
      </button>
      <button class="quiet" onClick=${clear}>${icon("trash")}<span>${words.clear}</span></button>
    </div>
    <ul class="thumbs">
      ${entries.slice(0, shown).map((one) => html`<li key=${one.key}><${Thumb} entry=${one} isPicked=${compared?.includes(one.key)} onPick=${pick} /></li>`)}
    </ul>
    ${shown < entries.length && html`<button onClick=${() => setShown(shown + PAGE)}>${words.more}</button>`}
    ${entry && html`<${Viewer} key=${entry.key} entry=${entry} entries=${entries} onView=${setViewed} onRemove=${remove} enlarging=${enlargingHere} ...${act} onClose=${() => setViewed(null)} />`}
    ${pair.length === 2 && html`<${Comparison} pair=${pair} onClose=${() => setCompared([])} />`}
  </section>`;
}

function Thumb({ entry, isPicked, onPick }) {
  const url = useUrl(entry.file);
  const { prompt } = entry.parameters;
  return html`<button class=${isPicked ? "thumb picked" : "thumb"} aria-pressed=${isPicked} aria-label=${words.view(prompt)} title=${prompt} onClick=${() => onPick(entry.key)}>
    ${url && html`<img src=${url} alt="" class=${sharp(entry)} loading="lazy" decoding="async" />`}
  </button>`;
}

// The button that has an image enlarged, and the choice of the network where there are several.
export function Enlarge({ entry, enlarging: { upscalers, chosen, choose, begin } }) {
  const stay = (event) => event.stopPropagation(); // arrow keys choose here, and turn no pages
  return html`<span class="enlarge">
    ${upscalers.length > 1 && html`<select aria-label=${words.enlargeWith} onKeyDown=${stay} onChange=${(e) => choose(e.target.value)}>
      ${upscalers.map((name) => html`<option key=${name} value=${name} selected=${name === chosen}>${name}</option>`)}
    </select>`}
    <button type="button" title=${`${words.enlargeWith} ${chosen}`} onClick=${() => begin(entry)}>${icon("enlarge")}<span>${words.enlarge}</span></button>
  </span>`;
}

function Viewer({ entry, entries, enlarging, onView, onReuse, onStart, onRemove, onClose }) {
  const url = useUrl(entry.file);
  const place = entries.indexOf(entry);
  const go = (step) => entries[place + step] && onView(entries[place + step].key);
  const onKeyDown = (event) => {
    if (event.key === "ArrowLeft") go(-1);
    if (event.key === "ArrowRight") go(1);
  };
  const name = `${entry.parameters.model}-${entry.parameters.seed ?? entry.at}.png`;
  return html`<${Dialog} title=${entry.parameters.prompt.slice(0, 80)} className="wide" onClose=${onClose} onKeyDown=${onKeyDown}>
    <div class="viewer">
      <div class="large">${url && html`<img src=${url} alt=${entry.parameters.prompt} width=${entry.width} height=${entry.height} class=${sharp(entry)} />`}</div>
      <div class="about">
        <div class="row">
          <button class="quiet" aria-label=${words.previous} disabled=${place === 0} onClick=${() => go(-1)}>${icon("left")}</button>
          <small>${place + 1} / ${entries.length}</small>
          <button class="quiet" aria-label=${words.next} disabled=${place === entries.length - 1} onClick=${() => go(1)}>${icon("right")}</button>
        </div>
        <${Facts} entry=${entry} />
        <div class="row wrap">
          <button class="primary" onClick=${() => onReuse(entry)}>${icon("reuse")}<span>${words.reuse}</span></button>
          <button onClick=${() => onStart(entry)}>${icon("image")}<span>${words.start}</span></button>
          ${enlarging && html`<${Enlarge} entry=${entry} enlarging=${enlarging} />`}
          ${!entry.parameters.source && html`<button onClick=${async () => copy(imageAsCurl(await imageRequest(entry.parameters)))}>${icon("copy")}<span>${words.asCurl}</span></button>
            <button onClick=${async () => copy(imageAsPython(await imageRequest(entry.parameters)))}>${icon("copy")}<span>${words.asPython}</span></button>`}
          <button onClick=${() => download(entry.file, name)}>${icon("download")}<span>${words.download}</span></button>
          <button class="quiet" onClick=${() => onRemove(entry)}>${icon("trash")}<span>${words.remove}</span></button>
        </div>
        <small class="muted">${words.kept}</small>
      </div>
    </div>
  <//>`;
}

// What is known of an image; with `other`, what differs from that one is marked.
function Facts({ entry, other }) {
  const others = other && new Map(rowsOf(other));
  const differs = (name, value) => others && name !== words.made && name !== words.took && others.get(name) !== value;
  return html`<dl>${rowsOf(entry).map(([name, value]) => html`<div class=${differs(name, value) ? "differs" : ""}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

function rowsOf(entry) {
  const { facts } = texts;
  const { parameters: told } = entry;
  const rows = [
    [facts.model, told.model],
    [facts.prompt, told.prompt],
    [facts.negative_prompt, told.negative],
    [facts.size, `${entry.width} × ${entry.height}`],
    [facts.seed, told.seed],
    [facts.num_inference_steps, told.steps],
    [facts.guidance_scale, told.guidance],
    [facts.scheduler, told.scheduler],
    [facts.lora, told.loras && Object.entries(told.loras).map(([name, scale]) => `${name} ${scale}`).join(", ")],
    [facts.control, told.control && `${told.control.name} ${told.control.scale}`],
    [facts.ip_adapter, told.ipAdapter && `${told.ipAdapter.name} ${told.ipAdapter.scale}`],
    [facts.strength, told.strength],
    [facts.source, told.source && sourceOf(told.source)],
    [words.took, entry.tookS ? seconds(entry.tookS) : undefined],
    [words.made, new Date(entry.at).toLocaleString()],
    [words.warnings, entry.warnings?.join("; ")],
  ];
  return rows.filter(([, value]) => value !== undefined && value !== "").map(([name, value]) => [name, String(value)]);
}

function sourceOf({ model, width, height, seed }) {
  const size = width && height ? `${width} × ${height}` : "";
  return [model, size, seed === undefined ? "" : `${texts.facts.seed} ${seed}`].filter(Boolean).join(" · ");
}

// Two images over each other, divided where the slider stands.
function Comparison({ pair, onClose }) {
  const [share, setShare] = useState(50);
  const [one, other] = pair;
  const urls = [useUrl(one.file), useUrl(other.file)];
  const top = useRef();
  useEffect(() => {
    if (top.current) top.current.style.clipPath = `inset(0 0 0 ${share}%)`;
  });
  return html`<${Dialog} title=${words.compare} className="wide" onClose=${onClose}>
    <div class="comparison">
      <div class="pile" style=${{ aspectRatio: `${one.width} / ${one.height}` }}>
        ${urls[0] && html`<img src=${urls[0]} alt=${one.parameters.prompt} class=${sharp(one)} />`}
        ${urls[1] && html`<img ref=${top} src=${urls[1]} alt=${other.parameters.prompt} class=${sharp(other)} />`}
      </div>
      <input type="range" min="0" max="100" value=${share} aria-label=${words.reveal} onInput=${(event) => setShare(Number(event.target.value))} />
      <div class="pair"><${Facts} entry=${one} other=${other} /><${Facts} entry=${other} other=${one} /></div>
    </div>
  <//>`;
}
