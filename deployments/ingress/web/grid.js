// A grid: the same prompt over models, seeds, guidance, steps or LoRAs, as a labelled contact sheet.

import { Field, html } from "./parts.js";
import { texts } from "./texts.js";

const words = texts.grid;
const AXES = ["model", "seed", "guidance", "steps", "lora", "loraScale"];
const MAX_VALUES = 64;

// Return the numbers of "1, 2.5, 4-7".
export function numbersOf(text) {
  const found = [];
  for (const part of String(text ?? "").split(/[,;\s]+/)) {
    const range = part.match(/^(\d+)-(\d+)$/);
    if (range) {
      for (let number = Number(range[1]); number <= Number(range[2]) && found.length <= MAX_VALUES; number++) found.push(number);
    } else if (part && Number.isFinite(Number(part))) {
      found.push(Number(part));
    }
  }
  return [...new Set(found)].slice(0, MAX_VALUES + 1);
}

function namesOf(text) {
  const names = String(text ?? "").split(",").map((name) => name.trim()).filter(Boolean);
  return [...new Set(names)].slice(0, MAX_VALUES + 1);
}

// Return {label, change of the form} for each value of an axis; one that changes nothing where there is no axis.
function valuesOf(axis, text, form) {
  if (!AXES.includes(axis)) return [{ label: "", change: {} }];
  if (axis === "model") return namesOf(text).map((model) => ({ label: model, change: { model } }));
  if (axis === "lora") {
    return namesOf(text).map((name) => {
      const isNone = name === words.noLora;
      return { label: name, change: { loras: isNone ? {} : { [name]: form.loras[name] || 1 } } };
    });
  }
  return numbersOf(text).map((value) => {
    const scaled = Object.fromEntries(Object.keys(form.loras).filter((name) => form.loras[name]).map((name) => [name, value]));
    const change = axis === "loraScale" ? { loras: scaled } : { [axis]: axis === "guidance" ? value : Math.round(value) };
    return { label: `${words[axis]} ${value}`, change };
  });
}

// Return the cells of a grid, row by row: what changes in the form, and how column and row are called.
export function cellsOf(grid, form) {
  const columns = valuesOf(grid.across, grid.acrossValues, form);
  const rows = valuesOf(grid.down === grid.across ? "" : grid.down, grid.downValues, form);
  return rows.flatMap((row) =>
    columns.map((column) => ({ change: merged(column.change, row.change), cell: { across: column.label, down: row.label } })),
  );
}

// A LoRA of one axis has the scale of the other.
function merged(one, other) {
  if (!one.loras || !other.loras) return { ...one, ...other };
  const scale = Object.values(other.loras)[0] ?? Object.values(one.loras)[0];
  return { ...one, ...other, loras: Object.fromEntries(Object.keys(one.loras).map((name) => [name, scale])) };
}

export function GridFields({ grid, setGrid, form, loras, models, most }) {
  const count = cellsOf(grid, form).length;
  const set = (change) => setGrid({ ...grid, ...change });
  const hints = { seed: words.seedValues, lora: [words.noLora, ...loras.map((one) => one.id)].join(", "), model: models.join(", ") };
  const hintOf = (axis) => hints[axis] ?? words.numberValues;
  const onAxis = (place, axis) => set({ [place]: axis, [`${place}Values`]: axis === "lora" || axis === "model" ? hintOf(axis) : "" });
  const axis = (place) => html`<div class="pair">
    <${Field} label=${words[place]}>
      ${(id) => html`<select id=${id} value=${grid[place]} onChange=${(e) => onAxis(place, e.target.value)}>
        <option value="">${words.nothing}</option>
        ${AXES.filter((one) => loras.length || !one.startsWith("lora")).map((one) => html`<option value=${one} selected=${grid[place] === one}>${words[one]}</option>`)}
      </select>`}
    <//>
    <${Field} label=${words.values}>
      ${(id) => html`<input id=${id} disabled=${!grid[place]} placeholder=${grid[place] ? hintOf(grid[place]) : ""} value=${grid[`${place}Values`]} onInput=${(e) => set({ [`${place}Values`]: e.target.value })} />`}
    <//>
  </div>`;
  return html`<fieldset class="group">
    <legend>${words.title}</legend>
    ${axis("across")} ${axis("down")}
    <small class=${count > most ? "problem" : ""}>${count > most ? words.tooMany(count, most) : words.cells(count)}</small>
  </fieldset>`;
}

// Draw cells of {across, down, blob} as one image with their labels.
export async function sheetOf(cells) {
  const columns = [...new Set(cells.map((cell) => cell.across))];
  const rows = [...new Set(cells.map((cell) => cell.down))];
  const bitmaps = await Promise.all(cells.map((cell) => (cell.blob ? createImageBitmap(cell.blob) : null)));
  const scale = Math.max(1, Math.ceil(128 / Math.max(...bitmaps.map((one) => one?.width ?? 0), 1)));
  const side = Math.min(512, Math.max(...bitmaps.map((one) => (one?.width ?? 0) * scale), 128));
  const high = Math.min(512, Math.max(...bitmaps.map((one) => (one?.height ?? 0) * scale), 128));
  const left = rows.length > 1 ? 140 : 16;
  const canvas = new OffscreenCanvas(left + columns.length * (side + 8) + 8, 40 + rows.length * (high + 8) + 8);
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.fillStyle = "#222";
  pen.font = "14px system-ui, sans-serif";
  pen.imageSmoothingEnabled = scale === 1;
  columns.forEach((label, x) => pen.fillText(label, left + x * (side + 8), 26, side));
  if (rows.length > 1) rows.forEach((label, y) => pen.fillText(label, 12, 40 + y * (high + 8) + high / 2, left - 20));
  cells.forEach((cell, place) => {
    const x = left + columns.indexOf(cell.across) * (side + 8);
    if (bitmaps[place]) pen.drawImage(bitmaps[place], x, 40 + rows.indexOf(cell.down) * (high + 8), side, high);
  });
  return canvas.convertToBlob({ type: "image/png" });
}
