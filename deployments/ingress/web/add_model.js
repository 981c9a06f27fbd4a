// The dialog that registers a model or a LoRA with the cluster, for admin keys: by its path or address, or from a file.

import { getJson, isAbort } from "./api.js";
import { Choices, Dialog, Field, bytes, html, tell, useEffect, useRef, useState } from "./parts.js";
import { texts } from "./texts.js";
import { forget, upload } from "./uploads.js";

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
  const [file, setFile] = useState(null);
  const [base, setBase] = useState("");
  const [problem, setProblem] = useState("");
  const [isSending, setSending] = useState(false);
  const [sent, setSent] = useState(null); // bytes of the file
  const leaving = useRef(new AbortController()).current;
  useEffect(() => () => leaving.abort(), []);
  const isAdapter = kind === "adapter";
  const isWhole = id.trim() && (file || path.trim()) && (!isAdapter || base.trim());
  const send = async (event) => {
    event.preventDefault();
    setSending(true);
    setProblem("");
    try {
      const json = { id: id.trim(), path: file ? await upload(file, leaving.signal, setSent) : path.trim() };
      if (isAdapter) json.base = base.split(",").map((one) => one.trim()).filter(Boolean);
      await getJson("admin/models?wait=false", { json });
      if (file) forget(file);
      tell(words.begun(json.id));
      onClose();
    } catch (error) {
      if (isAbort(error)) return tell(words.left(file.name));
      setProblem(error.message);
      setSending(false);
    }
  };
  return html`<${Dialog} title=${words.button} className="narrow" onClose=${onClose}>
    <form class="fields" onSubmit=${send}>
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      <${Choices} label=${words.kind} value=${kind} onChange=${setKind} choices=${Object.entries(words.kinds)} />
      <${Field} label=${words.id} hint=${words.idHint}>${(field) => html`<input id=${field} autocomplete="off" spellcheck=${false} value=${id} onInput=${(e) => setId(e.target.value)} />`}<//>
      <${Field} label=${words.path} hint=${words.pathHint}>${(field) => html`<input id=${field} autocomplete="off" spellcheck=${false} disabled=${Boolean(file)} value=${path} onInput=${(e) => setPath(e.target.value)} />`}<//>
      <${Field} label=${words.file} hint=${words.fileHint}>${(field) => html`<input id=${field} class="file" type="file" accept=".safetensors,.gguf" disabled=${isSending} onChange=${(e) => setFile(e.target.files[0] ?? null)} />`}<//>
      ${isAdapter && html`<${Field} label=${words.base} hint=${words.baseHint}>${(field) => html`<input id=${field} list="known-models" autocomplete="off" value=${base} onInput=${(e) => setBase(e.target.value)} />`}<//>`}
      <datalist id="known-models">${models.map((one) => html`<option key=${one} value=${one} />`)}</datalist>
      ${isSending && file && sent !== null && html`<${Sent} count=${sent} all=${file.size} />`}
      <div class="row end"><button class="primary" disabled=${!isWhole || isSending}>${words.add}</button></div>
    </form>
  <//>`;
}

function Sent({ count, all }) {
  return html`<div>
    <div class="bar" role="progressbar" aria-label=${words.sending} aria-valuemin="0" aria-valuemax=${all} aria-valuenow=${count}><i style=${{ width: `${(100 * count) / all}%` }}></i></div>
    <small>${words.sent(bytes(count), bytes(all))}</small>
  </div>`;
}
