// The stream of what the cluster does: a picture, and what changes in it (JSON Merge Patch, RFC 7396).

import { eventsOf, isAbort, request, sleep } from "./api.js";

const LONGEST_PAUSE_MS = 10000;

// Put changes into a picture of two levels. What did not change stays the same object.
export function merge(picture, changes) {
  for (const [section, values] of Object.entries(changes)) {
    const known = (picture[section] ??= {});
    for (const [name, value] of Object.entries(values)) {
      if (value === null && section !== "totals") delete known[name];
      else known[name] = value;
    }
  }
  return picture;
}

// Follow the cluster while the page is seen. `onPicture(picture)` gets the same object each time, changed;
// `onState` gets "live", "connecting" or an error. Returns what ends it.
export function follow(onPicture, onState) {
  let leaving = new AbortController();
  let hasEnded = false;
  const run = async () => {
    let pauseMs = 500;
    const { signal } = leaving;
    while (!signal.aborted) {
      try {
        await read(signal, onPicture, () => ((pauseMs = 500), onState("live")));
        onState("connecting"); // it ends with the time that a request may take
      } catch (error) {
        if (isAbort(error) || signal.aborted) return;
        onState(error);
        if (error.isKeyMatter) return;
      }
      await sleep(pauseMs, signal);
      pauseMs = Math.min(LONGEST_PAUSE_MS, 2 * pauseMs);
    }
  };
  const onVisibility = () => {
    leaving.abort();
    if (document.hidden || hasEnded) return;
    leaving = new AbortController();
    onState("connecting");
    run();
  };
  document.addEventListener("visibilitychange", onVisibility);
  onVisibility();
  return () => {
    hasEnded = true;
    document.removeEventListener("visibilitychange", onVisibility);
    leaving.abort();
  };
}

async function read(signal, onPicture, onFirst) {
  const response = await request("admin/live", { signal });
  let picture = null;
  for await (const { event, data } of eventsOf(response)) {
    if (event === "picture") {
      picture = data;
      onFirst();
    } else if (event === "change" && picture) {
      merge(picture, data);
    } else {
      continue;
    }
    onPicture(picture);
  }
}
