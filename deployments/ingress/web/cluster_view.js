// The parts of a picture of the cluster, live or of a recording: tiles, the time line, places, models, decisions.

import { request } from "./api.js";
import { Bar, Canvas, Legend, SPAN_S, colorOf, drawTimeLine, laneHeight } from "./drawing.js";
import { nearness } from "./models.js";
import { bytes, html, percent, seconds, tell, useId, useMemo, useState } from "./parts.js";
import { texts } from "./texts.js";

const words = texts.cluster;
const MAX_ROWS = 50;
export const MAX_WORKERS = 64;

// Give an order and say that it was taken, or why not.
async function order(method, path, what) {
  try {
    await request(`admin/${path}`, method === "POST" ? { method, json: path.endsWith("prefetch") ? { tier: "host" } : undefined } : { method });
    tell(words.done(what));
  } catch (error) {
    tell(error.message, { isError: true });
  }
}

const path = (...parts) => parts.map(encodeURIComponent).join("/");

export function Order({ text, off, isOn, isPressed = isOn, name, on, className = "small" }) {
  const [isSent, setSent] = useState(false);
  const onClick = async () => {
    setSent(true);
    await order(isOn ? "DELETE" : "POST", on, words.order(isOn ? off : text, name));
    setSent(false);
  };
  const shown = isOn ? off : text;
  return html`<button class=${className} disabled=${isSent} aria-pressed=${isPressed} aria-label=${words.order(shown, name)} onClick=${onClick}>${shown}</button>`;
}

export const sum = (values) => values.reduce((total, value) => total + value, 0);

