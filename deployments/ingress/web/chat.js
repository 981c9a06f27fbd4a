// The page Chat: models that write, and models that turn texts into vectors and ranks.

import { ApiError, errorOfEvent, eventsOf, isAbort, request } from "./api.js";
import { Area, Field, Slider, clamp, html, icon, open, seconds, tell, useEffect, useKept, useRef, useState } from "./parts.js";
import { ModelPicker, makes, useModels } from "./models.js";
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
  turns: [],
};
const MAX_KEPT_TURNS = 200;
const writes = (model) => makes("/v1/chat/completions")(model);
const embeds = (model) => ["/v1/embeddings", "/v1/rerank", "/v1/classify"].some((path) => makes(path)(model));

const checked = (value) => {
  const chat = { ...EMPTY };
  for (const name of Object.keys(EMPTY)) if (typeof value?.[name] === typeof EMPTY[name] || Number.isFinite(value?.[name])) chat[name] = value[name];
  chat.turns = (Array.isArray(chat.turns) ? chat.turns : []).filter((turn) => typeof turn?.role === "string").slice(-MAX_KEPT_TURNS);
  for (const turn of chat.turns) delete turn.isOn;
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
        (name) => html`<button id=${`tab-${name}`} role="tab" aria-selected=${tab === name} aria-controls="tab-panel" tabindex=${tab === name ? 0 : -1} onClick=${() => setTab(name)}>
          ${words[name]}
        </button>`,
      )}
    </div>
    <div id="tab-panel" role="tabpanel" aria-labelledby=${`tab-${tab}`}>
      ${tab === "vectors" ? html`<${Vectors} models=${models?.filter(embeds)} />` : html`<${Chat} models=${models?.filter(writes)} />`}
    </div>`;
}

function Chat({ models }) {
  const [chat, setChat] = useKept("chat", EMPTY, checked);
  const leaving = useRef(null);
  const [isOn, setOn] = useState(false);
  const set = (change) => setChat((old) => ({ ...old, ...change }));
  useEffect(() => {
    if (models?.length && !models.some((model) => model.id === chat.model)) set({ model: models[0].id });
  }, [models?.length]);
  useEffect(() => () => leaving.current?.abort(), []);
  const model = models?.find((one) => one.id === chat.model);

  const answer = async (turns) => {
    let body;
    try {
      body = bodyOf(chat, turns, model);
    } catch (error) {
      return tell(error.message, { isError: true });
    }
    leaving.current = new AbortController();
    setOn(true);
    const shown = { role: "assistant", content: "", model: chat.model, isJson: Boolean(chat.schema.trim()), isOn: true };
    const show = (change) => {
      Object.assign(shown, change);
      setChat((old) => ({ ...old, turns: [...turns, { ...shown }] }));
    };
    show({});
    setChat((old) => ({ ...old, draft: "" }));
    await readAnswer(body, leaving.current.signal, shown, show);
    show({ isOn: false });
    setOn(false);
  };
  const send = () => {
    const text = chat.draft.trim();
    if (!text || isOn || !model) return;
    answer([...chat.turns, { role: "user", content: text }]);
  };
  const again = () => answer(chat.turns.slice(0, chat.turns.findLastIndex((turn) => turn.role === "user" || turn.role === "tool") + 1));
  const giveResult = (call, content) => answer([...chat.turns, { role: "tool", tool_call_id: call.id, content }]);
  return html`<div class="chat">
    <${Settings} chat=${chat} set=${set} models=${models} />
    <section class="panel talk" aria-label=${words.conversation}>
      <${Turns} turns=${chat.turns} onResult=${isOn ? null : giveResult} />
      <div class="say">
        ${chat.turns.length > 0 &&
        html`<div class="row wrap">
          <button class="quiet" disabled=${isOn || !model} onClick=${again}>${icon("reuse")}<span>${words.regenerate}</span></button>
          <button class="quiet" disabled=${isOn} onClick=${() => set({ turns: [] })}>${icon("trash")}<span>${words.clear}</span></button>
        </div>`}
        <${Composer} ...${{ chat, set, send, isOn, canSend: Boolean(model), stop: () => leaving.current?.abort() }} />
      </div>
    </section>
  </div>`;
}

function Composer({ chat, set, send, isOn, canSend, stop }) {
  const onKeyDown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  return html`<div class="row composer">
    <${Area} rows="1" aria-label=${words.message} title=${words.messageKeys} placeholder=${words.messageHint} value=${chat.draft} onInput=${(draft) => set({ draft })} onKeyDown=${onKeyDown} />
    ${isOn
      ? html`<button onClick=${stop}>${icon("stop")}<span>${words.stop}</span></button>`
      : html`<button class="primary" disabled=${!chat.draft.trim() || !canSend} onClick=${send}>${icon("send")}<span>${words.send}</span></button>`}
  </div>`;
}

function parsedJson(text, label) {
  if (!text.trim()) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(words.badJson(label, error.message));
  }
}

function bodyOf(chat, turns, model) {
  // What was thought before a call goes back with it: templates show that to the model until its answer.
  const saidOf = ({ role, content, tool_calls, tool_call_id, reasoning }) => ({ role, content, tool_calls, tool_call_id, reasoning_content: tool_calls && reasoning });
  const said = turns.filter((turn) => !turn.error).map(saidOf);
  const messages = chat.system.trim() ? [{ role: "system", content: chat.system }, ...said] : said;
  const body = { model: chat.model, messages };
  if (model.kind === "pipeline") return body;
  const schema = parsedJson(chat.schema, words.schema);
  const tools = parsedJson(chat.tools, words.tools);
  Object.assign(body, { stream: true, stream_options: { include_usage: true } });
  const fields = { temperature: "temperature", topP: "top_p", maxTokens: "max_tokens", seed: "seed" };
  for (const [name, field] of Object.entries(fields)) if (chat[name] !== null) body[field] = chat[name];
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  if (tools) body.tools = tools;
  return body;
}

async function readAnswer(body, signal, shown, show) {
  const beganMs = performance.now();
  try {
    const response = await request("v1/chat/completions", { json: body, signal });
    if (!body.stream) {
      const whole = await response.json();
      const { content, reasoning_content: reasoning } = whole.choices[0].message;
      show({ content: content ?? "", reasoning, timings: whole.timings_ms });
      return;
    }
    let drawn = false; // a token may come every millisecond: they are shown once a frame
    for await (const event of eventsOf(response)) {
      if (event.data === "[DONE]") return;
      const error = errorOfEvent(event);
      if (error) throw error;
      take(event.data, shown, (performance.now() - beganMs) / 1000);
      if (drawn) continue;
      drawn = true;
      requestAnimationFrame(() => ((drawn = false), show({})));
    }
    throw new ApiError(texts.errors.broken);
  } catch (error) {
    if (isAbort(error) || signal.aborted) show({ finish: "stopped" });
    else show({ error: error.message });
  }
}

function take({ choices, usage, timings_ms }, shown, sinceS) {
  const choice = choices?.[0];
  const delta = choice?.delta ?? {};
  const hasMore = delta.content || delta.reasoning_content || delta.tool_calls;
  if (hasMore && shown.firstS === undefined) shown.firstS = sinceS;
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

function Turns({ turns, onResult }) {
  const end = useRef();
  const isFollowed = useRef(true);
  const onScroll = (event) => {
    const { scrollTop, scrollHeight, clientHeight } = event.target;
    isFollowed.current = scrollHeight - scrollTop - clientHeight < 60;
  };
  useEffect(() => {
    if (isFollowed.current && end.current) end.current.scrollTop = end.current.scrollHeight;
  });
  if (!turns.length) return html`<div class="turns empty"><p class="muted">${words.empty}</p></div>`;
  return html`<div class="turns" ref=${end} onScroll=${onScroll} tabindex="0" role="log" aria-label=${words.conversation}>
    ${turns.map((turn, place) => html`<${Turn} key=${place} turn=${turn} onResult=${place === turns.length - 1 ? onResult : null} />`)}
  </div>`;
}

function Turn({ turn, onResult }) {
  const { role, content, isOn, error } = turn;
  const hasBegun = content || turn.tool_calls;
  const isWaiting = isOn && !hasBegun && !turn.reasoning;
  const copy = () => navigator.clipboard?.writeText(content).then(() => tell(words.copied), () => {});
  const name = role === "assistant" ? turn.model || words.assistant : role === "tool" ? words.toolResult : words.you;
  return html`<article class=${`turn ${role}`}>
    <header>
      <h2>${name}</h2>
      ${content && !isOn && html`<button class="quiet small" aria-label=${words.copy} onClick=${copy}>${icon("copy")}</button>`}
    </header>
    ${isWaiting && html`<p class="muted">${words.thinking}…</p>`}
    ${turn.reasoning &&
    html`<details class="thought">
      <summary>${isOn && !hasBegun ? `${words.reasoning}…` : words.reasoned}</summary>
      <div class="text muted">${turn.reasoning}</div>
    </details>`}
    ${content && html`<div class=${turn.isJson ? "text mono" : "text"}>${turn.isJson ? pretty(content) : content}</div>`}
    ${turn.tool_calls?.map((call) => html`<${ToolCall} call=${call} onResult=${onResult} />`)}
    ${error && html`<p class="problem" role="alert">${error}</p>`}
    ${role === "assistant" && !isOn && html`<small>${aboutOf(turn)}</small>`}
  </article>`;
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

function aboutOf({ tokens, firstS, lastS, finish, timings, isJson, error }) {
  const parts = [];
  if (tokens) parts.push(words.tokens(tokens));
  if (firstS !== undefined) parts.push(words.first(seconds(firstS)));
  const spentS = timings?.generate ? timings.generate / 1000 : lastS - firstS;
  if (tokens > 1 && spentS > 0) parts.push(words.rate(((tokens - 1) / spentS).toPrecision(3)));
  if (firstS === undefined && timings?.total) parts.push(seconds(timings.total / 1000));
  if (isJson && !error) parts.push(words.followsSchema);
  if (finish === "length") parts.push(words.lengthReached);
  if (finish === "stopped") parts.push(words.stopped);
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
