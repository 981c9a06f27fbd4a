// What the cluster page draws on canvases: bars of bytes, and the time line. Names are only ever drawn as text.

import { bytes, html, seconds, useEffect, useRef } from "./parts.js";
import { texts } from "./texts.js";

export const SPAN_S = 60;
const LANE = { least: 14, most: 48 };
const LABELED = 26; // so high is a lane that has room for labels of switches, in pixels
const TRACKS = 5;
const isDark = matchMedia("(prefers-color-scheme: dark)");

const hues = new Map(); // by name, in the order in which names come: neighbors differ by the golden angle

// A color for a name, the same one for as long as the page is open.
export function colorOf(name) {
  if (!hues.has(name)) hues.set(name, (265 + hues.size * 137.508) % 360);
  const hue = hues.get(name).toFixed(0);
  return isDark.matches ? `oklch(0.7 0.12 ${hue})` : `oklch(0.55 0.13 ${hue})`;
}

const style = () => {
  const found = getComputedStyle(document.documentElement);
  const dark = isDark.matches;
  return {
    text: dark ? "#f2f1ee" : "#1b1b1a",
    muted: dark ? "#a5a29b" : "#5f5d58",
    line: dark ? "#343432" : "#e0dfdb",
    sunken: dark ? "#0e0e0e" : "#efeeeb",
    size: parseFloat(found.fontSize),
  };
};

// A canvas as wide as its place, drawn anew when `drawn` changes, and when the place does.
export function Canvas({ height, draw, drawn, label, className = "" }) {
  const canvas = useRef();
  const latest = useRef();
  latest.current = draw;
  const redraw = () => {
    const { current } = canvas;
    if (!current?.clientWidth) return;
    const ratio = Math.min(3, devicePixelRatio || 1);
    const [wide, high] = [Math.round(current.clientWidth * ratio), Math.round(height * ratio)];
    if (current.width !== wide || current.height !== high) [current.width, current.height] = [wide, high];
    const pen = current.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, current.clientWidth, height);
    latest.current(pen, current.clientWidth, height, style());
  };
  useEffect(redraw, [drawn, height]);
  useEffect(() => {
    const watching = new ResizeObserver(redraw);
    watching.observe(canvas.current);
    isDark.addEventListener("change", redraw);
    return () => (watching.disconnect(), isDark.removeEventListener("change", redraw));
  }, [height]);
  return html`<canvas ref=${canvas} class=${className} role="img" aria-label=${label} title=${label} style=${{ height: `${height}px` }}></canvas>`;
}

// A bar of parts {nbytes, color, label, isShared, isFaint}. `scale` is the bytes of its whole width, those of all bars
// that are compared; a mark shows the budget where it is within.
export function Bar({ parts, scale, budget, label, drawn, height = 22 }) {
  const draw = (pen, width, high, look) => {
    pen.fillStyle = look.sunken;
    pen.fillRect(0, 0, width, high);
    let left = 0;
    for (const part of parts) {
      const wide = (part.nbytes / scale) * width;
      drawPart(pen, part, left, wide, high, look);
      left += wide;
    }
    if (budget >= scale) return;
    pen.fillStyle = look.muted;
    pen.fillRect((budget / scale) * width, 0, 2, high);
  };
  return html`<${Canvas} className="bytes" height=${height} draw=${draw} drawn=${drawn} label=${label} />`;
}

function drawPart(pen, part, left, wide, high, look) {
  pen.globalAlpha = part.isFaint ? 0.35 : 1;
  pen.fillStyle = part.color;
  pen.fillRect(left, 0, Math.max(0.5, wide - 1), high);
  pen.globalAlpha = 1;
  if (part.isShared) hatch(pen, left, Math.max(0.5, wide - 1), high);
  if (wide < 36 || !part.label) return;
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, wide - 4, high);
  pen.clip();
  pen.font = `600 ${look.size * 0.75}px system-ui, sans-serif`;
  pen.textBaseline = "middle";
  pen.fillStyle = part.isFaint ? look.text : isDark.matches ? "#101010" : "#ffffff";
  pen.fillText(part.label, left + 5, high / 2 + 0.5);
  pen.restore();
}

function hatch(pen, left, wide, high) {
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, wide, high);
  pen.clip();
  pen.strokeStyle = "rgb(255 255 255 / 35%)";
  pen.lineWidth = 2;
  pen.beginPath();
  for (let x = left - high; x < left + wide; x += 7) {
    pen.moveTo(x, high);
    pen.lineTo(x + high, 0);
  }
  pen.stroke();
  pen.restore();
}

export const laneHeight = (count) => Math.max(LANE.least, Math.min(LANE.most, 640 / Math.max(1, count)));