export function Tiles({ picture, spanS = SPAN_S }) {
  const loads = Object.values(picture.loads);
  const caches = Object.values(picture.encoders).map((encoder) => encoder.cache).filter(Boolean);
  const hits = sum(caches.map((cache) => cache.local + cache.joined));
  const asked = hits + sum(caches.map((cache) => cache.computed));
  const recent = switchesOf(picture).filter((one) => one.atS > picture.totals.at_s - spanS);
  const tiles = [
    [words.rate, sum(loads.map((load) => load.rate_short)).toFixed(1)],
    [words.running, sum(loads.map((load) => load.running))],
    [words.waiting, sum(loads.map((load) => load.waiting))],
    [words.refused, sum(loads.map((load) => load.refused))],
    [words.switches, ((60 * recent.length) / spanS).toFixed(spanS === SPAN_S ? 0 : 1)],
    [words.hitRate, asked ? percent(hits / asked) : words.none],
  ].filter(([name]) => picture.totals.policy !== undefined || ![words.refused, words.hitRate].includes(name));
  return html`<dl class="tiles">${tiles.map(([name, value]) => html`<div class="panel"><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

// Return the switches that are known, newest first: those that were ordered, with their reason, and the others.
function switchesOf(picture) {
  const reports = Object.entries(picture.switches).map(([key, one]) => ({ ...one, key }));
  const taken = new Set();
  const ordered = Object.entries(picture.decisions).map(([key, one]) => {
    const fits = (report) => !taken.has(report.key) && report.replica === one.worker && report.model === one.model;
    const report = reports.find((each) => fits(each) && Math.abs(each.at_s - one.at_s - (one.took_s ?? 0)) < 5);
    if (report) taken.add(report.key);
    const reason = ["done", "taken", "draining", "given"].includes(one.state) ? one.reason : `${one.reason} (${one.state})`;
    return { key, atS: one.at_s, what: one.action, worker: one.worker, model: one.model, reason, tookS: one.took_s, ...partsOf(report) };
  });
  const others = reports.filter((report) => !taken.has(report.key)).map((report) => ({
    key: report.key,
    atS: report.at_s,
    what: "switch",
    worker: report.replica,
    model: report.model,
    reason: report.reason ?? words.onDemand,
    tookS: report.switch_ms / 1000,
    ...partsOf(report),
  }));
  return [...ordered, ...others].sort((one, other) => other.atS - one.atS);
}

const partsOf = (report) => (report ? { nbytes: report.attached_bytes, keptParts: report.reused } : { nbytes: null, keptParts: [] });

// The label of a part: its heading, after that of the run that it is `within`, where there are several.
const labels = (...ids) => ids.filter(Boolean).join(" ");

export function TimeLine({ picture, aheadS, spanS = SPAN_S, about = words.timeLineAbout, within }) {
  const id = useId("time-line");
  const names = Object.keys(picture.workers).slice(0, MAX_WORKERS);
  const lanes = names.map((name) => {
    const running = sum(Object.values(picture.workers[name].running ?? {}));
    return { name, note: running ? `· ${running}` : "" };
  });
  const requests = Object.values(picture.requests).map(([model, , replica, , arrivedS, startedS, endedS, isAnswered]) => ({
    model,
    replica,
    arrivedS,
    startedS,
    endedS,
    isAnswered,
  }));
  const nowS = picture.totals.at_s + aheadS;
  const recent = requests.filter((one) => one.endedS > nowS - spanS && names.includes(one.replica));
  const models = [...new Set(recent.map((one) => one.model))].sort();
  const data = { lanes, requests: recent, switches: switchesOf(picture), nowS, spanS };
  const draw = (pen, width, height, look) => drawTimeLine(pen, width, height, look, data);
  return html`<section class="panel part" aria-labelledby=${labels(within, id)}>
    <div class="section-head"><h2 id=${id}>${words.timeLine}</h2><small>${about}</small></div>
    <${Canvas} className="time-line" height=${lanes.length * laneHeight(lanes.length) + 24} draw=${draw} drawn=${`${nowS} ${spanS}`} label=${words.timeLineLabel} />
    <${Legend} names=${models} />
  </section>`;
}

// Nodes with what their memory holds, and below each the workers with what they have built.
export function Places({ picture, workers, about = "", within }) {
  const heading = useId("places");
  const nodes = Object.entries(picture.nodes);
  const of = (id) => workers.filter(([, worker]) => (worker.node || nodes[0]?.[0]) === id);
  const lost = workers.filter(([, worker]) => worker.unreachable);
  const encoders = Object.entries(picture.encoders).filter(([, encoder]) => !encoder.unreachable);
  const held = [...workers, ...encoders].map(([, one]) => Math.max(sum((one.modules ?? []).map((module) => module[2])), one.charged_bytes ?? 0));
  const scale = 1.05 * Math.max(1, ...held); // of workers, so that they can be compared; a node's bar ends with its budget
  return html`<section class="panel part" aria-labelledby=${labels(within, heading)}>
    <div class="section-head"><h2 id=${heading}>${words.nodes}</h2><small>${about}</small></div>
    ${nodes.map(([id, node]) => html`<div class="node" key=${id}>
      <${Node} id=${id} node=${node} />
      ${of(id).slice(0, MAX_WORKERS).map(([name, worker]) => !worker.unreachable && html`<${Worker} key=${name} name=${name} worker=${worker} scale=${scale} overrides=${picture.totals.overrides} />`)}
    </div>`)}
    ${encoders.map(([name, encoder]) => html`<${Worker} key=${name} name=${name} worker=${encoder} scale=${scale} isEncoder />`)}
    ${lost.map(([name, worker]) => html`<p class="problem" key=${name}>${words.unreachable(worker.unreachable)}</p>`)}
  </section>`;
}

function Node({ id, node }) {
  return useMemo(() => {
    if (node.unreachable) return html`<h3>${words.node(id.slice(0, 8))}</h3><p class="problem">${words.unreachable(node.unreachable)}</p>`;
    if (node.resident_bytes === undefined) return html`<h3>${words.node(id)}</h3>`; // of a recording
    const { resident_bytes: resident, budget_bytes: budget, pinned_bytes: pinned, leased_bytes: leased } = node;
    const used = Math.min(resident, Math.max(leased, pinned));
    const parts = [
      { nbytes: Math.min(pinned, used), color: "#a07a1e", label: words.pinned },
      { nbytes: used - Math.min(pinned, used), color: "#5870d8", label: words.leased },
      { nbytes: resident - used, color: "#5870d8", label: words.free, isFaint: true },
    ].filter((part) => part.nbytes > 0);
    const text = words.ofBudget(bytes(resident), bytes(budget));
    const scale = Math.max(1, budget, resident);
    return html`<div class="holder">
      <h3>${words.node(id.slice(0, 8))}</h3>
      <${Bar} parts=${parts} scale=${scale} budget=${budget} label=${`${words.memory}: ${text}; ${parts.map((part) => `${part.label} ${bytes(part.nbytes)}`).join(", ")}`} drawn=${`${resident} ${leased} ${pinned} ${scale}`} />
      <small>${words.memory}: ${text}</small>
    </div>`;
  }, [id, node]);
}

function Worker({ name, worker, scale, overrides, isEncoder = false }) {
  const frozen = Boolean(overrides?.frozen.includes(name));
  const draining = Boolean(overrides?.draining.includes(name));
  return useMemo(() => {
    const parts = modulesOf(worker.modules);
    const used = sum(parts.map((part) => part.nbytes));
    const own = worker.charged_bytes ?? used; // less than all of it: the rest are views of the node's memory, which counts it
    const budget = own >= used ? worker.budget_bytes : Infinity; // a bound of this bar only if all of it counts
    if (own > used) parts.push({ nbytes: own - used, color: "#8a8f98", label: words.caches, isFaint: true, says: `${words.caches} ${bytes(own - used)}` });
    const running = Object.entries(worker.running).map(([model, count]) => `${count} ${model}`).join(", ");
    const says = [
      words.ofBudget(bytes(own), bytes(worker.budget_bytes)),
      used > own ? words.shownOfNode(bytes(used - own)) : "",
      running,
      worker.used ? words.busy(percent(worker.used)) : "",
      worker.switching_to ? words.switchingTo(worker.switching_to) : "",
      frozen ? words.frozen : "",
      draining ? words.draining : "",
    ].filter(Boolean);
    return html`<div class="holder worker">
      <h3>${isEncoder ? words.encoder(name) : words.worker(name)}</h3>
      <${Bar} parts=${parts} scale=${scale} budget=${budget} label=${parts.map((part) => part.says).join("; ")} drawn=${`${parts.map((part) => `${part.says}${part.isFaint}`)}${scale}`} />
      <small title=${says.join(" · ")}>${says.join(" · ")}</small>
      ${!isEncoder && overrides && html`<div class="row orders">
        <${Order} text=${words.freeze} off=${words.thaw} isOn=${frozen} name=${name} on=${path("workers", name, "freeze")} />
        <${Order} text=${words.drain} off=${words.undrain} isOn=${draining} name=${name} on=${path("workers", name, "drain")} />
      </div>`}
    </div>`;
  }, [name, worker, scale, frozen, draining, Boolean(overrides)]);
}

// Parts of a bar, the largest first. What models share is there once, hatched.
function modulesOf(modules) {
  return [...modules]
    .sort((one, other) => other[2] - one[2])
    .map(([component, models, nbytes, isLeased]) => {
      const owner = models.length === 1 ? models[0] : [...models].sort().join("+");
      const shared = models.length > 1 ? words.shared(models.length) : models[0];
      const says = `${component} (${shared}) ${bytes(nbytes)}`;
      return { nbytes, color: colorOf(owner), label: component, isShared: models.length > 1, isFaint: !isLeased, says };
    });
}

export function Models({ picture, canOrder = true, within }) {
  const id = useId("models");
  const [filter, setFilter] = useState("");
  const loads = new Map();
  for (const load of Object.values(picture.loads)) if (load.pool !== "pipelines") loads.set(load.model, load);
  const rank = ([name, model]) => -((loads.get(name)?.waiting ?? 0) * 1e6 + (loads.get(name)?.started ?? 0) + (model.tier === "resident" ? 0.5 : 0));
  const all = Object.entries(picture.models).filter(([name]) => name.toLowerCase().includes(filter.toLowerCase()));
  const rows = all.sort((one, other) => rank(one) - rank(other) || (one[0] < other[0] ? -1 : 1)).slice(0, MAX_ROWS);
  return html`<section class="panel part" aria-labelledby=${labels(within, id)}>
    <div class="section-head">
      <h2 id=${id}>${words.models}</h2><span class="space"></span>
      <input class="filter" type="search" aria-label=${words.filter} placeholder=${words.filter} value=${filter} onInput=${(event) => setFilter(event.target.value)} />
    </div>
    <div class="scroll" tabindex="0" role="group" aria-label=${words.table}>
      <table class="table">
        <thead><tr>
          <th scope="col">${words.model}</th><th scope="col">${words.state}</th>
          ${[words.size, words.requests, words.runningShort, words.latency, words.started, canOrder && words.refusedShort].filter(Boolean).map((name) => html`<th scope="col" class="number">${name}</th>`)}
          ${canOrder && html`<th scope="col">${words.actions}</th>`}
        </tr></thead>
        <tbody>${rows.map(([name, model]) => html`<${ModelRow} key=${name} name=${name} model=${model} load=${loads.get(name)} canOrder=${canOrder} />`)}</tbody>
      </table>
    </div>
    ${rows.length < picture.totals.num_models && html`<small>${words.shownOf(rows.length, picture.totals.num_models)}</small>`}
  </section>`;
}

function ModelRow({ name, model, load, canOrder }) {
  return useMemo(() => {
    const { tone, text, later } = nearness(model);
    const numbers = [
      bytes(model.bytes || NaN),
      load?.waiting || "",
      load?.running || "",
      load?.latency_s ? seconds(load.latency_s) : "",
      load?.started || "",
      ...(canOrder ? [load?.refused || ""] : []),
    ];
    return html`<tr>
      <th scope="row">${name}${model.error && html`<small class="problem">${model.error}</small>`}</th>
      <td><span class=${`near ${tone}`}>${text}</span>${later && html`<small>${later}</small>`}</td>
      ${numbers.map((value) => html`<td class="number">${value}</td>`)}
      ${canOrder && html`<td><div class="row">
        <${Order} text=${words.prefetch} off=${words.prefetch} isOn=${false} isPressed=${undefined} name=${name} on=${path("models", name, "prefetch")} />
        <${Order} text=${words.pin} off=${words.unpin} isOn=${model.pinned} name=${name} on=${path("models", name, "pin")} />
      </div></td>`}
    </tr>`;
  }, [name, model, load]);
}

export function Decisions({ picture, aheadS, within }) {
  const id = useId("decisions");
  const rows = switchesOf(picture).slice(0, 30);
  const nowS = picture.totals.at_s + aheadS;
  return html`<section class="panel part" aria-labelledby=${labels(within, id)}>
    <div class="section-head"><h2 id=${id}>${words.decisions}</h2></div>
    ${(picture.totals.notes ?? []).slice(0, 5).map((note) => html`<p class="muted" key=${note}>${note}</p>`)}
    ${rows.length === 0 && html`<p class="muted">${words.noDecisions}</p>`}
    <ol class="decisions">${rows.map((one) => html`<li key=${one.key}>
      <div class="row wrap">
        <i style=${{ background: colorOf(one.model) }}></i>
        <strong>${one.what} ${one.worker} → ${one.model}</strong>
        <small>${[one.tookS !== null && seconds(one.tookS), one.nbytes !== null && bytes(one.nbytes), nowS - one.atS < 1 ? words.now : words.ago(seconds(Math.round(nowS - one.atS)))].filter(Boolean).join(" · ")}</small>
      </div>
      <small>${[one.reason, one.keptParts.length && words.keptParts(one.keptParts.join(", "))].filter(Boolean).join("; ")}</small>
    </li>`)}</ol>
  </section>`;
}

// Who waits and who was refused, by tenant and model. The queue tells the pairs with most of it.
export function Tenants({ shares }) {
  const id = useId("tenants");
  const rank = (one) => one.waiting * 1e9 + one.refused * 1e3 + Math.min(999, one.started);
  const rows = Object.entries(shares ?? {}).sort(([, one], [, other]) => rank(other) - rank(one)).slice(0, MAX_ROWS);
  const names = [words.requests, words.oldest, words.waited, words.started, words.refusedShort];
  return html`<section class="panel part" aria-labelledby=${id}>
    <div class="section-head"><h2 id=${id}>${words.tenants}</h2></div>
    ${rows.length
      ? html`<div class="scroll" tabindex="0" role="group" aria-label=${words.tenantsTable}><table class="table">
          <thead><tr><th scope="col">${words.tenant}</th><th scope="col">${words.model}</th>${names.map((name) => html`<th scope="col" class="number">${name}</th>`)}</tr></thead>
          <tbody>${rows.map(([key, one]) => html`<${TenantRow} key=${key} load=${one} />`)}</tbody>
        </table></div>`
      : html`<p class="muted">${words.nobodyAsked}</p>`}
  </section>`;
}

function TenantRow({ load }) {
  return useMemo(() => {
    const mean = load.started ? seconds(load.waited_s / load.started) : "";
    const numbers = [load.waiting || "", load.waiting ? seconds(load.oldest_age_s) : "", mean, load.started || "", load.refused || ""];
    return html`<tr><th scope="row">${load.tenant}</th><td>${load.model}</td>${numbers.map((value) => html`<td class="number">${value}</td>`)}</tr>`;
  }, [load]);
}
