// Pieces that all pages are made of: fields, dialogs, notices, and numbers as people read them.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { keys } from "./api.js";
import { texts } from "./texts.js";

export * from "./vendor/htm-preact.js";

export function bytes(count) {
  if (!Number.isFinite(count)) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) (count /= 1024), unit++;
  return `${unit && count < 10 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

export function seconds(time) {
  if (!Number.isFinite(time)) return "";
  if (time < 1) return `${Math.round(time * 1000)} ${texts.units.ms}`;
  if (time < 10) return `${time.toFixed(1)} ${texts.units.s}`;
  if (time < 100) return `${Math.round(time)} ${texts.units.s}`;
  return `${Math.round(time / 60)} ${texts.units.min}`;
}

export const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

export const percent = (share) => `${Math.round(share * 100)} %`;

// What is kept for the next visit: forms, never keys. A browser that keeps nothing is no error.
export const kept = {
  get(name, fallback) {
    try {
      return JSON.parse(localStorage.getItem(`atelier.${name}`)) ?? fallback;
    } catch {
      return fallback;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`atelier.${name}`, JSON.stringify(value));
    } catch {
      // full, or forbidden
    }
  },
};

// A value that outlives the page. `check` turns what an older page has kept into what this one expects.
export function useKept(name, initial, check = (value) => value) {
  const [value, setValue] = useState(() => check(kept.get(name, initial)));
  useEffect(() => {
    const timer = setTimeout(() => kept.set(name, value), 200);
    const save = () => kept.set(name, value);
    addEventListener("pagehide", save);
    return () => (clearTimeout(timer), removeEventListener("pagehide", save));
  }, [value]);
  return [value, setValue];
}

// The address of a blob for as long as it is shown; "" without one.
export function useUrl(blob) {
  const [url, setUrl] = useState("");
  useEffect(() => {
    if (!blob) return setUrl("");
    const made = URL.createObjectURL(blob);
    setUrl(made);
    return () => URL.revokeObjectURL(made);
  }, [blob]);
  return url;
}

// Small images are shown in their pixels, not in a blur of them.
export const sharp = ({ width, height }) => (Math.max(width ?? 1024, height ?? 1024) <= 128 ? "pixels" : "");

let tellAll = () => {};

// Say something to everybody: shown for a while, or until it is dismissed, and read out.
export const tell = (text, { isError = false } = {}) => tellAll({ text: String(text), isError });

// Copy a text, where the browser lets pages do that, and say so.
export const copy = (text) => navigator.clipboard?.writeText(text).then(() => tell(texts.chat.copied), () => {});

export function Notices() {
  const [notices, setNotices] = useState([]);
  const number = useRef(0);
  useEffect(() => {
    tellAll = (notice) => {
      const id = ++number.current;
      setNotices((shown) => [...shown.filter((one) => one.text !== notice.text).slice(-3), { ...notice, id }]);
      setTimeout(() => setNotices((shown) => shown.filter((one) => one.id !== id)), notice.isError ? 15000 : 5000);
    };
    return () => (tellAll = () => {});
  }, []);
  const close = (id) => setNotices((shown) => shown.filter((one) => one.id !== id));
  return html`<div class="notices" role="status" aria-live="polite">
    ${notices.map(
      ({ id, text, isError }) => html`<div key=${id} class=${isError ? "notice error" : "notice"}>
        <span>${text}</span>
        <button class="quiet" aria-label=${texts.errors.dismiss} onClick=${() => close(id)}>${icon("close")}</button>
      </div>`,
    )}
  </div>`;
}

const ICONS = {
  close: "M6 6l12 12M18 6L6 18",
  key: "M14 10a4 4 0 1 0-3.5 3.97L12 15.5h2v2h2v2h3.5V16L14 10.6M8.8 9.2h.01",
  plus: "M12 5v14M5 12h14",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15.5 9h.01",
  stop: "M7 7h10v10H7z",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  reuse: "M4 12a8 8 0 0 1 14-5l2 2M20 4v5h-5M20 12a8 8 0 0 1-14 5l-2-2M4 20v-5h5",
  compare: "M12 3v18M4 6h5v12H4zM15 6h5v12h-5",
  left: "M15 5l-7 7 7 7",
  right: "M9 5l7 7-7 7",
  down: "M6 9l6 6 6-6",
  brush: "M4 20c3 0 4-1.5 4-3.5A2.5 2.5 0 0 1 12 15l8-9a1.5 1.5 0 0 0-2-2l-9 8a2.5 2.5 0 0 0-1 4",
  send: "M5 12h13M12 5l7 7-7 7",
  grid: "M4 4h6v6H4zM14 4h6v6h-6zM4 14h6v6H4zM14 14h6v6h-6z",
  enlarge: "M14 4h6v6M20 4l-7 7M10 20H4v-6M4 20l7-7",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
};

export function icon(name) {
  return html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${ICONS[name]} /></svg>`;
}

// A modal dialog of the platform: focus stays in it, Escape closes it.
export function Dialog({ title, onClose, onKeyDown, className = "", children }) {
  const dialog = useRef();
  useEffect(() => {
    dialog.current.showModal();
  }, []);
  const onClick = (event) => event.target === dialog.current && onClose();
  return html`<dialog ref=${dialog} class=${className} aria-label=${title} onClose=${onClose} onClick=${onClick} onKeyDown=${onKeyDown}>
    <div class="dialog-body">
      <div class="dialog-head">
        <h2>${title}</h2>
        <button class="quiet" aria-label=${texts.gallery.close} onClick=${onClose}>${icon("close")}</button>
      </div>
      ${children}
    </div>
  </dialog>`;
}

