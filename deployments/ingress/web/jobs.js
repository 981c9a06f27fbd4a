// The page Jobs: what this key has asked for in the background, the newest first, with results.

import { getJson, isAbort, request, sleep } from "./api.js";
import { Choices, Dialog, bytes, html, open, percent, seconds, tell, useEffect, useState, useUrl } from "./parts.js";
import { blobOf, download } from "./image_files.js";
import { texts } from "./texts.js";

const words = texts.jobs;
const PAGE = 20;
const LOOK_MS = 2000; // between two looks while a job has not ended
const IDLE_MS = 15000;
const MAX_SHOWN_BYTES = 32 * 2 ** 20; // of a result that is shown; a larger one is saved
const MAX_SHOWN_CHARS = 20000;
const BATCHES = "/v1/batches";

const hasEnded = (job) => ["done", "failed", "cancelled"].includes(job.status);

function Page() {
  const [jobs, setJobs] = useState(null);
  const [hasMore, setHasMore] = useState(false);
  const [status, setStatus] = useState("");
  const [count, setCount] = useState(PAGE);
  const [shown, setShown] = useState(null);
  const [turn, setTurn] = useState(0); // each one looks again at once
  useEffect(() => {
    const leaving = new AbortController();
    look(status, count, leaving.signal, (found) => (setJobs(found.data), setHasMore(found.has_more)));
    return () => leaving.abort();
  }, [status, count, turn]);
  const act = async (path, method) => {
    try {
      await request(path, { method });
    } catch (error) {
      tell(error.message, { isError: true });
    }
    setTurn((old) => old + 1);
  };
  const choose = (value) => (setStatus(value), setCount(PAGE));
  return html`<h1>${words.title}</h1>
    <div class="row wrap">
      <${Choices} label=${words.status} value=${status} onChange=${choose} choices=${[["", words.all], ...Object.entries(words.statuses)]} />
    </div>
    <section class="panel part" aria-busy=${jobs === null}>
      ${jobs?.length === 0 && html`<p class="muted">${status ? words.noneSo : words.none}</p>`}
      ${jobs?.length > 0 && html`<${Table} jobs=${jobs} onShow=${setShown} onCancel=${(job) => act(`v1/jobs/${job.id}/cancel`, "POST")} onDelete=${(job) => act(`v1/jobs/${job.id}`, "DELETE")} />`}
      ${hasMore && html`<button onClick=${() => setCount(Math.min(100, count + PAGE))} disabled=${count >= 100}>${words.more}</button>`}
    </section>
    ${shown && html`<${Result} job=${shown} onClose=${() => setShown(null)} />`}`;
}

// Look at the jobs again and again, more often while one has not ended, until the page wants something else.
async function look(status, count, signal, show) {
  while (!signal.aborted) {
    let pause = IDLE_MS;
    try {
      const found = await getJson(`v1/jobs?limit=${count}${status && `&status=${status}`}`, { signal });
      if (signal.aborted) return;
      show(found);
      if (found.data.some((job) => !hasEnded(job))) pause = LOOK_MS;
    } catch (error) {
      if (isAbort(error) || signal.aborted) return;
      tell(error.message, { isError: true });
    }
    await sleep(pause, signal);
  }
}

