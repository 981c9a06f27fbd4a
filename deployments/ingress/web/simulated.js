// Simulated runs in a file of their own, written by `atelier simulate --html`: the data stand in it, nothing is fetched.

import { bytes, html, percent, render, seconds } from "./parts.js";
import { Playback } from "./playback.js";
import { runOfSimulation } from "./recording.js";
import { texts } from "./texts.js";

const words = texts.recording;
const recordings = JSON.parse(document.getElementById("runs").textContent);

function Figures({ found }) {
  const time = (value) => (value === null ? words.never : seconds(value));
  const tiles = [
    [words.served, `${found.served}/${found.requests}`],
    [words.mean, time(found.mean_s)],
    [words.p95, time(found.p95_s)],
    [words.inTarget, percent(found.slo_attainment)],
    [words.switches, found.switches],
    [words.moved, bytes(found.moved_bytes)],
  ];
  return html`<h3>${words.figures}</h3>
    <dl class="tiles">${tiles.map(([name, value]) => html`<div class="panel"><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

const heads = Object.fromEntries(recordings.map(({ title, figures }) => [title, html`<${Figures} found=${figures} />`]));
const page = html`<div class="cluster"><h1>${document.title}</h1><${Playback} runs=${recordings.map(runOfSimulation)} heads=${heads} /></div>`;
render(page, document.getElementById("main"));