// Files that are dropped anywhere on the page.
export function useDrops(onFile) {
  const latest = useRef();
  latest.current = onFile;
  useEffect(() => {
    const over = (event) => event.dataTransfer?.types.includes("Files") && event.preventDefault();
    const drop = (event) => {
      const file = event.dataTransfer?.files[0];
      if (!file || event.defaultPrevented) return;
      event.preventDefault();
      latest.current(file);
    };
    addEventListener("dragover", over);
    addEventListener("drop", drop);
    return () => (removeEventListener("dragover", over), removeEventListener("drop", drop));
  }, []);
}

let number = 0;

export function useId(name) {
  const id = useRef();
  id.current ??= `${name}-${++number}`;
  return id.current;
}

export function Field({ label, hint, children, className = "" }) {
  const id = useId("field");
  return html`<div class=${`field ${className}`}>
    <label for=${id}>${label}</label>
    ${children(id)} ${hint && html`<small>${hint}</small>`}
  </div>`;
}

// A slider with its number beside it. `value` null is the model's own, shown as `own`.
export function Slider({ label, value, onInput, min, max, step, own = "", className = "" }) {
  const id = useId("slider");
  const parsed = (text) => (text === "" ? null : Number(text));
  const shown = value ?? own;
  return html`<div class=${`field slider ${className}`}>
    <label for=${id}>${label}</label>
    <input
      type="number"
      aria-label=${label}
      min=${min}
      step="any"
      value=${value ?? ""}
      placeholder=${own}
      onInput=${(event) => onInput(parsed(event.target.value))}
    />
    <input
      id=${id}
      type="range"
      min=${min}
      max=${Math.max(max, Number(shown) || 0)}
      step=${step}
      value=${Number(shown) || min}
      aria-valuetext=${value === null || value === undefined ? `${own} ${texts.create.own}` : value}
      onInput=${(event) => onInput(Number(event.target.value))}
    />
  </div>`;
}

// A few choices of which one holds: radio buttons in one row.
export function Choices({ label, value, onChange, choices, className = "" }) {
  const name = useId("choices");
  return html`<fieldset class=${`choices ${className}`}>
    <legend>${label}</legend>
    <div class="row">
      ${choices.map(
        ([key, text]) => html`<label key=${key}>
          <input type="radio" name=${name} checked=${key === value} onChange=${() => onChange(key)} />
          <span>${text}</span>
        </label>`,
      )}
    </div>
  </fieldset>`;
}

// A text field that grows with its text.
export function Area({ value, onInput, rows = 2, ...rest }) {
  const area = useRef();
  useEffect(() => {
    const { current } = area;
    current.style.height = "auto";
    current.style.height = `${Math.min(current.scrollHeight + 2, 480)}px`;
  }, [value]);
  return html`<textarea ref=${area} rows=${rows} value=${value} onInput=${(e) => onInput(e.target.value)} ...${rest}></textarea>`;
}

function KeyDialog({ error, onDone }) {
  const [key, setKey] = useState("");
  const words = texts.keys;
  const use = (event) => {
    event.preventDefault();
    if (!key.trim()) return;
    keys.set(key.trim());
    onDone(true);
  };
  const forget = () => {
    keys.set("");
    onDone(false);
  };
  const isRefused = error && keys.get();
  return html`<${Dialog} title=${isRefused ? words.refusedTitle : words.title} className="narrow" onClose=${() => onDone(false)}>
    <form onSubmit=${use}>
      ${isRefused && html`<p class="problem" role="alert">${error.message}</p>`}
      ${error?.status === 403 && html`<p>${words.needAdmin}</p>`} ${!error && !keys.get() && html`<p>${words.optional}</p>`}
      <p class="muted">${words.why}</p>
      <${Field} label=${words.label}>
        ${(id) => html`<input id=${id} type="password" autocomplete="off" spellcheck=${false} autofocus value=${key} onInput=${(e) => setKey(e.target.value)} />`}
      <//>
      <div class="row end">
        ${keys.get() && html`<button type="button" onClick=${forget}>${words.forget}</button>`}
        <button class="primary" disabled=${!key.trim()}>${words.use}</button>
      </div>
    </form>
  <//>`;
}

function Corner() {
  const [asking, setAsking] = useState(null);
  const [hasKey, setHasKey] = useState(Boolean(keys.get()));
  useEffect(() => {
    keys.askWith((error) => new Promise((resolve) => setAsking({ error, resolve })));
    return keys.onChange(setHasKey);
  }, []);
  const onDone = (hasAnother) => {
    asking.resolve(hasAnother);
    setAsking(null);
  };
  return html`<button class="quiet" aria-label=${hasKey ? texts.keys.isSet : texts.keys.button} onClick=${() => setAsking({ error: null, resolve: () => {} })}>
      ${icon("key")}<span>${hasKey ? texts.keys.isSet : texts.keys.button}</span>
    </button>
    ${asking && html`<${KeyDialog} error=${asking.error} onDone=${onDone} />`}`;
}

// Show a page. The header is there already, so that nothing moves when this comes.
export function open(page) {
  render(html`<${Corner} />`, document.getElementById("corner"));
  render(html`<${Notices} />`, document.getElementById("notices"));
  render(page, document.getElementById("main"));
}
