// Models that read: the similarity of pasted texts, documents by how well they answer, scores of classes.

import { getJson } from "./api.js";
import { Area, Field, html, tell, useEffect, useKept, useState } from "./parts.js";
import { ModelPicker, firstOf, makes } from "./models.js";
import { texts } from "./texts.js";

const words = texts.vectors;
const MAX_TEXTS = 32;
const linesOf = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

export function Vectors({ models }) {
  const [form, setForm] = useKept("vectors", { model: "", texts: "", query: "" });
  const [found, setFound] = useState(null);
  const [isOn, setOn] = useState(false);
  const set = (change) => setForm((old) => ({ ...old, ...change }));
  useEffect(() => {
    if (models?.length && !models.some((model) => model.id === form.model)) set({ model: firstOf(models).id });
  }, [models?.length]);
  const model = models?.find((one) => one.id === form.model);
  const ask = model && askOf(model);
  const lines = linesOf(form.texts);
  const run = async (event) => {
    event.preventDefault();
    setOn(true);
    try {
      setFound(await ask(form, lines));
    } catch (error) {
      tell(error.message, { isError: true });
    }
    setOn(false);
  };
  const isRanker = ask === rank;
  const fewest = ask === compare ? 2 : 1;
  const problem = lines.length > MAX_TEXTS ? words.tooMany(MAX_TEXTS) : ask === compare && lines.length === 1 ? words.tooFew : "";
  const isWhole = model && !problem && lines.length >= fewest && (!isRanker || form.query.trim());
  return html`<div class="chat">
    <form class="panel settings" onSubmit=${run}>
      <div class="fields">
        <${ModelPicker} models=${models} value=${form.model} onChange=${(id) => (set({ model: id }), setFound(null))} />
        ${isRanker && html`<${Field} label=${words.query}>${(id) => html`<${Area} id=${id} rows="2" value=${form.query} onInput=${(query) => set({ query })} />`}<//>`}
        <${Field} label=${isRanker ? words.documents : words.texts} hint=${problem}>
          ${(id) => html`<${Area} id=${id} rows="6" value=${form.texts} onInput=${(value) => set({ texts: value })} />`}
        <//>
        <button class="primary" disabled=${isOn || !isWhole}>${isRanker ? words.rank : words.compare}</button>
      </div>
    </form>
    <section class="panel talk results" aria-live="polite">${found && html`<${found.Table} ...${found} />`}</section>
  </div>`;
}

function askOf(model) {
  if (makes("/v1/rerank")(model)) return rank;
  return makes("/v1/embeddings")(model) ? compare : classify;
}

async function compare({ model }, lines) {
  const { data } = await getJson("v1/embeddings", { json: { model, input: lines } });
  const vectors = data.map(({ embedding }) => {
    const length = Math.hypot(...embedding) || 1;
    return embedding.map((value) => value / length);
  });
  const rows = vectors.map((one) => vectors.map((other) => one.reduce((sum, value, place) => sum + value * other[place], 0)));
  return { Table: Matrix, lines, rows, size: vectors[0].length };
}

async function rank({ model, query }, lines) {
  const { results } = await getJson("v1/rerank", { json: { model, query, documents: lines } });
  return { Table: Ranks, rows: results.map(({ index, relevance_score }) => [lines[index], relevance_score]) };
}

async function classify({ model }, lines) {
  const { data } = await getJson("v1/classify", { json: { model, input: lines } });
  return { Table: Classes, rows: data.map(({ index, label, probs }) => [lines[index], label ?? "", Math.max(...(probs ?? [NaN]))]) };
}

function Matrix({ lines, rows, size }) {
  const shade = (value) => ({ "--share": `${Math.round(Math.max(0, value) * 100)}%` });
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${words.matrix}>
    <table class="table matrix">
      <caption>${words.matrix} · ${words.dimensions(size)}</caption>
      <thead><tr><td></td>${lines.map((line, place) => html`<th scope="col" title=${line}>${place + 1}</th>`)}</tr></thead>
      <tbody>${rows.map((row, place) => html`<tr>
        <th scope="row"><span class="muted">${place + 1}</span> ${lines[place]}</th>
        ${row.map((value) => html`<td class="number cell" style=${shade(value)}>${value.toFixed(2)}</td>`)}
      </tr>`)}</tbody>
    </table>
  </div>`;
}

function Ranks({ rows }) {
  return html`<table class="table">
    <caption>${words.ranking}</caption>
    <thead><tr><th scope="col">${words.text}</th><th scope="col" class="number">${words.score}</th></tr></thead>
    <tbody>${rows.map(([line, score]) => html`<tr><td>${line}</td><td class="number">${score.toPrecision(3)}</td></tr>`)}</tbody>
  </table>`;
}

function Classes({ rows }) {
  return html`<table class="table">
    <caption>${words.labels}</caption>
    <thead><tr><th scope="col">${words.text}</th><th scope="col">${words.labels}</th><th scope="col" class="number">${words.score}</th></tr></thead>
    <tbody>${rows.map(([line, label, score]) => html`<tr><td>${line}</td><td>${label}</td><td class="number">${score.toPrecision(3)}</td></tr>`)}</tbody>
  </table>`;
}
