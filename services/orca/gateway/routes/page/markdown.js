// Markdown as DOM nodes. Text of a model goes into text nodes only, so HTML in it stays text. Nothing is loaded: an
// image becomes a link. Each step passes over the text a bounded number of times, whatever a model writes.

const NESTING_MAX = 8;  // quotes and lists inside each other, emphasis inside emphasis; deeper ones stay as written
const LABEL_MAX = 1000;  // characters of the text of a link

// A part of the page that shows Markdown which grows. Blocks that have not changed keep their nodes.
class MarkdownView {
  constructor() {
    this.node = make("div", {className: "markdown"});
    this.sources = [];
  }

  show(text) {
    const blocks = readBlocks(text.split("\n"));
    let same = 0;
    while (same < blocks.length && this.sources[same] === blocks[same].source) same += 1;
    while (this.node.children.length > same) this.node.lastElementChild.remove();
    for (const block of blocks.slice(same)) this.node.append(blockNode(block, 0));
    this.sources = blocks.map(block => block.source);
  }
}

// The blocks of these lines, each with the lines that it was read from.
function readBlocks(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at += 1; continue; }
    const block = readFence(lines, at) ?? readHeading(lines, at) ?? readRule(lines, at) ?? readQuote(lines, at) ??
      readList(lines, at) ?? readTable(lines, at) ?? readIndented(lines, at) ?? readParagraph(lines, at);
    block.source = lines.slice(at, block.end).join("\n");
    blocks.push(block);
    at = block.end;
  }
  return blocks;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
function readFence(lines, start) {
  const open = FENCE.exec(lines[start]);
  if (!open) return null;
  const indent = lines[start].search(/\S/), code = [];
  let end = start + 1;
  for (; end < lines.length; end += 1) {
    const close = lines[end].trim();
    if (close.length >= open[1].length && close === open[1][0].repeat(close.length)) { end += 1; break; }
    code.push(withoutIndent(lines[end], indent));
  }
  return {kind: "code", language: open[2].trim().split(/\s/)[0], text: code.join("\n"), end};
}

const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
function readHeading(lines, start) {
  const open = HEADING.exec(lines[start]);
  if (!open) return null;
  const text = lines[start].slice(open[0].length).trim();
  let length = text.length;
  while (text[length - 1] === "#") length -= 1;
  const isClosed = length < text.length && (length === 0 || text[length - 1] === " ");
  return {kind: "heading", level: open[1].length, text: isClosed ? text.slice(0, length).trim() : text, end: start + 1};
}

const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
function readRule(lines, start) {
  return RULE.test(lines[start]) ? {kind: "rule", end: start + 1} : null;
}

const QUOTE = /^ {0,3}> ?/;
function readQuote(lines, start) {
  let end = start;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(start, end).map(line => line.replace(QUOTE, ""));
  return inner.length ? {kind: "quote", lines: inner, end} : null;
}

// A mark without text is none: "42." is an answer, and no empty list.
const ITEM = /^( {0,3})([-*+]|(\d{1,9})[.)])[ \t]+(?=\S)/;
function readList(lines, start) {
  const first = ITEM.exec(lines[start]);
  if (!first) return null;
  const isOrdered = first[3] !== undefined, outer = first[1].length, items = [];
  let end = start;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    const isAlike = item && item[1].length < outer + 2 && (item[3] !== undefined) === isOrdered;
    if (isAlike && !RULE.test(lines[end])) {
      items.push({width: item[0].length, lines: [lines[end].slice(item[0].length)]});
    } else if (!belongsToItem(lines, end, outer)) {
      break;
    } else {
      const last = items.at(-1);
      last.lines.push(withoutIndent(lines[end], last.width));
    }
    end += 1;
  }
  while (!lines[end - 1].trim()) end -= 1;
  return {kind: "list", first: isOrdered ? Number(first[3]) : null, items: items.map(item => item.lines), end};
}

// A blank line if the item goes on after it, an indented line, or one that continues the paragraph before it.
function belongsToItem(lines, at, outer) {
  if (lines[at].trim()) return indentOf(lines[at]) >= outer + 2 || (lines[at - 1].trim() && !startsBlock(lines, at));
  const next = lines.slice(at, at + 3).find(line => line.trim());
  return next !== undefined && (indentOf(next) >= outer + 2 || ITEM.test(next));
}

