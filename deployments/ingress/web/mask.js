// The painter of masks: what is white in a mask is made anew.

import { Choices, Dialog, Slider, html, useEffect, useRef, useState } from "./parts.js";
import { texts } from "./texts.js";

const words = texts.mask;
const MAX_UNDO = 20;
const PAINT = "rgb(255 82 82 / 62%)";
const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export function MaskDialog({ image, mask, onUse, onClose }) {
  const canvas = useRef();
  const painter = useRef();
  const [size, setSize] = useState(15); // percent of the shorter side
  const [mode, setMode] = useState("paint");
  const [isReady, setReady] = useState(false);
  useEffect(() => {
    const made = new Painter(canvas.current);
    painter.current = made;
    made.open(image, mask).then(() => setReady(true), onClose);
  }, []);
  const brush = () => ({ size: size / 100, isErasing: mode === "erase" });
  const down = (event) => {
    event.preventDefault();
    canvas.current.focus();
    canvas.current.setPointerCapture(event.pointerId);
    painter.current.begin(painter.current.placeOf(event), brush());
  };
  const move = (event) => painter.current.moveTo(painter.current.placeOf(event), brush());
  const onKeyDown = (event) => {
    const direction = KEYS[event.key];
    if (direction) painter.current.step(direction, brush(), event.shiftKey ? 4 : 1);
    else if (event.key === " ") painter.current.dab(brush());
    else return;
    event.preventDefault();
  };
  const use = async () => onUse(await painter.current.mask());
  return html`<${Dialog} title=${words.title} className="wide" onClose=${onClose}>
    <canvas
      ref=${canvas}
      class="mask"
      tabindex="0"
      role="img"
      aria-label=${words.canvas}
      onPointerDown=${down}
      onPointerMove=${move}
      onPointerUp=${() => painter.current.end()}
      onPointerCancel=${() => painter.current.end()}
      onPointerLeave=${() => painter.current.hideBrush()}
      onKeyDown=${onKeyDown}
    ></canvas>
    <div class="row tools">
      <${Choices} className="segments" label=${words.brush} value=${mode} onChange=${setMode} choices=${[["paint", words.paint], ["erase", words.erase]]} />
      <${Slider} label=${words.brush} value=${size} min="1" max="60" step="1" onInput=${(value) => setSize(Math.min(100, Math.max(1, value ?? 15)))} />
      <button type="button" onClick=${() => painter.current.undo()}>${words.undo}</button>
      <button type="button" onClick=${() => painter.current.invert()}>${words.invert}</button>
      <button type="button" onClick=${() => painter.current.clear()}>${words.clear}</button>
    </div>
    <div class="row end">
      <button type="button" onClick=${onClose}>${words.cancel}</button>
      <button type="button" class="primary" disabled=${!isReady} onClick=${use}>${words.done}</button>
    </div>
  <//>`;
}

class Painter {
  constructor(canvas) {
    this.canvas = canvas;
    this.strokes = null; // what is painted, opaque on nothing, in the image's own pixels
    this.before = [];
    this.last = null;
    this.brush = null;
  }

  async open(image, mask) {
    this.image = await createImageBitmap(image);
    const { width, height } = this.image;
    const zoom = Math.max(1, Math.floor(512 / Math.max(width, height)));
    [this.canvas.width, this.canvas.height] = [width * zoom, height * zoom];
    this.strokes = new OffscreenCanvas(width, height);
    this.pen = this.strokes.getContext("2d", { willReadFrequently: true });
    this.place = [width / 2, height / 2];
    if (mask) this.paintMask(await createImageBitmap(mask));
    this.draw();
  }

  paintMask(bitmap) {
    this.pen.drawImage(bitmap, 0, 0, this.strokes.width, this.strokes.height);
    const pixels = this.pen.getImageData(0, 0, this.strokes.width, this.strokes.height);
    for (let at = 0; at < pixels.data.length; at += 4) pixels.data[at + 3] = pixels.data[at] > 127 ? 255 : 0;
    this.pen.putImageData(pixels, 0, 0);
  }

  placeOf(event) {
    const box = this.canvas.getBoundingClientRect();
    const { width, height } = this.strokes;
    return [((event.clientX - box.left) / box.width) * width, ((event.clientY - box.top) / box.height) * height];
  }

