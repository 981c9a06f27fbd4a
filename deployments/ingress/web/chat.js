// The page Chat: models that write, and models that turn texts into vectors and ranks.

import { asCurl, chatAsPython } from "./as_code.js";
import { ApiError, errorOfEvent, eventsOf, getJson, request, sleep } from "./api.js";
import { asMarkdown, pathOf, showing, siblingsOf, titleOf, useConversations, withChange, withTurn } from "./conversations.js";
import { base64Of, download } from "./image_files.js";
import { Markdown } from "./markdown.js";
import { Area, Field, Slider, clamp, copy, html, icon, open, seconds, tell, useEffect, useKept, useRef, useState, useUrl } from "./parts.js";
import { ModelPicker, firstOf, makes, useModels } from "./models.js";
import { Vectors } from "./vectors.js";
import { texts } from "./texts.js";

const words = texts.chat;
const EMPTY = {
  model: "",
  system: "",
  temperature: null,
  topP: null,
  maxTokens: null,
  seed: null,
  schema: "",
  tools: "",
  draft: "",
};
const MAX_LIVE_CHARS = 20000; // of an answer that is set as Markdown while it comes: each piece sets it anew
const MAX_IMAGES = 8;
const MAX_TRIES = 5; // to read on after a connection broke
const PAUSE_MS = 500; // before the first of them, and twice that before each further one
const PASSING = [429, 502, 503, 504];
const CUT = ["length", "stopped", "broken"];
const writes = (model) => makes("/v1/chat/completions")(model);
const embeds = (model) => ["/v1/embeddings", "/v1/rerank", "/v1/classify"].some((path) => makes(path)(model));

const checked = (value) => {
  const chat = { ...EMPTY };
  for (const name of Object.keys(EMPTY)) if (typeof value?.[name] === typeof EMPTY[name] || Number.isFinite(value?.[name])) chat[name] = value[name];
  return chat;
};

function Page() {
  const models = useModels();
  const [tab, setTab] = useKept("chat-tab", "conversation");
  const names = ["conversation", "vectors"];
  const onKeyDown = (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = names.find((name) => name !== tab);
    setTab(other);
    document.getElementById(`tab-${other}`).focus();
  };
  return html`<h1 class="unseen">Chat</h1>
    <div class="tabs" role="tablist" aria-label=${words.tabs} onKeyDown=${onKeyDown}>
      ${names.map(
        (name) => html`<button id=${`tab-${name}`} role="tab" aria-selected=${tab === name} aria-controls=${`panel-${name}`} tabindex=${tab === name ? 0 : -1} onClick=${() => setTab(name)}>
          ${words[name]}
        </button>`,
      )}
    </div>
    ${names.map(
      (name) => html`<div id=${`panel-${name}`} role="tabpanel" aria-labelledby=${`tab-${name}`} hidden=${tab !== name}>
        ${name === "vectors" ? html`<${Vectors} models=${models?.filter(embeds)} />` : html`<${Chat} models=${models?.filter(writes)} />`}
      </div>`,
    )}`;
}

