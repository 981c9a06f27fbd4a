// What a model has written as Markdown, as elements: no markup is ever made of a text, so that nothing in it can run.

import { lexer } from "./vendor/marked.js";
import { copy, html, icon } from "./parts.js";
import { texts } from "./texts.js";

const SAFE = ["http:", "https:", "mailto:"];
const MAX_DEPTH = 16; // of lists in quotes in lists: deeper ones are shown as they were written
const TOP = 3; // the first level of its headings, below that of its turn

export function Markdown({ text }) {
  const tokens = lexer(text, { gfm: true, breaks: true });
  const depths = [...new Set(tokens.filter((token) => token.type === "heading").map((token) => token.depth))].sort();
  for (const token of tokens) if (token.type === "heading") token.level = TOP + depths.indexOf(token.depth);
  return html`<div class="markdown">${blocks(tokens, 0)}</div>`;
}

const blocks = (tokens, depth) => (depth > MAX_DEPTH ? tokens.map((token) => token.raw).join("") : tokens.map((token) => element(token, depth + 1)));

function element(token, depth) {
  const inner = () => (token.tokens ? blocks(token.tokens, depth) : token.text);
  switch (token.type) {
    case "paragraph":
      return html`<p>${inner()}</p>`;
    case "heading":
      return html`<${`h${Math.min(6, token.level ?? 6)}`}>${inner()}<//>`;
    case "code":
      return html`<${Code} language=${token.lang ?? ""} text=${token.text} />`;
    case "codespan":
      return html`<code>${token.text}</code>`;
    case "blockquote":
      return html`<blockquote>${inner()}</blockquote>`;
    case "list":
      return list(token, depth);
    case "table":
      return table(token, depth);
    case "strong":
    case "em":
    case "del":
      return html`<${token.type}>${inner()}<//>`;
    case "link":
      return link(token.href, inner());
    case "image":
      return link(token.href, token.text || token.href);
    case "br":
    case "hr":
      return html`<${token.type} />`;
    case "space":
    case "def":
      return null;
    case "text":
    case "escape":
      return inner();
    default:
      return token.raw; // HTML, say: it stands there as it was written
  }
}

function link(href, inner) {
  if (!URL.canParse(href) || !SAFE.includes(new URL(href).protocol)) return inner;
  return html`<a href=${href} target="_blank" rel="noreferrer noopener">${inner}</a>`;
}

function list(token, depth) {
  if (token.items.every((item) => !item.text.trim())) return token.raw; // "19." is a number, and no list
  const items = token.items.map(
    (item) => html`<li>
      ${item.task && html`<input type="checkbox" aria-label=${texts.chat.task} checked=${item.checked} disabled />`} ${blocks(item.tokens, depth)}
    </li>`,
  );
  return token.ordered ? html`<ol start=${token.start}>${items}</ol>` : html`<ul>${items}</ul>`;
}

function table({ header, rows }, depth) {
  const cells = (row, tag) => row.map((cell) => html`<${tag} class=${cell.align ? `to-${cell.align}` : ""}>${blocks(cell.tokens, depth)}<//>`);
  return html`<div class="scrolled" tabindex="0">
    <table>
      <thead><tr>${cells(header, "th")}</tr></thead>
      <tbody>${rows.map((row) => html`<tr>${cells(row, "td")}</tr>`)}</tbody>
    </table>
  </div>`;
}

function Code({ language, text }) {
  return html`<figure class="code">
    <figcaption>
      <span>${language}</span>
      <button class="quiet small" aria-label=${texts.chat.copyCode} onClick=${() => copy(text)}>${icon("copy")}</button>
    </figcaption>
    <pre tabindex="0"><code>${text}</code></pre>
  </figure>`;
}