function Table({ jobs, onShow, onCancel, onDelete }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${words.table}>
    <table class="table">
      <thead><tr>
        ${[words.what, words.model, words.status, words.began].map((name) => html`<th scope="col">${name}</th>`)}
        <th scope="col" class="number">${words.took}</th>
        <th scope="col"><span class="unseen">${words.actions}</span></th>
      </tr></thead>
      <tbody>${jobs.map((job) => html`<${Row} key=${job.id} job=${job} onShow=${onShow} onCancel=${onCancel} onDelete=${onDelete} />`)}</tbody>
    </table>
  </div>`;
}

function Row({ job, onShow, onCancel, onDelete }) {
  const took = job.started_at !== null && job.ended_at !== null ? seconds(job.ended_at - job.started_at) : "";
  const name = `${words.kinds[job.endpoint] ?? job.endpoint} ${job.id}`;
  const hasResult = job.endpoint === BATCHES ? hasEnded(job) : job.result !== null;
  return html`<tr>
    <th scope="row">${words.kinds[job.endpoint] ?? job.endpoint}<br /><small class="mono">${job.id}</small></th>
    <td>${job.model}</td>
    <td>${words.statuses[job.status]}${job.status === "running" && job.progress !== null ? ` ${percent(job.progress / 100)}` : ""}
      ${job.error && html`<br /><small class="problem">${job.error.message}</small>`}</td>
    <td>${new Date(job.created_at * 1000).toLocaleString()}</td>
    <td class="number">${took}</td>
    <td><div class="row end">
      ${hasResult && html`<button class="small" aria-label=${`${words.result}: ${name}`} onClick=${() => onShow(job)}>${words.result}</button>`}
      ${!hasEnded(job) && html`<button class="small" aria-label=${`${words.cancel}: ${name}`} onClick=${() => onCancel(job)}>${words.cancel}</button>`}
      ${hasEnded(job) && html`<button class="small" aria-label=${`${words.remove}: ${name}`} onClick=${() => onDelete(job)}>${words.remove}</button>`}
    </div></td>
  </tr>`;
}

function Result({ job, onClose }) {
  const [found, setFound] = useState(null);
  useEffect(() => {
    const leaving = new AbortController();
    resultOf(job, leaving.signal).then(setFound, (error) => isAbort(error) || setFound({ error }));
    return () => leaving.abort();
  }, [job.id]);
  return html`<${Dialog} title=${`${words.result}: ${words.kinds[job.endpoint] ?? job.endpoint}`} onClose=${onClose}>
    ${!found && html`<p class="muted">${words.loading}</p>`}
    ${found?.error && html`<p class="problem" role="alert">${found.error.message}</p>`}
    <div class="row wrap values">${found?.images?.map((blob, place) => html`<${Picture} key=${place} blob=${blob} name=${`${job.id}-${place + 1}.png`} />`)}</div>
    ${found?.text && html`<p class="text">${found.text}</p>`}
    ${found?.files?.map(([name, blob]) => html`<p key=${name}><button onClick=${() => download(blob, name)}>${texts.gallery.download} ${name}, ${bytes(blob.size)}</button></p>`)}
  <//>`;
}

function Picture({ blob, name }) {
  const url = useUrl(blob);
  return html`<figure>
    <img src=${url} alt=${name} />
    <button class="quiet small" onClick=${() => download(blob, name)}>${texts.gallery.download} ${bytes(blob.size)}</button>
  </figure>`;
}

// Return what there is to show of a job: images, a text, and files to save.
async function resultOf(job, signal) {
  if (job.endpoint === BATCHES) return batchOf(job, signal);
  const response = await request(`v1/jobs/${job.id}/result`, { signal }); // of a failed one: its error, which is shown
  const type = response.headers.get("content-type") ?? "";
  const blob = await response.blob();
  const files = [[`${job.id}.${suffixOf(type)}`, blob]];
  if (!/json|^text\//.test(type) || blob.size > MAX_SHOWN_BYTES) return { files };
  const text = await blob.text();
  try {
    return { ...partsOf(JSON.parse(text)), files };
  } catch {
    return { text: text.slice(0, MAX_SHOWN_CHARS), files };
  }
}

async function batchOf(job, signal) {
  const batch = await getJson(`v1/batches/${job.id}`, { signal });
  const { total, completed, failed } = batch.request_counts;
  const files = [];
  for (const [name, id] of [["output", batch.output_file_id], ["errors", batch.error_file_id]]) {
    if (id) files.push([`${job.id}-${name}.jsonl`, await (await request(`v1/files/${id}/content`, { signal })).blob()]);
  }
  const problems = batch.errors?.data.map((one) => `${one.line ? `${words.line(one.line)}: ` : ""}${one.message}`) ?? [];
  return { text: [words.counts(total, completed, failed), ...problems].join("\n"), files };
}

function partsOf(answer) {
  const images = answer.data?.filter((one) => one.b64_json).map((one) => blobOf(one.b64_json));
  if (images?.length) return { images };
  const said = answer.choices?.map((choice) => choice.message?.content ?? choice.text ?? "").join("\n\n");
  const output = answer.output?.flatMap((item) => item.content?.map((part) => part.text ?? "") ?? []).join("\n\n");
  return { text: (said || output || JSON.stringify(answer, null, 2)).slice(0, MAX_SHOWN_CHARS) };
}

const suffixOf = (type) => /json/.test(type) ? "json" : /event-stream|plain/.test(type) ? "txt" : type.split(/[/;]/)[1] ?? "bin";

open(html`<${Page} />`);
