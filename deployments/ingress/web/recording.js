// Runs of a cluster that are over: a trace as `atelier trace` writes it, read with bounds, and the picture of a moment.
// A run is {title, endS, models, workers, requests, switches, spans, leftOut}, its lists in the order of their times.

import { texts } from "./texts.js";

const words = texts.recording;
const MAX_BYTES = 32 * 2 ** 20;
const MOST = { model: 2000, worker: 256, request: 100000 };
const MAX_TEXT = 200; // characters of a name
const MAX_KEYS = 200; // components of a model
const MAX_S = 1e9;
const LEAST_S = 1e-3;

// Read a trace file. Throws an Error whose message is a sentence for people.
export async function runOfFile(file) {
  if (file.size > MAX_BYTES) throw new Error(words.tooLarge(file.name, MAX_BYTES / 2 ** 20));
  return runOfTrace(await file.text(), file.name);
}

export function runOfTrace(text, title) {
  const found = { model: [], worker: [], request: [] };
  let [numLines, leftOut] = [0, []];
  for (const line of linesOf(text)) {
    numLines += 1;
    if (!line.trim()) continue;
    const record = recordOf(line);
    if (!record) leftOut.push(numLines);
    else if (record.kind in found) found[record.kind].push(record);
    if (leftOut.length > 100 && !found.request.length) break; // it is something else
    if (record && found[record.kind]?.length > MOST[record.kind]) throw new Error(words.tooMany(title, MOST[record.kind], record.kind));
  }
  if (!found.request.length) throw new Error(words.notATrace(title));
  return finished(title, found, leftOut);
}

function* linesOf(text) {
  for (let start = 0, end; start < text.length; start = end + 1) {
    end = text.indexOf("\n", start);
    if (end < 0) end = text.length;
    yield text.slice(start, end);
  }
}

const isName = (value) => typeof value === "string" && value.length > 0 && value.length <= MAX_TEXT;
const isTime = (value) => Number.isFinite(value) && value >= 0 && value <= MAX_S;
const isCount = (value) => Number.isFinite(value) && value >= 0 && value <= 1e15;
const isLacking = (value) => value === null || value === undefined;

// Return the record of a line, null where it is none.
function recordOf(line) {
  let one;
  try {
    one = JSON.parse(line);
  } catch {
    return null;
  }
  const isGood = {
    model: () => isName(one.id) && isComponents(one.components),
    worker: () => isName(one.id) && isName(one.node) && isCount(one.budget_bytes),
    request: () =>
      isName(one.model) && isTime(one.at_s) && [one.started_s, one.ended_s, one.switch_s].every((at) => isLacking(at) || isTime(at)) && (isLacking(one.worker) || isName(one.worker)),
  }[one?.kind];
  if (isGood) return isGood() ? one : null;
  return typeof one?.kind === "string" && isTime(one.at_s) ? one : null; // a fault, which has no picture
}

function isComponents(sizes) {
  if (typeof sizes !== "object" || sizes === null || Array.isArray(sizes)) return false;
  const entries = Object.entries(sizes);
  return entries.length <= MAX_KEYS && entries.every(([key, size]) => isName(key) && isCount(size));
}

function finished(title, found, leftOut) {
  const models = new Map(found.model.map((one) => [one.id, one.components]));
  const workers = found.worker.map((one) => ({ id: one.id, node: one.node, budget: one.budget_bytes }));
  const requests = found.request.map((one) => requestOf(one)).sort((one, other) => one.arrivedS - other.arrivedS);
  for (const { model } of requests) if (!models.has(model)) models.set(model, {});
  if (!requests.some((one) => one.worker)) laidByModel(requests, workers, models);
  const switches = switchesOf(found.request);
  const endS = Math.max(LEAST_S, requests.reduce((last, one) => Math.max(last, one.endedS), 0));
  return { title, endS, models, workers, requests, switches, spans: spansOf(requests, workers, models, endS), leftOut };
}

function requestOf(one) {
  const startedS = Math.max(one.at_s, one.started_s ?? one.at_s);
  const endedS = Math.max(startedS, one.ended_s ?? startedS);
  return { model: one.model, worker: one.worker ?? "", arrivedS: one.at_s, startedS, endedS, isAnswered: !isLacking(one.ended_s) };
}

// A trace that does not say where its requests ran has a lane for each model.
function laidByModel(requests, workers, models) {
  workers.splice(0, workers.length, ...[...models.keys()].map((id) => ({ id, node: words.byModel, budget: 0 })));
  for (const one of requests) one.worker = one.model;
}

// What a switch brought is not in a trace.
function switchesOf(records) {
  return records
    .filter((one) => one.worker && one.switch_s > LEAST_S)
    .map((one) => {
      const atS = one.started_s ?? one.at_s;
      return { atS, worker: one.worker, model: one.model, tookS: one.switch_s, nbytes: null, reason: words.waited };
    })
    .sort((one, other) => one.atS - other.atS);
}

const bytesOf = (sizes) => Object.values(sizes ?? {}).reduce((sum, size) => sum + size, 0);