const DASHES = /^:?-+:?$/;
function readTable(lines, start) {
  if (!lines[start].includes("|") || start + 1 >= lines.length) return null;
  const head = cellsOf(lines[start]), dashes = cellsOf(lines[start + 1]);
  if (!lines[start + 1].includes("-") || dashes.length !== head.length || !dashes.every(cell => DASHES.test(cell)))
    return null;
  let end = start + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const sides = dashes.map(cell => cell.endsWith(":") ? cell.startsWith(":") ? "center" : "right" : "");
  return {kind: "table", head, sides, rows: lines.slice(start + 2, end).map(cellsOf), end};
}

function cellsOf(line) {
  let text = line.trim();
  if (text.startsWith("|")) text = text.slice(1);
  if (text.endsWith("|") && !text.endsWith("\\|")) text = text.slice(0, -1);
  return text.split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));
}

function readIndented(lines, start) {
  let end = start;
  while (end < lines.length && /^(?: {4}|\t)/.test(lines[end])) end += 1;
  const text = lines.slice(start, end).map(line => withoutIndent(line, 4)).join("\n");
  return end === start ? null : {kind: "code", language: "", text, end};
}

function readParagraph(lines, start) {
  let end = start + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines, end)) end += 1;
  return {kind: "paragraph", text: lines.slice(start, end).map(line => line.trim()).join("\n"), end};
}

function startsBlock(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) ||
    readTable(lines, at) !== null;
}

function indentOf(line) {
  const indent = line.search(/\S/);
  return line[0] === "\t" ? 4 : indent < 0 ? line.length : indent;
}

function withoutIndent(line, most) {
  return line[0] === "\t" ? line.slice(1) : line.slice(Math.min(most, indentOf(line)));
}

function blockNode(block, depth) {
  switch (block.kind) {
    case "code": {
      const node = make("pre", {}, make("code", {}, block.text));
      if (block.language) node.dataset.language = block.language;
      return node;
    }
    case "heading": return withInline("h" + block.level, block.text);
    case "rule": return make("hr");
    case "quote": return withBlocks(make("blockquote"), block.lines, depth);
    case "list": return listNode(block, depth);
    case "table": return tableNode(block);
    default: return withInline("p", block.text);
  }
}

function withBlocks(node, lines, depth) {
  if (depth >= NESTING_MAX) {
    node.append(lines.join("\n"));
    return node;
  }
  const blocks = readBlocks(lines);
  blocks.forEach((block, index) => {
    // The text of an item stands beside its mark.
    if (node.tagName === "LI" && index === 0 && block.kind === "paragraph") appendInline(node, block.text, 0);
    else node.append(blockNode(block, depth + 1));
  });
  return node;
}

function listNode(block, depth) {
  const node = make(block.first === null ? "ul" : "ol");
  if (block.first !== null) node.start = block.first;
  node.append(...block.items.map(lines => withBlocks(make("li"), lines, depth)));
  return node;
}

function tableNode(block) {
  const row = (tag, cells) => make("tr", {}, ...block.sides.map((side, index) => {
    const node = withInline(tag, cells[index] ?? "");
    if (side) node.className = side;
    return node;
  }));
  return make("div", {className: "table"}, make("table", {},
    make("thead", {}, row("th", block.head)), make("tbody", {}, ...block.rows.map(cells => row("td", cells)))));
}

function withInline(tag, text) {
  const node = make(tag);
  appendInline(node, text, 0);
  return node;
}

// Add text with emphasis, code, links and line breaks. What is not closed stays as it is written.
function appendInline(node, text, depth) {
  const unclosed = new Set();  // marks without an end in the rest of the text: none is looked for twice
  const hasLinks = !node.closest("a");
  let plain = "";
  for (let at = 0; at < text.length;) {
    const part = depth < NESTING_MAX ? readInline(text, at, unclosed, hasLinks) : null;
    if (!part) { plain += text[at]; at += 1; continue; }
    if (typeof part.node === "string") {
      plain += part.node;
    } else {
      node.append(plain, part.node);
      plain = "";
      if (part.inner !== undefined) appendInline(part.node, part.inner, depth + 1);
    }
    at = part.end;
  }
  node.append(plain);
}

