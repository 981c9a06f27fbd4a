// Observations of the cluster by OpenAI's client for JavaScript and by Vercel's AI SDK: node openai_node.cjs HTTP_URL GRPC_ADDRESS FOLDER,
// with NODE_PATH where the clients are. It writes what observing.py writes, and judges nothing.
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const { createOpenAI } = require("@ai-sdk/openai");
const { generateText, streamText } = require("ai");
const { OpenAI, toFile } = require("openai");

const [url, , folder] = process.argv.slice(2);
const asked = JSON.parse(fs.readFileSync(path.join(folder, "asked.json"), "utf8"));
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const sdk = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }); // its default: /v1/responses, answers by their ids
const messages = [{ role: "user", content: asked.sum }];
const chat = { model: "adder", messages, temperature: 0 };
const image = { model: "digits-flux", ...asked.image };
const long = { ...image, num_inference_steps: 200 };

const add = {
  name: "add",
  parameters: {
    type: "object",
    properties: { a: { type: "integer", minimum: 0, maximum: 99 }, b: { type: "integer", minimum: 0, maximum: 99 } },
    required: ["a", "b"],
    additionalProperties: false,
  },
};
const tools = {
  ...chat,
  model: "adder-tools",
  max_tokens: 100,
  tools: [{ type: "function", function: add }],
  tool_choice: { type: "function", function: { name: "add" } },
};
const schema = {
  type: "object",
  properties: { total: { type: "integer", minimum: 0, maximum: 198 } },
  required: ["total"],
  additionalProperties: false,
};

async function admission(method = "GET", body = undefined) {
  const headers = { "content-type": "application/json" };
  const answer = await fetch(`${url}/admin/admission`, { method, headers, body: body && JSON.stringify(body) });
  if (!answer.ok) throw new Error(`/admin/admission answered ${answer.status}`);
  return await answer.json();
}

const sum = (models, name) => models.reduce((total, model) => total + model[name], 0);

async function read(stream, atEach = async () => null) {
  const events = [];
  for await (const event of stream) events.push({ ...event, seen: await atEach(event) });
  return events;
}

// The answers to all of the bodies, by their names.
async function each(bodies, send) {
  const answers = {};
  for (const [name, body] of Object.entries(bodies)) answers[name] = await send(body);
  return answers;
}

async function refusal(call) {
  try {
    return { answered: await call() };
  } catch (error) {
    const { status, code, param, message } = error;
    return { type: error.constructor.name, status, code, param, message, retry_after: error.headers?.get("retry-after") };
  }
}

// Requests that leave no room, until `busy` is done.
async function whileBusy(busy) {
  const before = (await admission()).admission;
  await admission("PUT", { max_waiting: 1 });
  const ending = new AbortController();
  const sent = [];
  let numOpen = 0;
  const send = async () => {
    numOpen++;
    await client.images.generate({ ...long, n: 8 }, { signal: ending.signal }).catch(() => null);
    numOpen--;
  };
  try {
    // One by one, and a second look: one that waits for a moment only would refuse the others.
    for (let waiting = 0, last = 0; waiting < 1 || waiting !== last; ) {
      const { models } = await admission();
      last = waiting;
      waiting = sum(models, "waiting");
      if (waiting < 1 && last < 1 && sum(models, "running") + waiting >= numOpen) sent.push(send());
      await new Promise((done) => setTimeout(done, 100));
    }
    return await busy(() => ending.abort());
  } finally {
    ending.abort();
    await Promise.all(sent);
    await admission("PUT", before);
  }
}

