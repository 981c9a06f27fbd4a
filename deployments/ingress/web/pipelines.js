// The page Pipelines: the graph of a pipeline, a form of its inputs, and its stages while it runs.

import { ApiError, errorOfEvent, eventsOf, getJson, isAbort, request } from "./api.js";
import { Area, Field, bytes, html, open, seconds, tell, useEffect, useKept, useRef, useState, useUrl } from "./parts.js";
import { Graph } from "./graph.js";
import { base64Of, blobOf, download } from "./image_files.js";
import { texts } from "./texts.js";

const words = texts.pipelines;
const IDLE = { stages: {}, outputs: null, error: null, totalS: null, isOn: false };

function Page() {
  const [pipelines, setPipelines] = useState(null);
  const [chosen, setChosen] = useKept("pipeline", "");
  useEffect(() => {
    getJson("v1/pipelines").then(
      (found) => setPipelines(found.pipelines),
      (error) => (setPipelines([]), tell(error.message, { isError: true })),
    );
  }, []);
  if (!pipelines) return html`<h1>Pipelines</h1>`;
  if (!pipelines.length) return html`<h1>Pipelines</h1><p class="muted">${words.none}</p>`;
  const pipeline = pipelines.find((one) => one.id === chosen) ?? pipelines[0];
  return html`<h1 class="unseen">Pipelines</h1>
    <div class="tabs" role="group" aria-label=${words.choose}>
      ${pipelines.map((one) => html`<button key=${one.id} aria-pressed=${one === pipeline} onClick=${() => setChosen(one.id)}>${one.id}</button>`)}
    </div>
    <${Pipeline} key=${pipeline.id} pipeline=${pipeline} />`;
}

function Pipeline({ pipeline }) {
  const [values, setValues] = useKept(`pipeline-${pipeline.id}`, {});
  const [files, setFiles] = useState({});
  const [run, setRun] = useState(IDLE);
  const leaving = useRef(null);
  useEffect(() => () => leaving.current?.abort(), []);
  const isMissing = pipeline.inputs.some((input) => !input.optional && (input.type === "image" ? !files[input.name] : !String(values[input.name] ?? "").trim()));
  const onSubmit = async (event) => {
    event.preventDefault();
    leaving.current = new AbortController();
    let shown = { ...IDLE, isOn: true };
    const show = (change) => setRun((shown = { ...shown, ...change }));
    show({});
    try {
      const inputs = await inputsOf(pipeline, values, files);
      await readRun(pipeline, inputs, leaving.current.signal, (change) => show(change(shown)));
    } catch (error) {
      if (!isAbort(error) && !leaving.current.signal.aborted) show({ error });
    }
    show({ isOn: false });
  };
  const setValue = (name, value) => setValues((old) => ({ ...old, [name]: value }));
  return html`<section class="panel part over">
      <div class="scroll" tabindex="0" role="region" aria-label=${words.graph(pipeline.id)}><${Graph} pipeline=${pipeline} run=${run} /></div>
    </section>
    <div class="create pipeline">
    <form class="panel settings fields" onSubmit=${onSubmit}>
      ${pipeline.description && html`<p class="muted">${pipeline.description}</p>`}
      ${pipeline.problem && html`<p class="problem">${pipeline.problem}</p>`}
      ${pipeline.inputs.map((input) => html`<${Input} key=${input.name} input=${input} value=${values[input.name]} onValue=${(value) => setValue(input.name, value)} onFile=${(file) => setFiles({ ...files, [input.name]: file })} />`)}
      <div class="row">
        <button class="primary wide" disabled=${isMissing || run.isOn || Boolean(pipeline.problem)}>${words.run}</button>
        ${run.isOn && html`<button type="button" onClick=${() => leaving.current.abort()}>${words.cancel}</button>`}
      </div>
    </form>
    <div class="stack">
      <${Outputs} pipeline=${pipeline} run=${run} />
      <${Stages} pipeline=${pipeline} run=${run} />
    </div>
  </div>`;
}

