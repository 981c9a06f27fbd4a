// A pipeline as a graph from left to right: inputs, stages in the column after what they need, outputs.

import { html, seconds } from "./parts.js";
import { texts } from "./texts.js";

const WIDE = 140;
const HIGH = 54;
const GAP = { x: 36, y: 18 };

// Return nodes with their places, and edges between them.
export function laidOut(pipeline) {
  const nodes = new Map();
  for (const { name, type } of pipeline.inputs) nodes.set(`$${name}`, { id: `$${name}`, name, kind: "input", about: type, needs: [], column: 0 });
  const isInput = (name) => pipeline.inputs.some((input) => input.name === name);
  for (const stage of pipeline.stages) {
    const needs = stage.needs.map((name) => (isInput(name) ? `$${name}` : name));
    nodes.set(stage.name, { id: stage.name, name: stage.name, kind: stage.kind, about: stage.target, needs });
  }
  for (const [name, reference] of Object.entries(pipeline.outputs)) {
    nodes.set(`=${name}`, { id: `=${name}`, name, kind: "output", about: reference, needs: [reference.slice(1).split(".")[0]] });
  }
  const columnOf = (node) => (node.column ??= 1 + Math.max(0, ...node.needs.map((id) => (nodes.has(id) ? columnOf(nodes.get(id)) : 0))));
  const columns = [];
  for (const node of nodes.values()) (columns[columnOf(node)] ??= []).push(node);
  const rows = Math.max(...columns.map((column) => column?.length ?? 0));
  const height = rows * (HIGH + GAP.y);
  columns.forEach((column, x) =>
    column.forEach((node, y) => {
      node.x = x * (WIDE + GAP.x) + 4;
      node.y = height / 2 + (y - column.length / 2) * (HIGH + GAP.y) + GAP.y / 2;
    }),
  );
  const edges = [...nodes.values()].flatMap((node) => node.needs.filter((id) => nodes.has(id)).map((id) => [nodes.get(id), node]));
  return { nodes: [...nodes.values()], edges, width: columns.length * (WIDE + GAP.x) - GAP.x + 8, height };
}

export function Graph({ pipeline, run }) {
  const { nodes, edges, width, height } = laidOut(pipeline);
  const stateOf = ({ id, kind }) => {
    if (kind === "output") return run.outputs ? "done" : "";
    const state = run.stages[id]?.state ?? "";
    return state === "running" && run.error ? "failed" : state;
  };
  return html`<svg class="graph" viewBox=${`0 0 ${width} ${height}`} style=${{ minWidth: `${0.75 * width}px`, maxWidth: `${width}px` }} role="img" aria-label=${texts.pipelines.graph(pipeline.id)}>
    ${edges.map(([from, to]) => html`<path class="edge" d=${curve(from, to)} />`)}
    ${nodes.map((node) => {
      const tookS = run.stages[node.id]?.tookS;
      return html`<g key=${node.id} class=${`node-box ${node.kind} ${stateOf(node)}`} transform=${`translate(${node.x} ${node.y})`}>
        <title>${`${node.kind} ${node.name}: ${node.about}`}</title>
        <rect width=${WIDE} height=${HIGH} rx=${node.kind === "input" || node.kind === "output" ? HIGH / 2 : 8} />
        <text x="12" y="22" class="name">${short(node.name)}</text>
        <text x="12" y="41">${short(Number.isFinite(tookS) ? `${seconds(tookS)} · ${node.about}` : node.about, 20)}</text>
      </g>`;
    })}
  </svg>`;
}

const short = (text, most = 15) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function curve(from, to) {
  const [x1, y1, x2, y2] = [from.x + WIDE, from.y + HIGH / 2, to.x, to.y + HIGH / 2];
  const bend = Math.max(GAP.x / 2, (x2 - x1) / 2);
  return `M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
}
