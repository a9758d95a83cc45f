/* ---- the two grids: a column per layer, a row per head; the same head lies in the same place in both ---- */

const GUTTER = 30;
const rowHeight = () => clamp(Math.floor(216 / PART.rows), 7, 18);

/* Where each head's cell is: [column, row], and how many columns there are. */
function cells(order) {
  if (order) return { at: Object.fromEntries(order.map((h, n) => [h, [Math.floor(n / PART.rows), n % PART.rows]])), columns: PART.layers.length };
  return { at: PART.heads.map(({ layer, head }) => [layer.place, head]), columns: PART.layers.length };
}

function mark(g, kind, x, y, r) {                                  // shapes, not colours, tell kinds apart
  g.beginPath();
  if (kind === "induction") { g.arc(x, y, r, 0, 7); g.stroke(); }
  else if (kind === "previous") { g.moveTo(x + r * .7, y - r); g.lineTo(x - r * .8, y); g.lineTo(x + r * .7, y + r); g.stroke(); }
  else { g.arc(x, y, r * .36, 0, 7); g.fill(); }
}

/* Cells are never too small to be told apart and hit; what then has no room scrolls in the grid's box. */
const LEAST = 6, TALLEST = 300;
function drawGrid(id, shown, most, { order = null, marks = false, faded = () => false } = {}) {
  const high = rowHeight(), { at, columns } = cells(order), rows = PART.rows;
  const room = widthOf(id) - (rows * high + 20 > TALLEST ? 12 : 0);  // beside the bar it scrolls by
  const wide = clamp((room - GUTTER) / columns, LEAST, 46), all = { w: GUTTER + columns * wide, h: rows * high + 20 };
  const tall = Math.min(all.h, TALLEST), pan = panOf(id, all, room, tall), { g, width, dpr } = canvas(id, tall, room);
  const { left, top } = pan, bottom = tall - 20, X = column => Math.round((GUTTER + column * wide - left) * dpr) / dpr, Y = row => row * high - top;
  const from = [Math.max(0, Math.floor(left / wide)), Math.floor(top / high)], to = [Math.min(columns, Math.ceil((left + width - GUTTER) / wide)), Math.min(rows, Math.ceil((top + bottom) / high))];
  $(id).geometry = { wide, high, at, left, top, columns, grid: cellsOf(order) };
  g.font = "11px " + INK.sans;
  g.fillStyle = INK.mute;
  g.textBaseline = "middle";
  if (order) g.fillText("strongest first, each column from the top", GUTTER, bottom + 12);
  else {
    const every = high < 8 ? 8 : high < 12 ? 4 : high < 14 ? 2 : 1, digits = String(PART.layers.at(-1).number).length;
    const step = [1, 5, 10, 20, 50].find(n => n * wide >= 13 + 6.5 * digits && (n > 1 || wide >= 30)) ?? 100;
    for (let h = Math.ceil(from[1] / every) * every; h < to[1]; h += every) if (Y(h) >= -2) g.fillText("H" + h, 0, Math.max(Y(h) + high / 2, 6));
    for (let l = Math.ceil(from[0] / step) * step; l < to[0]; l += step) if (X(l) >= GUTTER - 2) g.fillText("L" + PART.layers[l].number, X(l), bottom + 12);
  }
  const box = h => {
    const [column, row] = at[h], x = X(column);
    return [x, Y(row), X(column + 1) - x - 1, high - 1];
  };
  g.save();
  g.beginPath();
  g.rect(GUTTER - 3, 0, width, bottom + 3);
  g.clip();
  const inSight = h => { const [column, row] = at[h]; return column >= from[0] && column < to[0] && row >= from[1] && row < to[1]; };
  for (let column = from[0]; column < to[0]; column++) for (let row = from[1]; row < to[1]; row++) {
    const h = $(id).geometry.grid[column * rows + row];
    if (h < 0) continue;
    const [x, y, w, t] = box(h), c = shade(shown[h] / most);
    g.globalAlpha = faded(h) ? .18 : 1;
    g.fillStyle = rgb(c);
    g.fillRect(x, y, w, t);
    const kind = marks && PART.kind[h];
    if (kind && w > 5) {
      g.strokeStyle = g.fillStyle = over(c);
      g.lineWidth = 1.4;
      mark(g, kind, x + w / 2, y + t / 2, Math.min(w / 2 - 2, t / 2 - 1.5, 4));
    }
  }
  g.globalAlpha = 1;
  const ring = (h, colour, thick) => {
    if (!inSight(h)) return;
    const [x, y, w, t] = box(h), inset = y <= 0 ? thick / 2 : 0;
    g.strokeStyle = colour;
    g.lineWidth = thick;
    g.strokeRect(x - .5, y - .5 + inset, w + 1, t + 1 - inset);
  };
  if (S.hovered !== null && S.hovered !== S.head) ring(S.hovered, INK.ink, 1.5);
  ring(S.head, INK.accent, 2.5);
  g.restore();
}

