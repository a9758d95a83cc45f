/* ---- the keyboard, and finding ---- */

function find(text, step) {
  const head = /^\s*L?(\d+)\s*[.,: H]\s*H?(\d+)\s*$/i.exec(text);
  if (head) {
    const h = PART.heads.findIndex(one => one.layer.number === +head[1] && one.head === +head[2]);
    if (h >= 0) { tellFound(`${PART.heads[h].name} is chosen`); return set({ head: h, hovered: null, found: [], foundKeys: [] }); }
  }
  const here = matches(PART.queries, text), there = PART.cross ? matches(PART.keys, text) : here;
  const change = { found: here.all, foundKeys: there.all };
  if (step) {
    const inKeys = PART.cross && (S.direction !== "out" || !here.ends.length) && there.ends.length, ends = inKeys ? there.ends : here.ends;
    const next = ends.find(n => n > (S.focus ?? -1)) ?? ends[0];
    if (next !== undefined) Object.assign(change, { focus: next, pinned: true, other: null, kept: null }, PART.cross ? { direction: inKeys ? "in" : "out" } : {});
    if (next !== undefined) reveal(next, inKeys ? "key" : "query");
  } else if (here.ends.length) reveal(here.ends[0]);
  const many = n => plural(n, "place"), all = PART.cross ? here.ends.length + there.ends.length : here.ends.length;
  if (!text.trim()) tellFound("");
  else if (!all) tellFound(/^\s*L\d+\s*H?\d*\s*$/i.test(text) || head ? `no head ${text.trim()} here, nor such a text` : `nowhere in the text${PART.cross ? "s" : ""}`, true);
  else tellFound(PART.cross ? `${many(here.ends.length)} in the queries, ${many(there.ends.length)} in the keys` : many(all));
  set(change);
}
function tellFound(words, none = false) {
  put("found", words);
  $("found").classList.toggle("none", none);
  $("find").setAttribute("aria-invalid", none);
}

/* The tokens that a text lies in, and the last one of each place where it is found. */
function matches(list, text) {
  const needle = text.toLowerCase(), all = [], ends = [];
  if (!needle.trim()) return { all, ends };
  let whole = "";
  const starts = list.text.map((token, n) => { const at = whole.length; if (!list.cut[n]?.[0]) whole += token.toLowerCase() + (gapAfter(list, n) ? " " : ""); return at; });
  for (let at = whole.indexOf(needle); at >= 0; at = whole.indexOf(needle, at + 1)) {
    const from = at + (needle[0] === " " ? 1 : 0), to = at + needle.length;
    const hit = starts.map((_, n) => n).filter(n => starts[n] < to && (starts[n + 1] ?? whole.length) > from);
    all.push(...hit);
    ends.push(hit.at(-1));
    if (ends.length > 999) break;
  }
  return { all, ends };
}

function moveToken(step) {
  const list = S.direction === "out" ? PART.queries : PART.keys, low = S.direction === "out" && !PART.cross ? PART.offset : 0;
  const high = S.direction === "out" && !PART.cross ? PART.offset + PART.i - 1 : list.text.length - 1;
  // Where the text runs to the left, so do the arrows.
  const line = LISTS.at(-1).tokens[S.focus]?.closest("p");
  if (line?.dir && getComputedStyle(line).direction === "rtl") step = -step;
  let focus = clamp(S.focus === null ? (step > 0 ? low : high) : S.focus + step, low, high);
  // What is folded is passed over.
  const fold = foldAt(LISTS.at(S.direction === "out" ? 0 : -1), focus);
  if (fold?.rest.hidden) focus = clamp(step > 0 ? fold.to : fold.from - 1, low, high);
  set({ focus, pinned: true, other: null, kept: null });
  reveal(focus, S.direction === "out" ? "query" : "key");
}
function moveHead(layers, heads) {
  const { layer, head } = PART.heads[S.head], next = PART.layers[clamp(layer.place + layers, 0, PART.layers.length - 1)];
  set({ hovered: null, head: next.from + clamp(head + heads, 0, next.heads - 1) });
}
const turn = () => {
  const direction = { out: "in", in: "sum", sum: "out" }[S.direction];
  set({ direction, other: null, kept: null, ...(PART.cross ? { focus: null, pinned: false } : {}) });
};

function onKey(event) {
  const field = $("find");
  if (event.target === field) {
    if (event.key === "Escape") { field.value = ""; find(""); field.blur(); }
    if (event.key === "Enter") find(field.value, true);
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open || event.target === $("least")) return;
  const inGrid = event.target.classList?.contains("grid"), names = Object.keys(PART.score);
  const acts = {
    ArrowLeft: () => inGrid ? moveHead(-1, 0) : moveToken(-1),
    ArrowRight: () => inGrid ? moveHead(1, 0) : moveToken(1),
    ArrowUp: () => event.shiftKey ? moveHead(-1, 0) : moveHead(0, -1),
    ArrowDown: () => event.shiftKey ? moveHead(1, 0) : moveHead(0, 1),
    d: turn,
    f: () => set({ hide: !S.hide }),
    s: () => set({ sorted: !S.sorted }),
    "+": () => zoom(2), "=": () => zoom(2), "-": () => zoom(.5), 0: () => move({ x: 0, y: 0, w: PART.j, h: PART.i }),
    "?": () => $("help").showModal(),
    "/": () => field.focus(),
    Escape: () => set({ pinned: false, focus: null, other: null, kept: null, only: null }),
  };
  const act = acts[event.key] ?? (names[event.key - 1] && (() => set({ statistic: names[event.key - 1], only: null })));
  if (act) { event.preventDefault(); act(); }
}
