// The page Cluster: what every node and worker holds and does, as it changes, and orders by hand.

import { AddModel } from "./add_model.js";
import { Decisions, Models, Order, Places, Tenants, Tiles, TimeLine } from "./cluster_view.js";
import { colorOf } from "./drawing.js";
import { follow } from "./live.js";
import { html, open, seconds, tell, useDrops, useEffect, useMemo, useRef, useState } from "./parts.js";
import { Playback } from "./playback.js";
import { runOfFile } from "./recording.js";
import { texts } from "./texts.js";

const words = texts.cluster;
const recorded = texts.recording;
const DRAW_EVERY_MS = 250; // however often something changes
const TICK_MS = 1000;

function Page() {
  const [state, setState] = useState("connecting");
  const [, redraw] = useState(0);
  const [isPaused, setPaused] = useState(false);
  const seen = useRef({ picture: null, atMs: 0 });
  const [run, openFile, close] = useRun();
  useEffect(() => (isPaused || run ? undefined : followed(seen, setState, redraw)), [isPaused, run]);
  const { picture, atMs } = seen.current;
  const staleS = atMs ? (performance.now() - atMs) / 1000 : 0;
  if (run) {
    return html`<div class="cluster">
      <div class="section-head"><h1>${recorded.title(run.title)}</h1><span class="space"></span><${TraceButton} onFile=${openFile} /><button onClick=${close}>${recorded.back}</button></div>
      <${Playback} key=${run.title} runs=${[run]} />
    </div>`;
  }
  return html`<div class="cluster">
    <div class="section-head">
      <h1>${picture?.totals.cluster ?? words.connecting}</h1>
      <${State} state=${isPaused ? "paused" : state} staleS=${staleS} totals=${picture?.totals} />
      <span class="space"></span>
      ${picture && html`<${FreezeAll} totals=${picture.totals} />`}
      ${picture && html`<${AddModel} models=${Object.keys(picture.models)} />`}
      <${TraceButton} onFile=${openFile} />
      <button aria-pressed=${isPaused} onClick=${() => setPaused(!isPaused)}>${isPaused ? words.resume : words.pause}</button>
    </div>
    ${picture && html`<${Sections} picture=${picture} aheadS=${isPaused ? 0 : staleS} />`}
  </div>`;
}

// A run that was opened in the place of the live cluster, what opens a file of one, and what closes it.
function useRun() {
  const [run, setRun] = useState(null);
  const openFile = async (file) => {
    try {
      const found = await runOfFile(file);
      setRun(found);
      tell(recorded.opened(file.name, found.requests.length));
    } catch (error) {
      tell(error instanceof DOMException ? recorded.unreadable(file.name) : error.message, { isError: true });
    }
  };
  useDrops(openFile);
  return [run, openFile, () => setRun(null)];
}

function TraceButton({ onFile }) {
  const take = (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    if (file) onFile(file);
  };
  return html`<label class="pick" title=${recorded.dropHint}>${recorded.open}<input type="file" accept=".jsonl,.json,.txt" onChange=${take} /></label>`;
}

// Follow the cluster, and draw as often as is of use.
function followed(seen, setState, redraw) {
  let timer = null;
  const draw = () => {
    timer = null;
    redraw((count) => count + 1);
  };
  const soon = () => (timer ??= setTimeout(draw, DRAW_EVERY_MS));
  const tick = setInterval(() => seen.current.picture && !document.hidden && soon(), TICK_MS);
  const stop = follow((picture) => {
    seen.current = { picture, atMs: performance.now() };
    soon();
  }, setState);
  return () => (stop(), clearInterval(tick), clearTimeout(timer));
}

function State({ state, staleS, totals }) {
  const isError = state instanceof Error;
  const tone = isError ? "away" : state === "live" ? "resident" : "memory";
  const text = isError ? state.message : { live: words.live, connecting: words.connecting, paused: words.paused }[state];
  const old = staleS > 5 ? words.stale(seconds(staleS)) : "";
  const policy = totals && (totals.enabled === false || !totals.policy ? words.off : `${words.policy} ${totals.policy}`);
  return html`<span class=${`near ${tone}`} role="status">${text}</span>
    <small>${[old, policy, totals?.registry && words.unreachable(totals.registry)].filter(Boolean).join(" · ")}</small>`;
}

function FreezeAll({ totals }) {
  if (!totals.overrides) return null;
  return html`<${Order} text=${words.freezeAll} off=${words.thawAll} isOn=${totals.overrides.is_frozen} name="" on="freeze" className="" />`;
}

function Sections({ picture, aheadS }) {
  useMemo(() => Object.keys(picture.models).sort().forEach(colorOf), [Object.keys(picture.models).length]);
  const workers = Object.entries(picture.workers);
  return html`<${Tiles} picture=${picture} />
    <${TimeLine} picture=${picture} aheadS=${aheadS} />
    <${Places} picture=${picture} workers=${workers} />
    <div class="halves">
      <${Models} picture=${picture} />
      <${Decisions} picture=${picture} aheadS=${aheadS} />
    </div>
    <${Tenants} shares=${picture.shares} />`;
}

open(html`<${Page} />`);
