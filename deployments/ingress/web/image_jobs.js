// Images that are being made: each a stream that goes on when its connection breaks, or the page is loaded again.

import { ApiError, errorOfEvent, eventsOf, getJson, isAbort, request, sleep } from "./api.js";
import { bodyOf, enlargementOf } from "./form.js";
import { blobOf } from "./image_files.js";
import { texts } from "./texts.js";

const STORED = "atelier.jobs";
const MAX_AT_ONCE = 4; // browsers open six connections to a server; the others are for what the pages ask meanwhile
const MAX_RESUMES = 8;
const STREAMS = "v1/images/streams/";

export class Jobs {
  // `onDone(job, blob, answer)` gets each image once; `onChange()` is called when anything shows differently.
  constructor({ onDone, onChange }) {
    this.list = [];
    this.onDone = onDone;
    this.onChange = onChange;
    this.number = 0;
  }

  get inProgress() {
    return this.list.filter((job) => job.state === "waiting" || job.state === "running");
  }

  // Begin images that belong together, in place of those that are shown and done.
  start(requests) {
    for (const job of this.list) if (!this.inProgress.includes(job)) URL.revokeObjectURL(job.preview);
    this.list = [...this.inProgress, ...requests.map((one) => this.made(one))];
    this.fill();
    this.changed();
  }

  // Begin an image that is made of another one, which is shown until then. Those that are shown stay.
  enlarge(one) {
    const job = this.made(one);
    this.show(job, job.images.start);
    this.list = [job, ...this.list];
    this.fill();
    this.changed();
  }

  made({ parameters, images = {}, lacksImages = false, isPipeline = false, cell = null, shape = null }) {
    return {
      id: ++this.number,
      parameters,
      images,
      lacksImages,
      isPipeline,
      cell,
      shape,
      state: "waiting",
      step: 0,
      steps: 0,
      leftS: null,
      preview: "",
      stream: "",
      lastId: "",
      error: null,
      leaving: new AbortController(),
      beganMs: performance.now(),
    };
  }

  fill() {
    const running = this.list.filter((job) => job.state === "running").length;
    for (const job of this.list.filter((one) => one.state === "waiting").slice(0, MAX_AT_ONCE - running)) this.run(job);
  }

  async run(job) {
    job.state = "running";
    try {
      const [blob, answer] = job.isPipeline ? await this.whole(job) : await this.streamed(job);
      job.state = "done";
      this.show(job, blob);
      this.onDone(job, blob, answer);
    } catch (error) {
      job.state = isAbort(error) || job.leaving.signal.aborted ? "cancelled" : "failed";
      job.error = error;
    }
    this.fill();
    this.changed();
  }

  async whole(job) {
    const json = await bodyOf(job.parameters, job.images, true);
    const answer = await getJson("v1/images/generations", { json, signal: job.leaving.signal });
    return [blobOf(answer.data[0].b64_json), answer];
  }

  async streamed(job) {
    let response = job.stream ? null : await this.begun(job);
    for (let number = 0; ; number++) {
      try {
        response ??= await this.resumed(job);
        const found = await this.read(job, response);
        if (found) return found;
      } catch (error) {
        const isBroken = !(error instanceof ApiError) || error.status === 0 || error.status >= 502;
        if (job.leaving.signal.aborted || !isBroken || !job.stream || number >= MAX_RESUMES) throw error;
      }
      if (!job.stream || number >= MAX_RESUMES) throw new ApiError(texts.errors.broken);
      response = null;
      await sleep(Math.min(4000, 250 * 2 ** number), job.leaving.signal);
    }
  }

  async begun(job) {
    let response;
    try {
      response = await this.asked(job, true);
    } catch (error) {
      if (!/resumable/.test(error.message)) throw error; // several ingresses, or as many streams as may be
      response = await this.asked(job, false);
    }
    job.stream = response.headers.get("content-location")?.split("/").at(-1) ?? "";
    this.changed();
    return response;
  }

  async asked({ parameters, images, leaving: { signal } }, resumable) {
    if (!parameters.source) {
      const json = { ...(await bodyOf(parameters, images, false)), resumable };
      return request("v1/images/generations", { json, signal });
    }
    const form = enlargementOf(parameters, images);
    form.set("resumable", resumable);
    return request("v1/images/variations", { form, signal });
  }

  async resumed(job) {
    const headers = job.lastId ? { "last-event-id": job.lastId } : {};
    try {
      return await request(STREAMS + encodeURIComponent(job.stream), { headers, signal: job.leaving.signal });
    } catch (error) {
      throw error.status === 404 ? new ApiError(texts.create.lost, { status: 404 }) : error;
    }
  }

  // Return the image and its answer, null where the events end before it.
  async read(job, response) {
    if (response.status === 204) throw new ApiError(texts.create.lost, { status: 404 });
    for await (const event of eventsOf(response)) {
      const error = errorOfEvent(event);
      if (error) throw error;
      const { data } = event;
      job.lastId = event.id || job.lastId;
      if (data.b64_json && data.type?.endsWith(".completed")) return [blobOf(data.b64_json), data];
      if (data.b64_json) this.show(job, blobOf(data.b64_json));
      Object.assign(job, { step: data.step ?? job.step, steps: data.num_steps ?? job.steps });
      if ("eta_s" in data) job.leftS = data.eta_s;
      this.changed();
    }
    return null;
  }

  show(job, blob) {
    if (job.preview) URL.revokeObjectURL(job.preview);
    job.preview = URL.createObjectURL(blob);
  }

  cancel(job) {
    job.leaving.abort();
    if (job.state === "waiting") job.state = "cancelled";
    if (job.stream) request(STREAMS + encodeURIComponent(job.stream), { method: "DELETE", quiet: true }).catch(() => {});
    this.changed();
  }

  retry(job) {
    this.list = this.list.map((one) => (one === job ? this.made(job) : one));
    this.fill();
    this.changed();
  }

  // Take up the streams that this tab read when it was left. The images that they began from stayed behind: what lacks
  // them would be another image when it is asked for again.
  restore() {
    let stored = [];
    try {
      stored = JSON.parse(sessionStorage.getItem(STORED)) ?? [];
    } catch {
      // nothing that can be read
    }
    const jobs = stored.slice(0, 64).map((one) => Object.assign(this.made(one), { stream: String(one.stream) }));
    if (!jobs.length) return 0;
    this.list = jobs;
    this.fill();
    this.onChange();
    return jobs.length;
  }

  changed() {
    const stored = this.inProgress.filter((job) => job.stream).map(({ parameters, images, lacksImages, stream, cell, shape }) => {
      return { parameters, lacksImages: lacksImages || Object.keys(images).length > 0, stream, cell, shape };
    });
    try {
      if (stored.length) sessionStorage.setItem(STORED, JSON.stringify(stored));
      else sessionStorage.removeItem(STORED);
    } catch {
      // no room: a reload ends what is in progress
    }
    this.onChange();
  }
}
