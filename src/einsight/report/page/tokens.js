/* ---- the text: tokens as the tokenizer cut them; each is written to only when what it shows has changed ---- */

let LISTS = [];                                                    // one text, or queries and keys
const LONG = 220;
const isLong = data => data.text.length > (PART.cross ? 40 : LONG);  // two texts share the room of one

function buildTexts() {
  const holder = $("texts");
  holder.replaceChildren();
  LISTS = PART.cross ? [textList("query", PART.queries), textList("key", PART.keys)] : [textList("both", PART.keys)];
  holder.className = PART.cross ? "two" : "";
  for (const list of LISTS) {
    const box = list.ruler ? el("div", "scroll", list.root, list.ruler.canvas) : list.root;
    if (!PART.cross) holder.append(box);
    else holder.append(el("div", "pane " + list.side, el("p", "caption", list.side === "query" ? "The queries: who looks" : "The keys: what is looked at"), box));
  }
}

function textList(side, data) {
  const list = { side, data, tokens: [], state: [], folds: [], root: el("div", "text" + (isLong(data) ? " long" : "")), patches: null, ruler: null };
  const patches = PART.patches && side !== "query" ? PART.patches : null;
  list.root.tabIndex = 0;
  list.root.setAttribute("role", "group");
  list.root.setAttribute("aria-label", side === "key" ? "the keys" : side === "query" ? "the queries" : "the text");
  let line = el("p"), word = [], fold = null, within = 0;
  // The tokens of a word stay together, unless it is longer than a line may be.
  const endWord = () => {
    const letters = word.reduce((sum, token) => sum + token.textContent.length, 0);
    line.append(...(word.length > 1 && letters <= 24 ? [el("span", "word", ...word)] : word));
    word = [];
  };
  const breakLine = () => {
    endWord();
    if (line.childNodes.length) list.root.append(line);
    if (RIGHT_TO_LEFT.test(line.textContent)) { line.dir = "auto"; line.classList.add("shaped"); }
    line = el("p");
  };
  data.text.forEach((text, n) => {
    if (PART.prompt && side !== "key" && n === PART.prompt) {
      breakLine();
      list.root.append(el("div", "generated", "generated from here on"));
    }
    if (patches && n >= patches.start && n < patches.start + patches.rows * patches.columns) {
      list.tokens[n] = null;
      if (n > patches.start) return;
      breakLine();
      list.patches = patchBoard(list, patches);
      list.root.append(list.patches.canvas);
      return;
    }
    const token = tokenSpan(data, n);
    list.tokens[n] = token;
    if (n < within) { fold.rest.append(token); return; }
    const count = runAt(data, n);
    if (count >= FOLD) {
      endWord();
      fold = foldOf(n, count, text);
      list.folds.push(fold);
      within = n + count;
      line.append(" ", token, fold.button, fold.rest, " ");
      return;
    }
    const goesOn = data.cut[n]?.[0] > 0;                           // a character's other tokens: nothing between them
    if (/^ /.test(text) && !goesOn) {
      endWord();
      if (line.childNodes.length) line.append(" ");
    }
    word.push(token);
    const next = data.text[n + 1] ?? "";
    if (!PART.named || (/ $/.test(text) && !goesOn) || gapAfter(data, n)) {
      endWord();
      line.append(" ");
    }
    if (/\n\s*$/.test(text) && !/^\s*\n/.test(next)) breakLine();
  });
  breakLine();
  list.lengths = list.tokens.map(token => token ? token.textContent.length : 0);
  if (isLong(data)) {
    list.lines = [...list.root.querySelectorAll("p")];
    list.lineOf = list.tokens.map(token => token && token.closest("p"));
    list.ruler = rulerOf(list);
  }
  textEvents(list);
  return list;
}