// What begins here besides plain text: its node or text, the text inside it, and its end; null if nothing does.
function readInline(text, at, unclosed, hasLinks) {
  switch (text[at]) {
    case "\n": return {node: make("br"), end: at + 1};
    case "\\": return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? {node: text[at + 1], end: at + 2} : null;
    case "`": return readCode(text, at, unclosed);
    case "*": case "_": return readEmphasis(text, at, text[at].repeat(2), "strong", unclosed) ??
      readEmphasis(text, at, text[at], "em", unclosed) ?? wholeRun(text, at);
    case "~": return readEmphasis(text, at, "~~", "s", unclosed) ?? wholeRun(text, at);
    case "[": case "!": return hasLinks ? readLink(text, at) : null;
    case "<": case "h": return hasLinks ? readAddress(text, at) : null;
    default: return null;
  }
}

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

function wholeRun(text, at) {
  const length = runLength(text, at);
  return {node: text.slice(at, at + length), end: at + length};
}

function readCode(text, at, unclosed) {
  const length = runLength(text, at), mark = "`".repeat(length);
  if (!unclosed.has(length)) {
    for (let close = text.indexOf(mark, at + length); close >= 0;) {
      const run = runLength(text, close);
      if (run === length) {
        const inner = text.slice(at + length, close), code = inner.replaceAll("\n", " ");
        const isPadded = code.length > 2 && code.startsWith(" ") && code.endsWith(" ");
        return {node: make("code", {}, isPadded ? code.slice(1, -1) : code), end: close + length};
      }
      close = text.indexOf(mark, close + run);
    }
    unclosed.add(length);
  }
  return wholeRun(text, at);
}

const isSpace = character => character === undefined || /\s/.test(character);
const isWord = character => character !== undefined && /[\p{L}\p{N}]/u.test(character);

function readEmphasis(text, at, mark, tag, unclosed) {
  const start = at + mark.length;
  if (!text.startsWith(mark, at) || unclosed.has(mark) || isSpace(text[start])) return null;
  if (mark[0] === "_" && isWord(text[at - 1])) return null;
  let close = text.indexOf(mark, start + 1);
  while (close >= 0) {
    const run = runLength(text, close), end = close + run;
    // Of a run, the last marks close: the others belong to what is inside.
    const fits = mark.length === 2 ? run >= 2 : run !== 2;
    if (fits && !isSpace(text[close - 1]) && !(mark[0] === "_" && isWord(text[end])))
      return {node: make(tag), inner: text.slice(start, end - mark.length), end};
    close = text.indexOf(mark, end);
  }
  unclosed.add(mark);
  return null;
}

const DESTINATION = new RegExp(
  /\(\s{0,9}<?([^\s()<>]{1,2000}(?:\([^\s()<>]{0,500}\)[^\s()<>]{0,500})?)>?/.source +  // one pair of brackets in it
  /(?:\s{1,9}"[^"]{0,500}")?\s{0,9}\)/.source, "y");  // a title, which is not shown
function readLink(text, at) {
  const isImage = text[at] === "!", start = isImage ? at + 1 : at;
  if (text[start] !== "[") return null;
  let close = start, open = 0;
  do {
    if (text[close] === "\\") close += 1;
    else if (text[close] === "[") open += 1;
    else if (text[close] === "]") open -= 1;
    close += 1;
  } while (open && close < text.length && close - start < LABEL_MAX);
  DESTINATION.lastIndex = close;
  const destination = open ? null : DESTINATION.exec(text);
  const node = destination && linkTo(destination[1]);
  if (!node) return null;
  const label = text.slice(start + 1, close - 1);
  if (isImage) node.append("Image: ");
  return {node, inner: label || destination[1], end: DESTINATION.lastIndex};
}

const IN_BRACKETS = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/iy, BARE = /https?:\/\/[^\s<>"`*]{1,2000}/y;
function readAddress(text, at) {
  const form = text[at] === "<" ? IN_BRACKETS : BARE;
  if (form === BARE && isWord(text[at - 1])) return null;
  form.lastIndex = at;
  const found = form.exec(text);
  if (!found) return null;
  // A bare address ends before the punctuation of its sentence.
  const address = form === BARE ? found[0].replace(/[.,;:!?)\]'_|]{1,100}$/, "") : found[1];
  const node = linkTo(address);
  if (!node) return null;
  node.append(address);
  return {node, end: form === BARE ? at + address.length : form.lastIndex};
}

// A link that opens beside the page and does not tell where it came from; null for an address of another kind.
function linkTo(address) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(address) || !URL.canParse(address)) return null;
  return make("a", {href: address, title: address, target: "_blank", rel: "noopener noreferrer"});
}