const observations = {
  models: async () => (await client.models.list({ query: { all: true } })).data.map((model) => model.id),
  image: async () => (await client.images.generate(long)).data[0].b64_json,
  // At each event the server is asked what runs: while partial images come, the image does.
  "image.stream": async () =>
    await read(await client.images.generate({ ...long, stream: true, partial_images: 2 }), async (event) =>
      event.type.endsWith("partial_image") ? sum((await admission()).models, "running") : null,
    ),
  "image.control": async () =>
    (
      await client.images.generate({
        ...image,
        prompt: "a handwritten digit",
        control: [{ name: "outline", image: asked.outline }],
      })
    ).data[0].b64_json,
  "image.edit": async () => {
    const file = await toFile(Buffer.from(asked.digit, "base64"), "digit.png", { type: "image/png" });
    return (await client.images.edit({ ...image, image: file, strength: 0.8 })).data[0].b64_json;
  },
  "image.edit_stream": async () => {
    const file = await toFile(Buffer.from(asked.digit, "base64"), "digit.png", { type: "image/png" });
    return await read(
      await client.images.edit({ ...image, image: file, strength: 0.8, stream: true, partial_images: 2 }),
    );
  },
  chat: async () => await client.chat.completions.create(chat),
  "chat.stream": async () =>
    await read(await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } })),
  "chat.tools": async () => (await client.chat.completions.create(tools)).choices[0],
  "chat.tools_stream": async () => await client.chat.completions.stream(tools).finalMessage(),
  "chat.schema": async () =>
    await client.chat.completions.create({
      ...chat,
      max_tokens: 200,
      response_format: { type: "json_schema", json_schema: { name: "total", schema, strict: true } },
    }),
  completion: async () =>
    await client.completions.create({ model: "adder", prompt: ["3 + 4", "5 + 1"], max_tokens: 4, temperature: 0 }),
  embeddings: async () => (await client.embeddings.create({ model: "minilm", input: asked.texts })).data,
  "options.chats": () => each(asked.bodies.chats, (body) => client.chat.completions.create(body)),
  "options.completions": () => each(asked.bodies.completions, (body) => client.completions.create(body)),
  "options.embeddings": () =>
    each(asked.bodies.embeddings, (body) => client.embeddings.create({ ...body, encoding_format: "float" })),
  response: async () => await client.responses.create({ model: "adder", input: asked.sum, temperature: 0 }),
  "response.stream": async () =>
    await read(await client.responses.create({ model: "adder", input: asked.sum, temperature: 0, stream: true })),
  // Three turns, beside the same ones with all that was said in each.
  "ai_sdk.turns": async () => {
    const options = { model: sdk("adder"), temperature: 0, maxOutputTokens: 8, maxRetries: 0 };
    const turns = [...messages];
    const plain = [...messages];
    const found = { referred: [], whole: [] };
    for (let turn = 0; turn < 3; turn++) {
      const answer = turn < 2 ? await generateText({ ...options, messages: turns }) : streamText({ ...options, messages: turns });
      found.referred.push(await answer.text);
      const { choices } = await client.chat.completions.create({ ...chat, messages: plain, max_tokens: 8 });
      found.whole.push(choices[0].message.content);
      turns.push(...(await answer.response).messages, ...messages);
      plain.push({ role: "assistant", content: choices[0].message.content }, ...messages);
    }
    return found;
  },
  "response.kept": async () => {
    const first = await client.responses.create({ model: "adder", input: asked.sum, temperature: 0 });
    const options = { model: "adder", input: asked.sum, temperature: 0, max_output_tokens: 8 };
    const second = await client.responses.create({ ...options, previous_response_id: first.id });
    const again = await client.responses.retrieve(first.id);
    await client.responses.delete(first.id);
    const { output_text: text } = second;
    return { text, again: again.output_text, gone: await refusal(() => client.responses.retrieve(first.id)) };
  },
  "error.bad_request": () => refusal(() => client.chat.completions.create({ ...chat, temperature: 9 })),
  "error.not_found": () => refusal(() => client.chat.completions.create({ ...chat, model: "gpt-9" })),
  "error.not_an_image": async () => {
    const file = await toFile(Buffer.from("no image"), "digit.png", { type: "image/png" });
    return await refusal(() => client.images.edit({ ...image, image: file }));
  },
  "error.busy": () => whileBusy(() => refusal(() => client.chat.completions.create(chat))),
  // A client that may retry waits as long as it was told, and then gets its answer.
  "error.retried": () =>
    whileBusy(async (makeRoom) => {
      const statuses = [];
      const watched = async (...request) => {
        const answer = await fetch(...request);
        statuses.push(answer.status);
        if (answer.status === 429) makeRoom();
        return answer;
      };
      const patient = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 5, fetch: watched });
      const answer = await patient.chat.completions.create(chat);
      return { statuses, content: answer.choices[0].message.content };
    }),
};

async function main() {
  const seen = {};
  for (const [name, observe] of Object.entries(observations)) {
    const start = performance.now();
    try {
      seen[name] = { value: await observe() };
    } catch (error) {
      seen[name] = { raised: `${error.constructor.name}: ${error.message}` };
    }
    seen[name].seconds = (performance.now() - start) / 1000;
  }
  fs.writeFileSync(path.join(folder, "openai_node.json"), JSON.stringify(seen));
}

main();