/* Long runs of one special token, or of padding, are folded: the first stands for itself, a button for the rest. */
const FOLD = 8;
const isSpecial = text => /^\s*(<[^<>\s]+>|\[[^\[\]\s]+\])\s*$/.test(text);
function runAt(data, n) {
  const text = data.text[n];
  if (data.text[n - 1] === text || !(isSpecial(text) || (data === PART.keys && PART.padded.has(n)))) return 1;
  let end = n + 1;
  while (data.text[end] === text && end !== PART.prompt) end++;
  return end - n;
}
function foldOf(from, count, text) {
  const button = el("button", "fold"), rest = el("span", "rest");
  const open = shown => {
    rest.hidden = !shown;
    button.setAttribute("aria-expanded", shown);
    button.textContent = shown ? "fold" : `+ ${(count - 1).toLocaleString("en")} more`;
  };
  button.title = `${count} × ${text.trim()}, tokens ${from} to ${from + count - 1}: click to show or fold them`;
  button.onclick = event => { event.stopPropagation(); open(rest.hidden); set({}); };
  open(false);
  return { from: from + 1, to: from + count, button, rest, open, state: "" };
}
/* What all tokens of a fold have together. */
function drawFolds(list, shown, most, write, fewest) {
  for (const fold of list.folds) {
    let sum = 0, any = false;
    if (shown && fold.rest.hidden) for (let n = fold.from; n < fold.to; n++) if (!Number.isNaN(shown[n])) { sum += shown[n]; any = true; }
    const part = Math.min(1, Math.sqrt(sum / most)), seen = part >= .055, label = part >= fewest ? write(sum) : "";
    const state = [seen ? level(part) : -1, shown && !any && fold.rest.hidden, label].join();
    if (state === fold.state) continue;
    fold.state = state;
    fold.button.style.backgroundColor = seen ? rgb(shade(part)) : "";
    fold.button.style.color = seen ? over(shade(part)) : "";
    fold.button.classList.toggle("off", Boolean(shown && !any && fold.rest.hidden));
    if (label) fold.button.dataset.w = label;
    else delete fold.button.dataset.w;
  }
}
const foldAt = (list, n) => list.folds.find(fold => n >= fold.from && n < fold.to);

/* Plain words come without their spaces: one is put between them, but not before a mark that ends a phrase. */
const gapAfter = (data, n) => data.apart && n + 1 < data.text.length && !(data.cut[n + 1]?.[0] > 0) && !/^[.,;:!?…)\]}’”»،؛؟]+$/.test(data.text[n + 1]);

/* A token's own text; one space before a word is the gap between tokens, any other is drawn. */
function tokenSpan(data, n) {
  const text = data.text[n], cut = data.cut[n], token = el("span", "t");
  token.dataset.i = n;
  if (cut && cut[0] > 0) {
    token.append(el("i", "", "›"));
    token.title = `${text}: part ${cut[0] + 1} of ${cut[1]}`;
    return token;
  }
  let rest = text.replace(/^ (?=\S)/, "").replace(/(\S) $/, "$1");
  if (rest === " ") rest = "␣";
  for (const part of rest.split(/(\r\n|\n|\r|\t| {2,}|^ +| +$|␣)/).filter(Boolean)) {
    if (/^[\s␣]+$/.test(part) && part !== " " || part === "␣") token.append(el("i", "", part.length > 8 && /^ +$/.test(part) ? `␣×${part.length}` : visible(part).replace(/ /g, "␣")));
    else token.append(visible(part));
  }
  if (!token.childNodes.length) token.append(el("i", "", "∅"));
  if (cut) token.title = `${text}: part 1 of ${cut[1]}`;
  return token;
}

function textEvents(list) {
  const at = event => {
    const token = event.target.closest?.(".t");
    if (token) return +token.dataset.i;
    return list.patches && event.target === list.patches.canvas ? list.patches.hit(event) : null;
  };
  const hover = event => { if (event.pointerType !== "touch") pointAt(list, at(event)); };
  list.root.onpointerover = hover;
  if (list.patches) list.patches.canvas.onpointermove = hover;
  list.root.onpointerleave = () => { if (S.pinned) set({ other: S.kept }); };
  list.root.onmousedown = event => { if (event.shiftKey) event.preventDefault(); };   // a pair is picked, no text selected
  list.root.onclick = event => {
    const n = at(event);
    if (n === null) return;
    if (event.shiftKey && S.focus !== null) set({ other: n, kept: n, pinned: true });
    else if (S.pinned && isFocus(list, n)) set({ focus: n, other: null, kept: null, pinned: false });
    else if (S.pinned && PART.cross && !focusIsIn(list)) set({ other: n, kept: n });
    else set({ ...turned(list), focus: n, other: null, kept: null, pinned: true });
  };
}