function Chat({ models }) {
  const [chat, setChat] = useKept("chat", EMPTY, checked);
  const { list, shown, choose, begin, change, remove } = useConversations(() => tell(words.unkept, { isError: true }));
  const [images, setImages] = useState([]);
  const answering = useRef(new Map()).current; // what ends the answer of a conversation, by its key
  const set = (changes) => setChat((old) => ({ ...old, ...changes }));
  useEffect(() => {
    if (models?.length && !models.some((model) => model.id === chat.model)) set({ model: firstOf(models).id });
  }, [models?.length]);
  const model = models?.find((one) => one.id === chat.model);
  const path = pathOf(shown);
  const isOn = answering.has(shown.key);

  // Return the body of a request; null, and say why, where a field of the form cannot be used.
  const bodyFor = async (turns, goesOn = false) => {
    try {
      return await bodyOf(chat, turns, model, goesOn);
    } catch (error) {
      tell(error.message, { isError: true });
      return null;
    }
  };
  // Have a turn written, or written on: the last one of the conversation, which is there already. Without a body, its
  // job writes it, since before a reload.
  const write = async (conversation, turn, body) => {
    const leaving = new AbortController();
    answering.set(conversation.key, leaving);
    const before = body ? { content: turn.content, reasoning: turn.reasoning } : turn.before;
    const answer = { ...turn, before, isOn: true };
    const show = (changes) => {
      Object.assign(answer, changes);
      change(conversation, (one) => withChange(one, answer.id, answer), { isPiece: answer.isOn });
    };
    show({ finish: undefined, error: undefined, firstS: undefined, lastS: undefined, tokens: undefined, ...(body && { job: undefined }) });
    try {
      await readAnswer(body, leaving.signal, answer, show);
    } catch (error) {
      if (leaving.signal.aborted) show({ finish: "stopped" });
      else if (!body && error.isGone) show({ finish: "broken" });
      else if (error instanceof ApiError || !answer.content) show({ error: error.message });
      else show({ finish: "broken" }); // also where the page is left: its connections end first
    }
    answering.delete(conversation.key);
    if (answer.job) request(`v1/jobs/${answer.job}`, { method: "DELETE", quiet: true }).catch(() => {}); // it is kept here
    show({ isOn: false, job: undefined, before: undefined });
  };
  useEffect(() => {
    for (const one of list) for (const turn of one.turns) if (turn.isOn && turn.job && !answering.has(one.key)) write(one, turn, null);
  }, [list.length]);
  // Return whether a conversation is being answered now.
  const answer = async (conversation) => {
    const body = await bodyFor(pathOf(conversation));
    if (!body) return false;
    const begun = withTurn(conversation, { role: "assistant", content: "", model: chat.model, isJson: Boolean(chat.schema.trim()) }, conversation.leaf);
    change(begun, () => begun);
    choose(begun);
    write(begun, begun.turns.at(-1), body);
    return true;
  };
  const say = (turn, parent) => answer(withTurn(shown, turn, parent));
  const send = async () => {
    const text = chat.draft.trim();
    if (isOn || !model || !(text || images.length)) return;
    if (!(await say({ role: "user", content: text, ...(images.length && { images }) }, path.at(-1)?.id))) return;
    set({ draft: "" });
    setImages([]);
  };
  const goOn = async (turn) => {
    const body = await bodyFor(path, true);
    if (body) write(shown, turn, body);
  };
  const act = isOn || !model ? null : {
    edit: (turn, content) => say({ ...turn, content }, turn.parent),
    again: (turn) => answer({ ...shown, leaf: turn.parent }),
    goOn,
    giveResult: (call, content) => say({ role: "tool", tool_call_id: call.id, content }, path.at(-1)?.id),
    turnTo: (turn) => change(shown, (one) => showing(one, turn)),
  };
  // Copy the request that led to the answer shown last.
  const copyAs = async (form) => {
    const asked = await bodyFor(path.slice(0, path.findLastIndex((turn) => turn.role === "assistant")));
    if (!asked) return;
    const { stream, stream_options, ...body } = asked;
    copy(form === "curl" ? asCurl("v1/chat/completions", body) : chatAsPython(body));
  };
  return html`<div class="chat">
    <div class="stack">
      <${Settings} chat=${chat} set=${set} models=${models} />
      <${Conversations} ...${{ list, shown, choose, begin, remove, answering, copyAs }} />
    </div>
    <section class="panel talk" aria-label=${words.conversation}>
      <${Turns} conversation=${shown} path=${path} act=${act} />
      <div class="say">
        <${Composer} ...${{ chat, set, send, isOn, images, setImages, canSend: Boolean(model), sees: model?.sees, stop: () => answering.get(shown.key)?.abort() }} />
      </div>
    </section>
  </div>`;
}

