// Requests of these pages as commands and programs that make the same again.

import { keys } from "./api.js";
import { bodyOf } from "./form.js";

const IMAGE = "BASE64 OF THE IMAGE"; // a browser keeps those that an image was made from no longer than its form

// Return the body that makes an image again, whole; null for one that a network enlarged.
export async function imageRequest(parameters) {
  if (parameters.source) return null;
  const { stream, progress, partial_images, ...body } = await bodyOf(parameters, {}, false);
  const { strength, control, ipAdapter } = parameters;
  if (strength !== undefined) Object.assign(body, { init_image: IMAGE, strength });
  if (control) body.control = [{ ...control, image: IMAGE }];
  if (ipAdapter) body.ip_adapter = [{ ...ipAdapter, image: IMAGE }];
  return body;
}

const address = (path) => new URL(`../${path}`, import.meta.url).href;
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

// Return a command of a shell. The key is not in it, its variable is.
export function asCurl(path, body, rest = "") {
  const key = keys.get() ? ` \\\n  -H "Authorization: Bearer $ATELIER_API_KEY"` : "";
  return `curl -s ${quoted(address(path))} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(JSON.stringify(body, null, 2))}${rest}`;
}

export const imageAsCurl = (body) => asCurl("v1/images/generations", body, " |\n  python3 -c 'import base64, json, sys; sys.stdout.buffer.write(base64.b64decode(json.load(sys.stdin)[\"data\"][0][\"b64_json\"]))' > image.png");

const client = () => [
  "import os",
  "",
  "import openai",
  "",
  `client = openai.OpenAI(base_url=${literal(address("v1"))}, api_key=os.environ.get("ATELIER_API_KEY", "none"))`,
];

export function imageAsPython({ model, prompt, ...extra }) {
  const call = called("client.images.generate", { model, prompt, extra_body: extra });
  return ["import base64", ...client(), `answer = ${call}`, 'with open("image.png", "wb") as file:', "    file.write(base64.b64decode(answer.data[0].b64_json))", ""].join("\n");
}

export const chatAsPython = (body) => [...client(), `answer = ${called("client.chat.completions.create", body)}`, "print(answer.choices[0].message.content)", ""].join("\n");

const called = (name, options) => `${name}(\n${Object.entries(options).filter(([, value]) => value !== undefined).map(([key, value]) => `    ${key}=${literal(value, 1)},\n`).join("")})`;

// Return a value of JSON as Python writes it.
function literal(value, depth = 0) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const pairs = Array.isArray(value) ? value.map((one) => literal(one, depth + 1)) : Object.entries(value).filter(([, one]) => one !== undefined).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, depth + 1)}`);
  const [opening, closing] = Array.isArray(value) ? "[]" : "{}";
  if (!pairs.length) return opening + closing;
  const space = "    ".repeat(depth + 1);
  return `${opening}\n${pairs.map((one) => `${space}${one},\n`).join("")}${"    ".repeat(depth)}${closing}`;
}