function Input({ input, value, onValue, onFile }) {
  const label = input.optional ? `${input.name} (${words.optional})` : input.name;
  if (input.type === "image") {
    return html`<${Field} label=${label}>${(id) => html`<input id=${id} class="file" type="file" accept="image/png,image/jpeg,image/webp" onChange=${(e) => onFile(e.target.files[0])} />`}<//>`;
  }
  if (input.type === "int" || input.type === "float") {
    return html`<${Field} label=${label}>${(id) => html`<input id=${id} type="number" step=${input.type === "int" ? 1 : "any"} value=${value ?? ""} onInput=${(e) => onValue(e.target.value)} />`}<//>`;
  }
  const hint = input.type === "text" ? "" : `${words.tensor} (${input.type})`;
  return html`<${Field} label=${label} hint=${hint}>${(id) => html`<${Area} id=${id} rows="2" value=${value ?? ""} onInput=${onValue} />`}<//>`;
}

async function inputsOf(pipeline, values, files) {
  const found = {};
  for (const { name, type } of pipeline.inputs) {
    const value = String(values[name] ?? "");
    if (type === "image" && files[name]) found[name] = await base64Of(files[name]);
    else if (type === "text" && value.trim()) found[name] = value;
    else if ((type === "int" || type === "float") && value !== "") found[name] = Number(value);
    else if (!["image", "text", "int", "float"].includes(type) && value.trim()) found[name] = parsed(value, name);
  }
  return found;
}

function parsed(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new ApiError(texts.chat.badJson(name, error.message));
  }
}

async function readRun(pipeline, inputs, signal, change) {
  const response = await request(`v1/pipelines/${encodeURIComponent(pipeline.id)}/runs`, { json: { inputs }, signal });
  for await (const event of eventsOf(response)) {
    const error = errorOfEvent(event);
    if (error) throw error;
    const { data } = event;
    if (data.type === "pipeline.stage") {
      const told = { state: data.state, tookS: data.ms === null ? null : data.ms / 1000 };
      change((shown) => ({ stages: { ...shown.stages, [data.stage]: told } }));
    } else if (data.type === "pipeline.completed") {
      change(() => ({ outputs: data.outputs, totalS: data.timings_ms.total / 1000, warnings: data.warnings }));
      return;
    }
  }
  throw new ApiError(texts.errors.broken);
}

function Outputs({ pipeline, run }) {
  return html`<section class="panel part outputs" aria-label=${words.outputs} aria-live="polite" aria-busy=${run.isOn}>
    <div class="section-head"><h2>${words.outputs}</h2><small>${run.totalS !== null && words.total(seconds(run.totalS))}</small></div>
    ${run.error && html`<p class="problem" role="alert">${run.error.message}</p>`}
    ${run.warnings?.map((warning) => html`<p class="muted">${warning}</p>`)}
    <div class="row wrap values">${Object.keys(pipeline.outputs).map((name) => html`<div key=${name}>
      <h3>${name}</h3>
      ${run.outputs ? html`<${Value} name=${name} value=${run.outputs[name]} />` : html`<p class="muted">–</p>`}
    </div>`)}</div>
  </section>`;
}

function Value({ name, value }) {
  const blob = useRef();
  if (value?.b64_json && !blob.current) blob.current = blobOf(value.b64_json);
  const url = useUrl(blob.current);
  if (blob.current) {
    return html`<figure>
      <img src=${url} alt=${name} class="pixels" />
      <button class="quiet small" onClick=${() => download(blob.current, `${name}.png`)}>${texts.gallery.download} ${bytes(blob.current.size)}</button>
    </figure>`;
  }
  return html`<p class="text">${typeof value === "string" ? value : JSON.stringify(value)}</p>`;
}

function Stages({ pipeline, run }) {
  return html`<section class="panel part" aria-labelledby="stages">
    <div class="section-head"><h2 id="stages">${words.stages}</h2></div>
    <div class="scroll" tabindex="0" role="region" aria-label=${words.table}>
      <table class="table">
        <thead><tr>
          ${[words.stage, words.runs, words.needs, words.state].map((name) => html`<th scope="col">${name}</th>`)}
          <th scope="col" class="number">${words.time}</th>
        </tr></thead>
        <tbody>${pipeline.stages.map((stage) => {
          const { state = run.error ? "notRun" : "idle", tookS = null } = run.stages[stage.name] ?? {};
          return html`<tr key=${stage.name}>
            <th scope="row">${stage.name}</th>
            <td>${stage.kind} <span class="mono">${stage.target}</span></td>
            <td>${stage.needs.join(", ")}</td>
            <td>${words[state === "running" && run.error ? "failed" : state]}</td>
            <td class="number">${tookS !== null && seconds(tookS)}</td>
          </tr>`;
        })}</tbody>
      </table>
    </div>
  </section>`;
}

open(html`<${Page} />`);