/* Which head lies at each cell, column after column; −1 where none does. */
let cellsKept = { name: null, grid: null };
function cellsOf(order) {
  if (order) return Int32Array.from({ length: PART.layers.length * PART.rows }, (_, n) => order[n] ?? -1);
  if (cellsKept.name !== PART) {
    const grid = new Int32Array(PART.layers.length * PART.rows).fill(-1);
    PART.heads.forEach(({ layer, head }, h) => { grid[layer.place * PART.rows + head] = h; });
    cellsKept = { name: PART, grid };
  }
  return cellsKept.grid;
}

/* The box that a grid scrolls in, and how far it has; a head that is newly chosen is brought into sight. */
const pans = {};
function panOf(id, all, room, tall) {
  const box = $(id).parentElement, wide = all.w > room + 1, high = all.h > tall + 1;
  const pan = pans[id] ??= { size: box.appendChild(el("i", "size")), left: 0, top: 0, head: null, name: "" };
  const name = [wide && all.w, high && all.h, room].join();
  if (pan.name !== name) {
    Object.assign(pan, { name, left: 0, top: 0, head: null });
    box.classList.toggle("wide", wide);
    box.classList.toggle("tall", high);
    pan.size.style.width = wide ? all.w + (high ? 12 : 0) + "px" : "1px";
    pan.size.style.height = high ? all.h + (wide ? 12 : 0) + "px" : "1px";
    box.style.height = wide || high ? tall + (wide ? 12 : 0) + "px" : "";
    box.onscroll = () => {
      if (pan.left === box.scrollLeft && pan.top === box.scrollTop) return;
      Object.assign(pan, { left: box.scrollLeft, top: box.scrollTop });
      set({});
    };
  }
  const where = [S.head, S.sorted, S.statistic].join();
  if ((wide || high) && pan.head !== where) {
    const order = id === "all" && S.sorted ? scores() : null;
    const [column, row] = order ? cells([...order.keys()].sort((a, b) => order[b] - order[a])).at[S.head] : [PART.heads[S.head].layer.place, PART.heads[S.head].head];
    const x = column * (all.w - GUTTER) / PART.layers.length, y = row * (all.h - 20) / PART.rows;
    if (wide && (x < pan.left || x > pan.left + room - GUTTER - 20)) box.scrollLeft = pan.left = clamp(x - (room - GUTTER) / 2, 0, all.w - room);
    if (high && (y < pan.top || y > pan.top + tall - 40)) box.scrollTop = pan.top = clamp(y - tall / 2, 0, all.h - tall);
    pan.head = where;
  }
  return pan;
}

function gridEvents(id) {
  const c = $(id);
  const hit = event => {
    const box = c.getBoundingClientRect(), { wide, high, left, top, columns, grid } = c.geometry, x = event.clientX - box.left, y = event.clientY - box.top;
    if (x < GUTTER || y > c.clientHeight - 20) return null;
    const column = Math.floor((x + left - GUTTER) / wide), row = Math.floor((y + top) / high);
    const found = column < columns && row < PART.rows ? grid[column * PART.rows + row] : -1;
    return found < 0 ? null : found;
  };
  c.onpointermove = event => { if (event.pointerType !== "touch") set({ hovered: hit(event) }); };
  c.onpointerleave = () => set({ hovered: null });
  c.onclick = event => { const h = hit(event); if (h !== null) set({ head: h, hovered: null }); };
}

const headLink = h => {
  const link = el("button", "link" + (h === S.head ? " on" : ""), PART.heads[h].name);
  link.onclick = () => set({ head: h, hovered: null });
  return link;
};

/* ---- all heads by the chosen statistic ---- */

const largest = list => list.reduce((a, b) => Math.max(a, b), 0);

function drawAll() {
  const shown = scores(), statistic = STATISTICS[S.statistic], h = current(), kind = PART.kind[h];
  const most = S.statistic === "entropy" ? Math.max(Math.log(PART.j), 1e-6) : Math.max(largest(shown), 1e-6), least = S.least / 100 * most;
  const order = S.sorted ? [...shown.keys()].sort((a, b) => shown[b] - shown[a]) : null, kinds = S.kind ?? S.only;
  drawGrid("all", shown, most, { order, marks: true, faded: n => shown[n] < least || (kinds && PART.kind[n] !== kinds) });
  put("all-note", statistic.say(PART));
  put("all-read", bold(PART.heads[h].name), ` ${statistic.name} ${statistic.format(shown[h])}`, kind ? `, ${aKind(kind)}` : "",
    S.least ? `; ${plural(shown.filter(x => x >= least).length, "head")} from ${(statistic.end ?? statistic.format)(least)} on` : "");
  put("all-most", (statistic.end ?? statistic.format)(most));
  $("least").value = S.least;
  $("least").classList.toggle("set", S.least > 0);
  $("least").setAttribute("aria-valuetext", (statistic.end ?? statistic.format)(least));
  $("all").title = "";
  $("all").setAttribute("aria-label", `${plural(PART.heads.length, "head")} in ${plural(PART.layers.length, "layer")}, coloured by ${statistic.name}; selected ${PART.heads[S.head].name}, ${statistic.format(shown[S.head])}`);
}