function Conversations({ list, shown, choose, begin, remove, answering, copyAs }) {
  const isAnswered = shown.turns.some((turn) => turn.role === "assistant");
  const ask = (one) => confirm(words.removeSure(titleOf(one))) && (answering.get(one.key)?.abort(), remove(one));
  const save = () => download(new Blob([asMarkdown(shown)], { type: "text/markdown" }), `${titleOf(shown).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.md`);
  return html`<nav class="panel conversations" aria-label=${words.conversations}>
    <div class="row wrap">
      <button class="quiet" onClick=${begin}>${icon("plus")}<span>${words.clear}</span></button>
      <button class="quiet" disabled=${!shown.turns.length} onClick=${save}>${icon("download")}<span>${words.save}</span></button>
      <button class="quiet" disabled=${!isAnswered} onClick=${() => copyAs("curl")}>${icon("copy")}<span>${texts.gallery.asCurl}</span></button>
      <button class="quiet" disabled=${!isAnswered} onClick=${() => copyAs("python")}>${icon("copy")}<span>${texts.gallery.asPython}</span></button>
    </div>
    <ul>
      ${list.map(
        (one) => html`<li key=${one.key} class="row">
          <button class="quiet" aria-current=${one.key === shown.key} onClick=${() => choose(one)}>${titleOf(one)}</button>
          <button class="quiet small" aria-label=${words.remove(titleOf(one))} onClick=${() => ask(one)}>${icon("trash")}</button>
        </li>`,
      )}
    </ul>
    <small>${words.kept}</small>
  </nav>`;
}

function Composer({ chat, set, send, isOn, canSend, stop, sees, images, setImages }) {
  const onKeyDown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  const choose = (event) => {
    setImages([...images, ...event.target.files].slice(0, MAX_IMAGES));
    event.target.value = "";
  };
  return html`${images.length > 0 &&
    html`<div class="row wrap attached">
      ${images.map((file) => html`<button class="quiet" aria-label=${words.removeImage(file.name)} onClick=${() => setImages(images.filter((one) => one !== file))}><${Picture} file=${file} />${icon("close")}</button>`)}
    </div>`}
    <div class="row composer">
      ${sees && html`<label class="pick" title=${words.addImage}>${icon("image")}<input type="file" accept="image/png,image/jpeg,image/webp" aria-label=${words.addImage} multiple onChange=${choose} /></label>`}
      <${Area} rows="1" aria-label=${words.message} title=${words.messageKeys} placeholder=${words.messageHint} value=${chat.draft} onInput=${(draft) => set({ draft })} onKeyDown=${onKeyDown} />
      ${isOn
        ? html`<button onClick=${stop}>${icon("stop")}<span>${words.stop}</span></button>`
        : html`<button class="primary" disabled=${!(chat.draft.trim() || images.length) || !canSend} onClick=${send}>${icon("send")}<span>${words.send}</span></button>`}
    </div>`;
}

function Picture({ file }) {
  const url = useUrl(file);
  return url && html`<img src=${url} alt=${file.name ?? ""} />`;
}

function parsedJson(text, label) {
  if (!text.trim()) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(words.badJson(label, error.message));
  }
}

// Return what a model is sent for an answer to turns, or to go on with the last of them.
async function bodyOf(chat, turns, model, goesOn) {
  const messages = await Promise.all(turns.filter((turn) => !turn.error || turn.content).map(messageOf));
  if (chat.system.trim()) messages.unshift({ role: "system", content: chat.system });
  const body = { model: chat.model, messages };
  if (model.kind === "pipeline") return body;
  const schema = parsedJson(chat.schema, words.schema);
  const tools = parsedJson(chat.tools, words.tools);
  Object.assign(body, { stream: true, stream_options: { include_usage: true } });
  const fields = { temperature: "temperature", topP: "top_p", maxTokens: "max_tokens", seed: "seed" };
  for (const [name, field] of Object.entries(fields)) if (chat[name] !== null) body[field] = chat[name];
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  if (tools) body.tools = tools;
  if (goesOn) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return body;
}