  radius({ size }) {
    return Math.max(0.5, (size * Math.min(this.strokes.width, this.strokes.height)) / 2);
  }

  keep() {
    const { width, height } = this.strokes;
    this.before = [...this.before.slice(1 - MAX_UNDO), this.pen.getImageData(0, 0, width, height)];
  }

  begin(place, brush) {
    if (!this.strokes) return;
    this.keep();
    this.last = place;
    this.stroke(place, brush);
  }

  moveTo(place, brush) {
    if (!this.strokes) return;
    this.brush = { place, radius: this.radius(brush) };
    if (this.last) this.stroke(place, brush);
    else this.draw();
  }

  stroke(place, brush) {
    const { pen } = this;
    pen.globalCompositeOperation = brush.isErasing ? "destination-out" : "source-over";
    pen.strokeStyle = "#fff";
    pen.lineCap = pen.lineJoin = "round";
    pen.lineWidth = 2 * this.radius(brush);
    pen.beginPath();
    pen.moveTo(...this.last);
    pen.lineTo(place[0] + 0.01, place[1]);
    pen.stroke();
    pen.globalCompositeOperation = "source-over";
    this.last = this.place = place;
    this.draw();
  }

  end() {
    this.last = null;
  }

  hideBrush() {
    this.brush = null;
    this.draw();
  }

  step([x, y], brush, times) {
    const far = this.radius(brush) * times;
    const { width, height } = this.strokes;
    this.place = [Math.min(width, Math.max(0, this.place[0] + x * far)), Math.min(height, Math.max(0, this.place[1] + y * far))];
    this.brush = { place: this.place, radius: this.radius(brush) };
    this.draw();
  }

  dab(brush) {
    this.begin(this.place, brush);
    this.end();
  }

  undo() {
    const pixels = this.before.pop();
    if (pixels) this.pen.putImageData(pixels, 0, 0);
    this.draw();
  }

  clear() {
    this.keep();
    this.pen.clearRect(0, 0, this.strokes.width, this.strokes.height);
    this.draw();
  }

  invert() {
    this.keep();
    const { width, height } = this.strokes;
    this.pen.globalCompositeOperation = "xor";
    this.pen.fillStyle = "#fff";
    this.pen.fillRect(0, 0, width, height);
    this.pen.globalCompositeOperation = "source-over";
    this.draw();
  }

  draw() {
    if (!this.strokes) return;
    const { width, height } = this.canvas;
    const pen = this.canvas.getContext("2d");
    pen.imageSmoothingEnabled = width === this.image.width;
    pen.clearRect(0, 0, width, height);
    pen.drawImage(this.image, 0, 0, width, height);
    const tinted = new OffscreenCanvas(this.strokes.width, this.strokes.height);
    const tint = tinted.getContext("2d");
    tint.drawImage(this.strokes, 0, 0);
    tint.globalCompositeOperation = "source-in";
    tint.fillStyle = PAINT;
    tint.fillRect(0, 0, tinted.width, tinted.height);
    pen.drawImage(tinted, 0, 0, width, height);
    if (!this.brush) return;
    const zoom = width / this.strokes.width;
    pen.beginPath();
    pen.arc(this.brush.place[0] * zoom, this.brush.place[1] * zoom, this.brush.radius * zoom, 0, 2 * Math.PI);
    pen.lineWidth = 2;
    pen.strokeStyle = "#fff";
    pen.stroke();
    pen.lineWidth = 1;
    pen.strokeStyle = "#000";
    pen.stroke();
  }

  // The mask as a file: white on black; null where nothing is painted.
  async mask() {
    const { width, height } = this.strokes;
    const painted = this.pen.getImageData(0, 0, width, height).data;
    if (!painted.some((value, place) => place % 4 === 3 && value > 127)) return null;
    const whole = new OffscreenCanvas(width, height);
    const pen = whole.getContext("2d");
    pen.fillStyle = "#000";
    pen.fillRect(0, 0, width, height);
    pen.drawImage(this.strokes, 0, 0);
    return whole.convertToBlob({ type: "image/png" });
  }
}