function buildKinds() {
  const line = [];
  for (const kind of Object.keys(KINDS).filter(kind => PART.score[kind])) {
    const count = PART.kind.filter(x => x === kind).length, link = el("button", "link", `${KIND_MARK[kind]} ${kindName(kind)}`);
    link.dataset.kind = kind;
    link.disabled = !count;
    link.onpointerenter = () => set({ kind });
    link.onpointerleave = () => set({ kind: null });
    link.onclick = () => set(S.only === kind ? { only: null, kind: null } : { only: kind, statistic: kind });
    line.push([link, ` ${count} at ${percent(KINDS[kind])} or more`]);
  }
  put("kinds", ...(line.length ? ["Marked: ", ...commas(line), "."] : []));
}

/* ---- one token, or one pair, in every head ---- */

function drawEach() {
  const p = pair(), { q, k } = chosen(), h = current(), best = PART.best, heads = PART.heads;
  const keys = PART.keys, queries = PART.queries, stream = PART.percent ? " in percent of the residual stream it joins." : "";
  const has = n => heads[n].layer.arrays;
  let shown, note, verb, title, unit = best;
  const out = n => { const a = has(n); return a ? a.out[heads[n].head * PART.i + q] / (PART.percent ? a.stream[q] || 1 : 1) : 0; };
  if (p) {
    title = ["From ", named(keys, k), " to ", named(queries, placeOf(q)), ", in every head"];
    shown = heads.map((_, n) => has(n) ? (rawWeight(PART, n, q, k) || 0) * factor(n, q, k, best) : 0);
    verb = best === "weight" ? "weight" : "moves";
    note = best === "weight" ? "The weight of this pair." : `Weight × length of ${best === "write" ? "what its value writes" : "its value"}${stream ? "," + stream : "."}`;
  } else if (S.direction === "out" && q !== null) {
    title = ["At ", named(queries, placeOf(q)), ", in every head"];
    if (best === "weight") {
      shown = heads.map((_, n) => strongestKey(PART, n, q)[1]);
      verb = "strongest";
      note = `The largest weight it gives to one ${PART.whole_thing}${PART.cross || PART.patches ? "" : ", the first aside"}.`;
    } else {
      shown = heads.map((_, n) => out(n));
      verb = best === "write" ? "writes" : "brings";
      note = best === "write" ? `Length of what each head writes here${stream ? "," + stream : "."}` : "Length of what each head brings here, before its output matrix.";
    }
  } else if (S.focus !== null) {
    title = [named(keys, S.focus), ", in every head"];
    shown = heads.map((_, n) => has(n) ? receivedOf(PART, n, S.hide)[S.focus] : 0);
    verb = "gives it";
    unit = "weight";
    note = `Share of attention it receives, on average over the ${PART.cross ? "queries" : plural(2, PART.whole_thing).slice(2)} that may look at it.`;
  } else {
    title = ["Every head, on average"];
    shown = [...scores("strongest")];
    verb = "strongest key";
    unit = "weight";
    note = `The largest weight of a row, on average: how decided a head is. Point at a ${PART.whole_thing} for what it gets.`;
  }
  const order = strongestOf(shown, 4), most = shown[order[0]] || 1, said = x => amount(x, unit);
  const from = n => {                                             // which key that comes from
    if (p || q === null || S.direction !== "out" || S.focus === null) return [];
    const [key] = strongestKey(PART, n, q, best);
    return key === null ? [] : [" from ", named(keys, key)];
  };
  drawGrid("each", shown, most);
  put("h-each", ...title);
  put("each-note", note, PART.ready < PART.layers.length ? ` Reading layer ${PART.ready + 1} of ${PART.layers.length}…` : "");
  put("each-read", bold(heads[h].name), ` ${verb} ${said(shown[h])}`, p && best !== "weight" ? `, weight ${percent(rawWeight(PART, h, q, k) || 0)}` : "",
    ...(S.hide && !p && q !== null && S.direction === "out" && best !== "weight" ? [", the hidden first included"] : []),
    ...(p ? [] : from(h).length && best !== "weight" ? [", most of it", ...from(h)] : from(h).map(x => x === " from " ? ", on " : x)));
  put("each-most", said(most));
  put("each-top", "Most: ", ...commas(order.map(n => [headLink(n), " " + said(shown[n])])));
  $("each").setAttribute("aria-label", `every head at the chosen token; most: ${heads[order[0]].name}, ${said(most)}`);
}