/* In two texts the side that is pointed at says which way to look. */
const turned = list => list.side === "both" ? {} : { direction: list.side === "query" ? "out" : S.direction === "sum" ? "sum" : "in" };
const focusIsIn = list => list.side === "both" || (S.direction === "out") === (list.side === "query");
const isFocus = (list, n) => focusIsIn(list) && n === S.focus;

function pointAt(list, n) {
  if (n === null) return;
  if (!S.pinned) set({ ...turned(list), focus: n, other: null });
  else if (list.side === "both") set({ other: n === S.focus ? S.kept : n });
  else if (!focusIsIn(list)) set({ other: n });
}

/* What a list's tokens show: values per token, or null where they show none. Masked ones are NaN. */
function shownIn(list, found) {
  if (found === null) return null;
  if (list.side === "both" && S.direction === "in") {
    const spread = new Float32Array(PART.j).fill(NaN);
    found.forEach((x, q) => { spread[q + PART.offset] = x; });
    return spread;
  }
  if (list.side === "both") return found;
  return (S.direction === "in") === (list.side === "query") ? found : null;
}

function drawTexts() {
  const h = current(), found = values(h), sum = S.direction === "sum", most = sum ? largestReceived(found) : scaleOf(h);
  const fewest = sum ? .5 : .0995;                                 // how strong a colour has to be for a number under it
  const write = x => sum && x < .0995 ? short(x * 100, 2) : sum || inPercent(S.measure) ? String(Math.round(x * 100)) : short(x, 2);
  for (const list of LISTS) {
    const shown = shownIn(list, found), matches = new Set(list.side === "key" ? S.foundKeys : S.found);
    const focus = focusIsIn(list) ? S.focus : null, other = list.side === "both" || !focusIsIn(list) ? S.other : null;
    const focusShows = S.direction !== "sum" || S.pinned;
    const ghosts = ghostLines(list, shown);
    let room = 9;                                                  // letters since the last number: none may touch
    list.tokens.forEach((token, n) => {
      if (!token) return;
      const x = shown ? shown[n] : 0, hidden = S.hide && n === PART.first && list.side !== "query" && S.direction !== "in";
      const part = Math.sqrt((x || 0) / most), seen = shown && part >= .055 && !hidden, masked = shown && Number.isNaN(x) && !ghosts?.has(list.lineOf[n]);
      let label = !shown || hidden || !(part >= fewest) ? "" : write(x);
      room += list.lengths[n];
      if (label && room < label.length + 1) label = "";
      if (label) room = 0;
      const flags = (seen ? level(part) + 1 : 0) | (masked ? 512 : 0) | (hidden ? 1024 : 0) | (n === focus && focusShows ? 2048 : 0)
        | (n === focus && S.pinned ? 4096 : 0) | (n === other ? 8192 : 0) | (matches.has(n) ? 16384 : 0);
      const state = flags + ":" + label;
      if (list.state[n] === state) return;
      list.state[n] = state;
      const lit = seen ? level(part) : -1, style = token.style;
      style.backgroundColor = lit >= 0 ? rgb(RAMP[lit]) : "";
      style.color = lit >= 0 ? OVER[lit] : "";
      if (label) token.dataset.w = label;
      else delete token.dataset.w;
      token.className = "t" + (seen ? " seen" : "") + (masked ? " off" : "") + (hidden ? " hid" : "") + (flags & 2048 ? " focus" : "")
        + (flags & 4096 && flags & 2048 ? " pin" : "") + (flags & 8192 ? " other" : "") + (flags & 16384 ? " found" : "");
    });
    drawFolds(list, shown, most, write, fewest);
    list.ruler?.paint(shown, most, focus, other);
    list.patches?.paint(shown, most, focus, other, focusShows);
    if (PART.cross && list.ruler && found && S.direction !== "sum" && !focusIsIn(list)) follow(list, shown);
  }
}

/* Of two texts the one that answers scrolls to its strongest token, unless one half as strong is in sight. */
let followed = "";
function follow(list, shown) {
  const name = [PART.number, current(), S.direction, S.focus, S.hide, S.measure].join();
  if (name === followed) return;
  followed = name;
  requestAnimationFrame(() => {
    const best = shown.reduce((top, x, n) => x > (shown[top] || 0) ? n : top, 0), box = list.root.getBoundingClientRect();
    const inSight = [...shown.keys()].some(n => {
      if (!(shown[n] >= shown[best] / 2) || !list.tokens[n]) return false;
      const at = list.tokens[n].getBoundingClientRect();
      return at.top >= box.top && at.bottom <= box.bottom - 12;
    });
    if (!inSight) reveal(best, list.side);
  });
}

