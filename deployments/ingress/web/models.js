// The models that can be asked, how near they are, and the field that chooses one.

import { getJson, isAbort, keys } from "./api.js";
import { bytes, html, seconds, tell, useEffect, useId, useRef, useState } from "./parts.js";
import { texts } from "./texts.js";

const EVERY_MS = 4000;
const BEHIND = ["unavailable", "does_not_fit", "registering", "updating"];

// Return all models, asked again now and then while the page is seen. null until they are known.
export function useModels() {
  const [models, setModels] = useState(null);
  useEffect(() => {
    const leaving = new AbortController();
    let timer;
    const ask = async (isFirst) => {
      clearTimeout(timer);
      if (!document.hidden || isFirst) {
        try {
          const found = await getJson("v1/models?all=true&nearness=true", { signal: leaving.signal, quiet: !isFirst });
          setModels(found.data);
        } catch (error) {
          if (isAbort(error)) return;
          if (isFirst) tell(error.message, { isError: true });
        }
      }
      timer = setTimeout(ask, EVERY_MS);
    };
    ask(true);
    const stop = keys.onChange(() => ask(false));
    return () => (leaving.abort(), clearTimeout(timer), stop());
  }, []);
  return models;
}

// Return the schedulers that a model takes, its own first; none while they are not known.
export function useSchedulers(model) {
  const [known, setKnown] = useState({});
  const { id, kind } = model ?? {};
  useEffect(() => {
    if (kind !== "diffusion" || known[id]) return;
    const take = ({ data }) => setKnown((old) => ({ ...old, [id]: data }));
    getJson(`v1/models/${encodeURIComponent(id)}/schedulers`, { quiet: true }).then(take, () => {});
  }, [id, kind]);
  return known[id] ?? [];
}

export const makes = (endpoint) => (model) => model.endpoints.includes(endpoint);

// Return the model to begin with: one that can be asked now, if there is one.
export const firstOf = (models) => models.find((model) => !BEHIND.includes(model.state)) ?? models[0];

// Return where a model is, its color, and when it can start if that is later.
export function nearness(model) {
  if (BEHIND.includes(model.state)) return { tone: "away", text: texts.tiers[model.state], later: "" };
  const tone = model.tier ?? "unknown";
  const isLater = tone !== "resident" && model.ready_in_s > 0;
  return { tone, text: texts.tiers[tone], later: isLater ? texts.tiers.readyIn(seconds(model.ready_in_s)) : "" };
}

export function Nearness({ model }) {
  const { tone, text, later } = nearness(model);
  return html`<span class=${`near ${tone}`}>${later ? `${text}, ${later}` : text}</span>`;
}

const fits = (model, words) => {
  const text = `${model.id} ${model.description}`.toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
};

// A combobox (ARIA Authoring Practices): the list opens with the field, arrows choose, Enter takes.
export function ModelPicker({ models, value, onChange, label = texts.model.label }) {
  const [search, setSearch] = useState(null); // null while the list is closed
  const [active, setActive] = useState(0);
  const id = useId("model");
  const list = useRef();
  const chosen = models?.find((model) => model.id === value);
  const found = (models ?? []).filter((model) => fits(model, search ?? "")).slice(0, 200);
  const isOpen = search !== null;
  const open = () => {
    setSearch("");
    setActive(Math.max(0, (models ?? []).findIndex((model) => model.id === value)));
  };
  const take = (model) => {
    setSearch(null);
    if (model) onChange(model.id);
  };
  useEffect(() => {
    list.current?.children[active]?.scrollIntoView?.({ block: "nearest" });
  }, [active, isOpen]);
  const onKeyDown = (event) => {
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8 };
    if (event.key in moves) {
      event.preventDefault();
      if (!isOpen) return open();
      setActive(Math.min(found.length - 1, Math.max(0, active + moves[event.key])));
    } else if (event.key === "Enter" && isOpen) {
      event.preventDefault();
      take(found[active]);
    } else if (event.key === "Escape" && isOpen) {
      event.preventDefault();
      setSearch(null);
    }
  };
  const onInput = (event) => {
    setSearch(event.target.value);
    setActive(0);
  };
  return html`<div class="field picker">
    <label for=${id}>${label}</label>
    <div class="picker-box">
      <input
        id=${id}
        role="combobox"
        aria-expanded=${isOpen}
        aria-controls=${`${id}-list`}
        aria-activedescendant=${isOpen && found[active] ? `${id}-${active}` : undefined}
        autocomplete="off"
        spellcheck=${false}
        placeholder=${isOpen ? texts.model.search : models ? texts.model.choose : texts.model.loading}
        value=${isOpen ? search : (value ?? "")}
        onFocus=${open}
        onClick=${() => !isOpen && open()}
        onBlur=${() => setSearch(null)}
        onInput=${onInput}
        onKeyDown=${onKeyDown}
      />
      ${!isOpen && chosen && html`<${Nearness} model=${chosen} />`}
      ${isOpen &&
      html`<ul id=${`${id}-list`} ref=${list} role="listbox" aria-label=${label}>
        ${found.map(
          (model, place) => html`<li
            key=${model.id}
            id=${`${id}-${place}`}
            role="option"
            aria-selected=${place === active}
            class=${model.id === value ? "chosen" : ""}
            onMouseDown=${(event) => (event.preventDefault(), take(model))}
            onMouseMove=${() => setActive(place)}
          >
            <span class="name">${model.id}</span><${Nearness} model=${model} />
            <small>${[model.description, bytes(model.bytes || NaN)].filter(Boolean).join(" · ")}</small>
            ${model.error && html`<small class="problem">${model.error}</small>`}
          </li>`,
        )}
        ${models && !found.length && html`<li class="none">${models.length ? texts.model.none : texts.model.noneAtAll}</li>`}
      </ul>`}
    </div>
  </div>`;
}
