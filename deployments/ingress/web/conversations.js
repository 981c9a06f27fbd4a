// Conversations of this browser. Each is a tree of turns: what is edited or answered again begins another branch.

import { EntryStore } from "./entry_store.js";
import { kept, useEffect, useRef, useState } from "./parts.js";
import { texts } from "./texts.js";

const SAVE_MS = 500;
const MAX_TITLE = 60;
const store = new EntryStore("conversations");

export const begun = () => ({ key: crypto.randomUUID(), at: Date.now(), turns: [], leaf: null });

// Return the turns from the first to the one that is shown last.
export function pathOf({ turns, leaf }) {
  const known = new Map(turns.map((turn) => [turn.id, turn]));
  const path = [];
  for (let turn = known.get(leaf); turn && path.length < turns.length; turn = known.get(turn.parent)) path.unshift(turn);
  return path;
}

// Return the turns that may stand in the place of one: itself, and what it was before it was edited or made again.
export const siblingsOf = ({ turns }, { parent }) => turns.filter((turn) => turn.parent === parent);

// Return a conversation in which a turn follows another one, `parent`, or is the first; and is shown.
export function withTurn(conversation, turn, parent) {
  const added = { ...turn, id: crypto.randomUUID(), parent: parent ?? null };
  return { ...conversation, at: Date.now(), turns: [...conversation.turns, added], leaf: added.id };
}

// Return a conversation with other content of a turn.
export const withChange = (conversation, id, change) => ({ ...conversation, turns: conversation.turns.map((turn) => (turn.id === id ? { ...turn, ...change } : turn)) });

// Return a conversation that shows a turn, and what was said last after it.
export function showing(conversation, turn) {
  let leaf = turn.id;
  for (let next = turn; next; next = conversation.turns.findLast((one) => one.parent === leaf)) leaf = next.id;
  return { ...conversation, leaf };
}

export function titleOf({ turns }) {
  const first = turns.find((turn) => turn.role === "user")?.content.trim().replace(/\s+/g, " ") ?? "";
  return first.length > MAX_TITLE ? `${first.slice(0, MAX_TITLE)}…` : first || texts.chat.untitled;
}

// Return a conversation as a text that people read: what is shown of it.
export function asMarkdown(conversation) {
  const nameOf = (turn) => (turn.role === "user" ? texts.chat.you : turn.role === "tool" ? texts.chat.toolResult : turn.model || texts.chat.assistant);
  const callsOf = (turn) => (turn.tool_calls ?? []).map((call) => `\`${call.function.name}(${call.function.arguments})\``);
  const said = pathOf(conversation).map((turn) => [`## ${nameOf(turn)}`, turn.content, ...callsOf(turn)].filter(Boolean).join("\n\n"));
  return [`# ${titleOf(conversation)}`, ...said].join("\n\n") + "\n";
}

// A conversation that was left while it was answered: an answer that is a job is read on, another one has ended.
function restored(conversation) {
  const turns = conversation.turns.map(({ isOn, ...turn }) => (isOn ? { ...turn, ...(turn.job ? { isOn } : { finish: "broken" }) } : turn));
  return { ...conversation, turns };
}

// What pages before this one have kept: one conversation, a list of turns.
function takenOver() {
  const old = kept.get("chat", null);
  const turns = Array.isArray(old?.turns) ? old.turns.filter((turn) => typeof turn?.content === "string") : [];
  if (!turns.length) return [];
  kept.set("chat", { ...old, turns: [] });
  const made = turns.reduce((conversation, turn) => withTurn(conversation, turn, conversation.leaf), begun());
  store.put(made);
  return [made];
}

// Return {list, shown, choose, begin, change, remove}: the conversations, the latest first, and the one that is shown.
// `onUnkept` is called where the browser will not keep one.
export function useConversations(onUnkept) {
  const known = useRef(new Map()).current;
  const unsaved = useRef(new Set()).current;
  const timer = useRef(null);
  const [begunHere, setBegun] = useState(begun);
  const [key, setKey] = useState(begunHere.key);
  const [, redraw] = useState(0);
  const list = [...known.values()].sort((one, other) => other.at - one.at);
  const save = async () => {
    clearTimeout(timer.current);
    timer.current = null;
    const changed = [...unsaved].map((one) => known.get(one));
    unsaved.clear();
    if ((await Promise.all(changed.map((one) => store.put(one)))).includes(false)) onUnkept();
  };
  const choose = (conversation) => {
    setKey(conversation.key);
    kept.set("conversation", conversation.key);
  };
  const begin = () => {
    const made = begun();
    setBegun(made);
    setKey(made.key);
  };
  // Change a conversation: `how` gets it as it is now. It may be answered while another one is shown. Pieces of an
  // answer that is on its way are saved now and then.
  const change = (conversation, how, { isPiece = false } = {}) => {
    known.set(conversation.key, how(known.get(conversation.key) ?? conversation));
    unsaved.add(conversation.key);
    if (isPiece) timer.current ??= setTimeout(save, SAVE_MS);
    else save();
    redraw((number) => number + 1);
  };
  const remove = (conversation) => {
    known.delete(conversation.key);
    unsaved.delete(conversation.key);
    if (conversation.key === key) begin();
    redraw((number) => number + 1);
    store.remove(conversation.key);
  };
  useEffect(() => {
    const leave = () => document.hidden && save();
    addEventListener("visibilitychange", leave);
    addEventListener("pagehide", save);
    store.all().then((found) => {
      for (const one of [...found.map(restored), ...takenOver()]) if (!known.has(one.key)) known.set(one.key, one);
      const last = known.get(kept.get("conversation", ""));
      if (last && key === begunHere.key && !known.has(key)) setKey(last.key);
      redraw((number) => number + 1);
    });
    return () => (removeEventListener("visibilitychange", leave), removeEventListener("pagehide", save));
  }, []);
  return { list, shown: known.get(key) ?? begunHere, choose, begin, change, remove };
}