// What was thought before a call goes back with it: templates show that to the model until its answer.
async function messageOf({ role, content, images, tool_calls, tool_call_id, reasoning }) {
  const message = { role, content, tool_calls, tool_call_id, reasoning_content: tool_calls && reasoning };
  if (!images?.length) return message;
  const urls = await Promise.all(images.map(async (file) => `data:${file.type};base64,${await base64Of(file)}`));
  message.content = [...urls.map((url) => ({ type: "image_url", image_url: { url } })), ...(content ? [{ type: "text", text: content }] : [])];
  return message;
}

async function readAnswer(body, signal, answer, show) {
  const beganMs = body && performance.now();
  if (body && !body.stream) {
    const whole = await getJson("v1/chat/completions", { json: body, signal });
    const { content, reasoning_content: reasoning } = whole.choices[0].message;
    show({ content: content ?? "", reasoning, timings: whole.timings_ms });
    return;
  }
  if (body) {
    const job = await begunJob(body, signal);
    if (!job) return readEvents(await request("v1/chat/completions", { json: body, signal }), beganMs, answer, show);
    show({ job });
  }
  for (let tries = 0; ; tries++) {
    show({ ...answer.before, tool_calls: undefined });
    try {
      return await readEvents(await request(`v1/jobs/${answer.job}/stream`, { signal }), beganMs, answer, show);
    } catch (error) {
      if (signal.aborted || tries === MAX_TRIES || (error instanceof ApiError && error.status && !PASSING.includes(error.status))) throw error;
      if (error.code && error.code !== "job_restarted") throw error;
      await sleep(PAUSE_MS * 2 ** tries, signal);
    }
  }
}

// Return the id of a job that makes the answer, so that a reload does not end it; null where there are no jobs now.
async function begunJob(body, signal) {
  try {
    return (await getJson("v1/jobs", { json: { endpoint: "/v1/chat/completions", body }, signal })).id;
  } catch (error) {
    if (error instanceof ApiError && [404, 429, 500, 503].includes(error.status)) return null;
    throw error;
  }
}

async function readEvents(response, beganMs, answer, show) {
  let isDrawn = false; // a token may come every millisecond: they are shown once a frame
  for await (const event of eventsOf(response)) {
    if (event.data === "[DONE]") return;
    const error = errorOfEvent(event);
    if (error) throw error;
    take(event.data, answer, beganMs === null ? undefined : (performance.now() - beganMs) / 1000);
    if (isDrawn) continue;
    isDrawn = true;
    requestAnimationFrame(() => ((isDrawn = false), answer.isOn && show({})));
  }
  throw new Error(texts.errors.broken);
}

function take({ choices, usage, timings_ms }, shown, sinceS) {
  const choice = choices?.[0];
  const delta = choice?.delta ?? {};
  const hasMore = delta.content || delta.reasoning_content || delta.tool_calls;
  if (hasMore) shown.firstS ??= sinceS; // undefined after a reload: nobody has measured it
  if (hasMore) shown.lastS = sinceS;
  shown.content += delta.content ?? "";
  if (delta.reasoning_content) shown.reasoning = (shown.reasoning ?? "") + delta.reasoning_content;
  for (const piece of delta.tool_calls ?? []) addCall(shown, piece);
  if (choice?.finish_reason) shown.finish = choice.finish_reason;
  if (timings_ms) shown.timings = timings_ms;
  if (usage) shown.tokens = usage.completion_tokens;
}