// Draw the last minute, or `spanS`: a lane for each worker, a bar for each request, a mark for each switch.
export function drawTimeLine(pen, width, height, look, { lanes, requests, switches, nowS, spanS = SPAN_S }) {
  const nameWide = Math.min(110, width * 0.22);
  const lane = laneHeight(lanes.length);
  const scale = (width - nameWide - 8) / spanS;
  const at = (timeS) => nameWide + (timeS - (nowS - spanS)) * scale;
  pen.font = `${look.size * 0.75}px system-ui, sans-serif`;
  pen.textBaseline = "middle";
  drawScale(pen, at, nowS, spanS, height, look);
  const tops = new Map(lanes.map(({ name }, place) => [name, place * lane + 2]));
  lanes.forEach(({ name, note }, place) => {
    pen.fillStyle = look.line;
    pen.fillRect(0, (place + 1) * lane, width, 0.5);
    pen.fillStyle = look.muted;
    pen.fillText(`${name} ${note}`, 4, place * lane + lane / 2, nameWide - 10);
  });
  pen.save();
  pen.beginPath();
  pen.rect(nameWide, 0, width - nameWide, height);
  pen.clip();
  const strip = lane < LABELED ? 0 : look.size; // above the bars, for the labels of switches
  drawRequests(pen, requests, tops, at, lane, strip, nowS - spanS);
  const nexts = new Map(); // where the switch begins that follows in a lane
  for (const one of [...switches].sort((a, b) => b.atS - a.atS)) {
    if (!tops.has(one.worker) || one.atS < nowS - spanS) continue;
    const room = (nexts.get(one.worker) ?? width) - at(one.atS);
    drawSwitch(pen, one, tops.get(one.worker), at(one.atS), lane, strip, room, look);
    nexts.set(one.worker, at(one.atS));
  }
  pen.restore();
}

function drawScale(pen, at, nowS, spanS, height, look) {
  for (let tick = 0; tick <= 4; tick++) {
    const ago = (spanS / 4) * tick;
    pen.fillStyle = look.line;
    pen.fillRect(at(nowS - ago), 0, 1, height - 18);
    pen.fillStyle = look.muted;
    pen.textAlign = ago ? "left" : "right";
    pen.fillText(ago ? `−${seconds(ago)}` : "0 s", at(nowS - ago), height - 8);
  }
  pen.textAlign = "left";
}

function drawRequests(pen, requests, tops, at, lane, strip, sinceS) {
  const high = lane - strip - 4;
  const tracks = Math.max(1, Math.min(TRACKS, Math.floor(high / 4)));
  const step = high / tracks;
  const ends = new Map(); // the end of what is in each track of a lane
  for (const { model, replica, arrivedS, startedS, endedS, isAnswered } of requests) {
    if (!tops.has(replica) || endedS < sinceS) continue;
    const used = ends.get(replica) ?? ends.set(replica, []).get(replica);
    let track = 0;
    while (track < tracks - 1 && used[track] > startedS) track++;
    used[track] = endedS;
    const top = tops.get(replica) + strip + track * step;
    pen.fillStyle = colorOf(model);
    pen.globalAlpha = 0.3;
    pen.fillRect(at(arrivedS), top + step / 2 - 0.75, Math.max(0, at(startedS) - at(arrivedS)), 1.5);
    pen.globalAlpha = isAnswered ? 0.95 : 0.4;
    pen.fillRect(at(startedS), top, Math.max(2, at(endedS) - at(startedS)), step - 1);
  }
  pen.globalAlpha = 1;
}

// Draw a mark, and as much of its label as has `room` before the next one, in pixels.
function drawSwitch(pen, { model, nbytes }, top, x, lane, strip, room, look) {
  pen.fillStyle = look.text;
  pen.globalAlpha = 0.35;
  pen.fillRect(x - 0.5, top - 2, 1, lane);
  pen.globalAlpha = 1;
  pen.beginPath();
  pen.moveTo(x - 4, top - 2);
  pen.lineTo(x + 4, top - 2);
  pen.lineTo(x, top + 4);
  pen.fill();
  const labels = strip ? [`${model} ${bytes(nbytes)}`, model].slice(nbytes ? 0 : 1) : [];
  const text = labels.find((label) => pen.measureText(label).width + 12 < room);
  if (text) pen.fillText(text, x + 6, top + strip / 2);
}

// The colors of the models in a picture, as text beside a color.
export function Legend({ names }) {
  return html`<ul class="legend">
    ${names.slice(0, 12).map((name) => html`<li key=${name}><i style=${{ background: colorOf(name) }}></i>${name}</li>`)}
    ${names.length > 12 && html`<li>+ ${names.length - 12} ${texts.cluster.otherModels}</li>`}
  </ul>`;
}