/* Of a long text the lines that are masked as a whole turn grey as a whole: a move may pass thousands of tokens. */
function ghostLines(list, shown) {
  if (!list.ruler) return null;
  const ghosts = new Set(shown ? list.lines : []);
  if (shown) list.lineOf.forEach((line, n) => { if (line && !Number.isNaN(shown[n])) ghosts.delete(line); });
  for (const line of list.lines) if (line.classList.contains("off") !== ghosts.has(line)) line.classList.toggle("off");
  return ghosts;
}

/* Lines out of sight of a long text are not drawn; how high they are has to be known before. */
function measureLines(list) {
  list.root.classList.remove("measured");
  const heights = list.lines.map(line => line.offsetHeight);
  list.lines.forEach((line, n) => { line.style.containIntrinsicHeight = heights[n] + "px"; });
  list.root.classList.add("measured");
}

/* Colours have changed: write everything anew. */
const repaint = () => { for (const list of LISTS) list.state = []; };

/* Long texts scroll in a box of their own, so that grids and map stay in sight. */
function reveal(place, side = "query") {
  const list = LISTS.find(one => one.side === "both" || one.side === side), token = list?.tokens[place];
  if (!token) return;
  const fold = foldAt(list, place);
  if (fold?.rest.hidden) fold.open(true);
  if (!list.ruler) return token.scrollIntoView({ block: "nearest" });
  const box = list.root.getBoundingClientRect(), at = token.getBoundingClientRect();
  if (at.top < box.top + 20 || at.bottom > box.bottom - 30) list.root.scrollTop += at.top - box.top - box.height / 2;
}

/* Beside a long text: the whole of it as a strip, with what is lit and the part in sight. */
function rulerOf(list) {
  const strip = el("canvas", "ruler"), count = list.data.text.length;
  let last = [null, 1, null, null], place = { top: 0, tall: 0, height: 1 };
  const measure = () => {                                          // apart from painting, which comes after changes
    const box = list.root, height = strip.clientHeight || 1;
    place = { height, top: box.scrollTop / box.scrollHeight * height, tall: Math.max(box.clientHeight / box.scrollHeight * height, 8) };
  };
  const paint = (...shown) => {
    last = shown;
    const [found, most, focus, other] = shown, dpr = devicePixelRatio || 1, width = 14, { height, top, tall } = place;
    strip.width = width * dpr;
    strip.height = Math.round(height * dpr);
    const g = strip.getContext("2d"), at = n => n / count * height;
    g.setTransform(dpr, 0, 0, dpr, 0, 0);
    g.fillStyle = INK.hair;
    g.fillRect(6.5, 0, 1, height);
    g.fillStyle = INK.ghost;
    g.fillRect(5, top, 4, tall);
    const strongest = new Map();                                   // of each line of pixels
    if (found) found.forEach((x, n) => {
      const y = Math.round(at(n)), part = Math.sqrt((x || 0) / most);
      if (part >= .1 && part > (strongest.get(y) ?? 0)) strongest.set(y, part);
    });
    for (const [y, part] of [...strongest].sort((a, b) => a[1] - b[1])) {
      g.fillStyle = rgb(shade(part));
      g.fillRect(0, y - 1, width, 3);
    }
    for (const [n, colour] of [[other, INK.ink], [focus, INK.accent]]) if (n !== null) {
      g.fillStyle = colour;
      g.fillRect(0, at(n) - 1, width, 2.5);
    }
  };
  const go = event => {
    const box = strip.getBoundingClientRect();
    list.root.scrollTop = clamp((event.clientY - box.top) / box.height, 0, 1) * list.root.scrollHeight - list.root.clientHeight / 2;
  };
  strip.onpointerdown = event => { strip.setPointerCapture(event.pointerId); go(event); };
  strip.onpointermove = event => { if (event.buttons) go(event); };
  const again = () => requestAnimationFrame(() => { measure(); paint(...last); });
  list.root.addEventListener("scroll", again, { passive: true });
  let width = 0;
  new ResizeObserver(() => {
    if (list.root.clientWidth !== width) measureLines(list);
    width = list.root.clientWidth;
    again();
  }).observe(list.root);
  return { canvas: strip, paint };
}