function addCall(shown, { index = 0, id, function: called = {} }) {
  shown.tool_calls ??= [];
  const call = (shown.tool_calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  call.id ||= id ?? "";
  call.function.name += called.name ?? "";
  call.function.arguments += called.arguments ?? "";
}

function Turns({ conversation, path, act }) {
  const end = useRef();
  const isFollowed = useRef(true);
  const onScroll = (event) => {
    const { scrollTop, scrollHeight, clientHeight } = event.target;
    isFollowed.current = scrollHeight - scrollTop - clientHeight < 60;
  };
  useEffect(() => {
    if (isFollowed.current && end.current) end.current.scrollTop = end.current.scrollHeight;
  });
  if (!path.length) return html`<div class="turns empty"><p class="muted">${words.empty}</p></div>`;
  return html`<div class="turns" ref=${end} onScroll=${onScroll} tabindex="0" role="log" aria-label=${words.conversation}>
    ${path.map((turn) => html`<${Turn} key=${turn.id} turn=${turn} siblings=${siblingsOf(conversation, turn)} isLast=${turn.id === path.at(-1).id} act=${act} />`)}
  </div>`;
}

function Turn({ turn, siblings, isLast, act }) {
  const { role, content, isOn, error } = turn;
  const [draft, setDraft] = useState(null); // of a question while it is edited
  const hasBegun = content || turn.tool_calls;
  const isWaiting = isOn && !hasBegun && !turn.reasoning;
  const name = role === "assistant" ? turn.model || words.assistant : role === "tool" ? words.toolResult : words.you;
  const edit = () => (setDraft(null), act.edit(turn, draft.trim()));
  const isCut = role === "assistant" && !isOn && CUT.includes(turn.finish);
  const canGoOn = act && isLast && isCut && content && !turn.tool_calls;
  return html`<article class=${`turn ${role}`}>
    <header>
      <h2>${name}</h2>
      <div class="row">
        ${siblings.length > 1 && html`<${Versions} turn=${turn} siblings=${siblings} act=${act} />`}
        ${role === "user" && act && html`<button class="quiet small" aria-label=${words.edit} onClick=${() => setDraft(content)}>${icon("brush")}</button>`}
        ${role === "assistant" && act && isLast && html`<button class="quiet small" aria-label=${words.regenerate} onClick=${() => act.again(turn)}>${icon("reuse")}</button>`}
        ${content && !isOn && html`<button class="quiet small" aria-label=${words.copy} onClick=${() => copy(content)}>${icon("copy")}</button>`}
      </div>
    </header>
    ${isWaiting && html`<p class="muted">${words.thinking}…</p>`}
    ${turn.reasoning &&
    html`<details class="thought">
      <summary>${isOn && !hasBegun ? `${words.reasoning}…` : words.reasoned}</summary>
      <div class="text muted">${turn.reasoning}</div>
    </details>`}
    ${turn.images && html`<div class="row wrap attached">${turn.images.map((file) => html`<${Picture} file=${file} />`)}</div>`}
    ${draft === null
      ? content && html`<${Said} turn=${turn} />`
      : html`<div class="row composer">
          <${Area} rows="1" aria-label=${words.edit} value=${draft} onInput=${setDraft} />
          <button onClick=${() => setDraft(null)}>${words.cancel}</button>
          <button class="primary" disabled=${!draft.trim() || !act} onClick=${edit}>${words.send}</button>
        </div>`}
    ${turn.tool_calls?.map((call) => html`<${ToolCall} call=${call} onResult=${isLast && act ? act.giveResult : null} />`)}
    ${error && html`<p class="problem" role="alert">${error}</p>`}
    ${isCut &&
    html`<p class="row wrap">
      <span class="problem">${words.cut[turn.finish]}</span>
      ${canGoOn && html`<button onClick=${() => act.goOn(turn)}>${words.goOn}</button>`}
    </p>`}
    ${role === "assistant" && !isOn && html`<small>${aboutOf(turn)}</small>`}
  </article>`;
}

function Said({ turn: { role, content, isJson, isOn } }) {
  if (isJson) return html`<div class="text mono">${pretty(content)}</div>`;
  if (role !== "assistant" || (isOn && content.length > MAX_LIVE_CHARS)) return html`<div class="text">${content}</div>`;
  return html`<${Markdown} text=${content} />`;
}

// Which of the turns that may stand in a place is shown, and the way to the others.
function Versions({ turn, siblings, act }) {
  const place = siblings.findIndex((one) => one.id === turn.id);
  const to = (other, name, label) => html`<button class="quiet small" aria-label=${label} disabled=${!act || !siblings[other]} onClick=${() => act.turnTo(siblings[other])}>${icon(name)}</button>`;
  return html`${to(place - 1, "left", words.earlier)}<small>${words.version(place + 1, siblings.length)}</small>${to(place + 1, "right", words.later)}`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function ToolCall({ call, onResult }) {
  const [result, setResult] = useState("");
  return html`<div class="call">
    <h3>${words.toolCall(call.function.name)}</h3>
    <pre>${pretty(call.function.arguments)}</pre>
    ${onResult &&
    html`<div class="row composer">
      <${Area} rows="1" aria-label=${words.toolResult} placeholder=${words.toolResult} value=${result} onInput=${setResult} />
      <button disabled=${!result.trim()} onClick=${() => onResult(call, result)}>${words.sendResult}</button>
    </div>`}
  </div>`;
}

function aboutOf({ tokens, firstS, lastS, timings, isJson, error }) {
  const parts = [];
  if (tokens) parts.push(words.tokens(tokens));
  if (firstS !== undefined) parts.push(words.first(seconds(firstS)));
  const spentS = timings?.generate ? timings.generate / 1000 : lastS - firstS;
  if (tokens > 1 && spentS > 0) parts.push(words.rate(Number(((tokens - 1) / spentS).toPrecision(3))));
  if (firstS === undefined && timings?.total) parts.push(seconds(timings.total / 1000));
  if (isJson && !error) parts.push(words.followsSchema);
  return parts.join(" · ");
}

function Settings({ chat, set, models }) {
  const model = models?.find((one) => one.id === chat.model);
  const defaults = model?.defaults ?? {};
  const area = (name, label, hint, isMono = true) => html`<${Field} label=${label}>
    ${(id) => html`<${Area} id=${id} class=${isMono ? "mono" : ""} rows="2" spellcheck=${!isMono} placeholder=${hint} value=${chat[name]} onInput=${(value) => set({ [name]: value })} />`}
  <//>`;
  const whole = (name) => (value) => set({ [name]: value === null ? null : Math.round(clamp(value, 0, 2 ** 31)) });
  return html`<div class="panel settings">
    <div class="fields">
      <${ModelPicker} models=${models} value=${chat.model} onChange=${(id) => set({ model: id })} />
      ${model?.kind !== "pipeline" &&
      html`${area("system", words.system, "", false)}
        <details>
          <summary>${words.settings}</summary>
          <div class="fields">
            <${Slider} label=${words.temperature} value=${chat.temperature} own=${defaults.temperature ?? texts.create.auto} min="0" max="2" step="0.05" onInput=${(temperature) => set({ temperature })} />
            <${Slider} label=${words.topP} value=${chat.topP} own=${defaults.top_p ?? texts.create.auto} min="0.05" max="1" step="0.05" onInput=${(topP) => set({ topP })} />
            <${Slider} label=${words.maxTokens} value=${chat.maxTokens} own=${defaults.max_tokens ?? texts.create.auto} min="1" max="4096" step="1" onInput=${whole("maxTokens")} />
            <${Slider} label=${words.seed} value=${chat.seed} own=${texts.create.auto} min="0" max="1000" step="1" onInput=${whole("seed")} />
            ${area("schema", words.schema, words.schemaHint)} ${area("tools", words.tools, words.toolsHint)}
          </div>
        </details>`}
    </div>
  </div>`;
}

open(html`<${Page} />`);
