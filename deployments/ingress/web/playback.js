// A run that is over, or several beside each other, at a moment that is chosen: by a slider, or as time passes.

import { Decisions, Models, Places, Tiles, TimeLine } from "./cluster_view.js";
import { colorOf } from "./drawing.js";
import { Choices, clamp, html, seconds, useEffect, useId, useMemo, useState } from "./parts.js";
import { pictureAt } from "./recording.js";
import { texts } from "./texts.js";

const words = texts.recording;
const FRAME_MS = 100;
const PLAYED_S = 30; // a whole run is played in that time
const WINDOWS_S = [60, 600];

// The runs, with one moment for all. `heads` has what stands above the pictures of a run, by its title.
export function Playback({ runs, heads = {} }) {
  const endS = Math.max(...runs.map((run) => run.endS));
  const [atS, setAtS] = useState(Math.min(endS, WINDOWS_S[0]));
  const [isPlaying, setPlaying] = useState(false);
  const [window, setWindow] = useState(endS <= WINDOWS_S[0] ? endS : WINDOWS_S[0]);
  useMemo(() => runs.flatMap((run) => [...run.models.keys()]).sort().forEach(colorOf), [runs]);
  useEffect(() => {
    if (!isPlaying) return undefined;
    const step = (endS / PLAYED_S) * (FRAME_MS / 1000);
    const timer = setInterval(() => setAtS((old) => Math.min(endS, old + step)), FRAME_MS);
    return () => clearInterval(timer);
  }, [isPlaying, endS]);
  useEffect(() => void (atS >= endS && setPlaying(false)), [atS]);
  const play = () => {
    if (!isPlaying && atS >= endS) setAtS(0);
    setPlaying(!isPlaying);
  };
  const spans = [...WINDOWS_S.filter((one) => one < endS), endS].map((one) => [one, one === endS ? words.whole : seconds(one)]);
  return html`<div class="panel part scrub">
      <button class="primary" onClick=${play}>${isPlaying ? words.pause : words.play}</button>
      <${Moment} atS=${atS} endS=${endS} onInput=${(value) => (setPlaying(false), setAtS(clamp(value, 0, endS)))} />
      ${spans.length > 1 && html`<${Choices} label=${words.window} value=${window} onChange=${setWindow} choices=${spans} />`}
    </div>
    <div class=${runs.length > 1 ? "runs beside" : "runs"}>
      ${runs.map((run) => html`<${Run} key=${run.title} run=${run} atS=${Math.min(atS, run.endS)} spanS=${window} head=${heads[run.title]} isAlone=${runs.length === 1} />`)}
    </div>`;
}

function Moment({ atS, endS, onInput }) {
  const id = useId("moment");
  const text = words.moment(atS.toFixed(1), endS.toFixed(1));
  return html`<div class="field wide">
    <label for=${id}>${words.momentLabel} <output for=${id}>${text}</output></label>
    <input id=${id} type="range" min="0" max=${endS} step=${endS / 1000} value=${atS} aria-valuetext=${text} onInput=${(event) => onInput(Number(event.target.value))} />
  </div>`;
}

function Run({ run, atS, spanS, head, isAlone }) {
  const picture = useMemo(() => pictureAt(run, atS, spanS), [run, atS, spanS]);
  const id = useId("run");
  const within = isAlone ? "" : id;
  return html`<section class="stack" aria-label=${run.title}>
    ${!isAlone && html`<h2 id=${id}>${run.title}</h2>`}
    ${head}
    ${run.leftOut?.length > 0 && html`<p class="problem">${words.leftOut(run.leftOut.length, run.leftOut[0])}</p>`}
    <${Tiles} picture=${picture} spanS=${spanS} />
    <${TimeLine} picture=${picture} aheadS=${0} spanS=${spanS} about=${words.about(seconds(spanS))} within=${within} />
    <${Places} picture=${picture} workers=${Object.entries(picture.workers)} about=${run.isExact ? "" : words.reckoned} within=${within} />
    <div class=${isAlone ? "halves" : "stack"}>
      <${Models} picture=${picture} canOrder=${false} within=${within} />
      <${Decisions} picture=${picture} aheadS=${0} within=${within} />
    </div>
  </section>`;
}