// When a worker held which model, reckoned: a model stays until others, asked for later, need the room.
function spansOf(requests, workers, models, endS) {
  const spans = [];
  const held = new Map(workers.map(({ id, budget }) => [id, { budget, open: new Map() }]));
  for (const { worker, model, startedS } of [...requests].sort((one, other) => one.startedS - other.startedS)) {
    const place = held.get(worker);
    if (!place) continue;
    const span = place.open.get(model) ?? { worker, model, startS: startedS, endS };
    if (!place.open.delete(model)) spans.push(span);
    place.open.set(model, span); // the latest one is the last
    while (place.open.size > 1 && heldBytes([...place.open.keys()], models) > place.budget) {
      const [[oldest, gone]] = place.open;
      gone.endS = startedS;
      place.open.delete(oldest);
    }
  }
  return spans;
}

const heldBytes = (names, models) => bytesOf(Object.assign({}, ...names.map((name) => models.get(name))));

// The picture of a run at a moment, as the live page has it; `spanS` is how far back requests are told.
export function pictureAt(run, atS, spanS) {
  const running = new Map(run.workers.map(({ id }) => [id, {}]));
  const loads = new Map();
  const shown = {};
  run.requests.forEach((one, number) => {
    if (one.arrivedS > atS) return;
    const load = loads.get(one.model) ?? loads.set(one.model, { model: one.model, pool: "worker", waiting: 0, running: 0, started: 0, took: 0, ended: 0, recent: 0 }).get(one.model);
    const hasStarted = one.startedS <= atS && one.worker !== "";
    const hasEnded = one.endedS <= atS;
    load.recent += one.arrivedS > atS - spanS;
    load.started += hasStarted;
    if (hasEnded && one.isAnswered) (load.ended += 1), (load.took += one.endedS - one.startedS);
    if (!hasStarted) load.waiting += 1;
    else if (!hasEnded) {
      load.running += 1;
      const of = running.get(one.worker);
      if (of) of[one.model] = (of[one.model] ?? 0) + 1;
    }
    if (hasStarted && one.endedS > atS - spanS) shown[number] = [one.model, "worker", one.worker, "", one.arrivedS, one.startedS, Math.min(one.endedS, atS), one.isAnswered];
  });
  const held = new Map(run.workers.map(({ id }) => [id, []]));
  for (const { worker, model, startS, endS } of run.spans) if (startS <= atS && atS < endS + LEAST_S) held.get(worker)?.push(model);
  const workers = run.workers.map((worker) => [worker.id, workerAt(run, worker, held.get(worker.id), running.get(worker.id), atS)]);
  const resident = new Set([...held.values()].flat());
  return {
    totals: { cluster: run.title, at_s: atS, num_models: run.models.size, num_nodes: 0 },
    nodes: Object.fromEntries(run.workers.map(({ node }) => [node, {}])),
    workers: Object.fromEntries(workers),
    encoders: {},
    models: Object.fromEntries([...run.models].map(([name, sizes]) => [name, { state: "ready", tier: resident.has(name) ? "resident" : "apart", bytes: bytesOf(sizes) }])),
    loads: Object.fromEntries([...loads].map(([name, load]) => [name, { ...load, rate_short: load.recent / Math.min(spanS, Math.max(1, atS)), latency_s: load.ended ? load.took / load.ended : 0, refused: 0 }])),
    tenants: {},
    decisions: {},
    switches: Object.fromEntries(run.switches.flatMap((one, number) => (one.atS <= atS && one.atS > atS - Math.max(spanS, 60) ? [[number, reportOf(one)]] : []))),
    requests: shown,
  };
}

const reportOf = ({ atS, worker, model, tookS, nbytes, reason }) => ({ at_s: atS, replica: worker, model, switch_ms: tookS * 1000, attached_bytes: nbytes, reused: [], reason });

function workerAt(run, { id, node, budget }, names, running, atS) {
  const parts = new Map();
  for (const name of names) {
    for (const [key, size] of Object.entries(run.models.get(name) ?? {})) {
      const part = parts.get(key) ?? parts.set(key, [key, [], size, false]).get(key);
      part[1].push(name);
      part[3] ||= name in running;
    }
  }
  const modules = [...parts.values()].map(([key, models, size, isUsed]) => [/^[0-9a-f]{16,}$/.test(key) ? models[0] : key, models, size, isUsed]);
  const loading = run.switches.find((one) => one.worker === id && one.atS <= atS && atS < one.atS + one.tookS);
  return { node, budget_bytes: budget, modules, running, used: 0, switching_to: loading?.model ?? null };
}

// A run of the simulator, as `recording_of` in Python writes it: what workers held is known.
export function runOfSimulation({ title, end_s: endS, models, workers, requests, switches, spans }) {
  return {
    title,
    endS: Math.max(endS, LEAST_S),
    isExact: true,
    models: new Map(Object.entries(models)),
    workers: workers.map(([id, node, budget]) => ({ id, node, budget })),
    requests: requests.map(([model, worker, arrivedS, startedS, endedS]) => ({
      model,
      worker,
      arrivedS,
      startedS: startedS ?? endS,
      endedS: endedS ?? endS,
      isAnswered: endedS !== null,
    })),
    switches: switches.map(([worker, model, atS, doneS, nbytes]) => ({ atS, worker, model, tookS: doneS - atS, nbytes, reason: words.decided(title) })),
    spans: spans.map(([worker, model, startS, spanEndS]) => ({ worker, model, startS, endS: spanEndS })),
  };
}
