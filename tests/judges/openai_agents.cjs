// Observations of agents by OpenAI's client for JavaScript and by Vercel's AI SDK: node openai_agents.cjs HTTP_URL GRPC_ADDRESS FOLDER,
// with NODE_PATH where the clients are. `asked.json` has the question and the tool's `result`. It judges nothing.
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const { createOpenAI } = require("@ai-sdk/openai");
const { generateText, jsonSchema, stepCountIs, streamText, tool } = require("ai");
const { OpenAI } = require("openai");

const [url, , folder] = process.argv.slice(2);
const asked = JSON.parse(fs.readFileSync(path.join(folder, "asked.json"), "utf8"));
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const sdk = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const parameters = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
  required: ["city", "days"],
};
const weather = { name: "weather", description: "Tell the weather.", parameters };
const model = "chatty";

async function chats(isStream) {
  const messages = [{ role: "user", content: asked.question }];
  const calls = [];
  const seen = { answer: null, calls, thoughts: "" };
  for (let turn = 0; turn < 3; turn++) {
    const body = { model, messages, tools: [{ type: "function", function: weather }] };
    const message = isStream
      ? await client.chat.completions.stream(body).finalMessage()
      : (await client.chat.completions.create(body)).choices[0].message;
    seen.thoughts += message.reasoning_content ?? "";
    if (!message.tool_calls?.length) return { ...seen, answer: message.content };
    messages.push(message);
    for (const call of message.tool_calls) {
      calls.push(JSON.parse(call.function.arguments));
      messages.push({ role: "tool", tool_call_id: call.id, content: asked.result });
    }
  }
  throw new Error("no answer");
}

async function responses(isStream) {
  const input = [{ role: "user", content: asked.question }];
  const seen = { answer: null, calls: [], thoughts: "" };
  for (let turn = 0; turn < 3; turn++) {
    const body = { model, input, tools: [{ type: "function", strict: false, ...weather }], store: false };
    const answer = isStream
      ? await client.responses.stream(body).finalResponse()
      : await client.responses.create(body);
    const own = answer.output.filter((item) => item.type === "function_call");
    for (const item of answer.output) if (item.type === "reasoning") seen.thoughts += item.content[0].text;
    if (!own.length) return { ...seen, answer: answer.output_text };
    input.push(...answer.output);
    for (const item of own) {
      seen.calls.push(JSON.parse(item.arguments));
      input.push({ type: "function_call_output", call_id: item.call_id, output: asked.result });
    }
  }
  throw new Error("no answer");
}

async function sdkAgent(language, isStream) {
  const calls = [];
  const execute = async (given) => {
    calls.push(given);
    return asked.result;
  };
  const options = {
    model: language,
    prompt: asked.question,
    tools: { weather: tool({ description: weather.description, inputSchema: jsonSchema(parameters), execute }) },
    stopWhen: stepCountIs(3),
    maxRetries: 0,
    providerOptions: { openai: { store: false } },
  };
  if (!isStream) return { answer: (await generateText(options)).text, calls };
  const answer = streamText(options);
  for await (const part of answer.fullStream) if (part.type === "error") throw part.error;
  return { answer: await answer.text, calls };
}

const observations = {};
for (const isStream of [false, true]) {
  const end = isStream ? "_stream" : "";
  observations[`chats${end}`] = () => chats(isStream);
  observations[`responses${end}`] = () => responses(isStream);
  observations[`ai_sdk_chats${end}`] = () => sdkAgent(sdk.chat(model), isStream);
  observations[`ai_sdk_responses${end}`] = () => sdkAgent(sdk.responses(model), isStream);
}

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
  fs.writeFileSync(path.join(folder, "openai_agents.json"), JSON.stringify(seen));
}

main();
