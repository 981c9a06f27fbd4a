// The dialog that registers a model or a LoRA with the cluster, for admin keys.

import { getJson } from "./api.js";
import { Choices, Dialog, Field, html, tell, useState } from "./parts.js";
import { texts } from "./texts.js";

const words = texts.addModel;

export function AddModel({ models }) {
  const [isOpen, setOpen] = useState(false);
  return html`<button onClick=${() => setOpen(true)}>${words.button}</button>
    ${isOpen && html`<${Form} models=${models} onClose=${() => setOpen(false)} />`}`;
}

function Form({ models, onClose }) {
  const [kind, setKind] = useState("model");
  const [id, setId] = useState("");
  const [path, setPath] = useState("");
  const [base, setBase] = useState("");
  const [problem, setProblem] = useState("");
  const [isSending, setSending] = useState(false);
  const isAdapter = kind === "adapter";
  const isWhole = id.trim() && path.trim() && (!isAdapter || base.trim());
  const send = async (event) => {
    event.preventDefault();
    setSending(true);
    const json = { id: id.trim(), path: path.trim() };
    if (isAdapter) json.base = base.split(",").map((one) => one.trim()).filter(Boolean);
    try {
      await getJson("admin/models?wait=false", { json });
      tell(words.begun(json.id));
      onClose();
    } catch (error) {
      setProblem(error.message);
      setSending(false);
    }
  };
  return html`<${Dialog} title=${words.button} className="narrow" onClose=${onClose}>
    <form class="fields" onSubmit=${send}>
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      <${Choices} label=${words.kind} value=${kind} onChange=${setKind} choices=${Object.entries(words.kinds)} />
      <${Field} label=${words.id} hint=${words.idHint}>${(field) => html`<input id=${field} autocomplete="off" spellcheck=${false} value=${id} onInput=${(e) => setId(e.target.value)} />`}<//>
      <${Field} label=${words.path} hint=${words.pathHint}>${(field) => html`<input id=${field} autocomplete="off" spellcheck=${false} value=${path} onInput=${(e) => setPath(e.target.value)} />`}<//>
      ${isAdapter && html`<${Field} label=${words.base} hint=${words.baseHint}>${(field) => html`<input id=${field} list="known-models" autocomplete="off" value=${base} onInput=${(e) => setBase(e.target.value)} />`}<//>`}
      <datalist id="known-models">${models.map((one) => html`<option key=${one} value=${one} />`)}</datalist>
      <div class="row end"><button class="primary" disabled=${!isWhole || isSending}>${words.add}</button></div>
    </form>
  <//>`;
}
