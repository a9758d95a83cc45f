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

function drawGrid(id, shown, most, { order = null, marks = false, faded = () => false } = {}) {
  const high = rowHeight(), { g, width, dpr } = canvas(id, PART.rows * high + 20), { at, columns } = cells(order);
  const wide = Math.min((width - GUTTER) / columns, 46), X = column => Math.round((GUTTER + column * wide) * dpr) / dpr;
  $(id).geometry = { wide, high, at };
  g.font = "11px " + INK.sans;
  g.fillStyle = INK.mute;
  g.textBaseline = "middle";
  if (order) g.fillText("strongest first, each column from the top", GUTTER, PART.rows * high + 12);
  else {
    const every = high < 8 ? 8 : high < 12 ? 4 : high < 14 ? 2 : 1, step = wide * 5 < 34 ? 10 : wide >= 30 ? 1 : 5;
    for (let h = 0; h < PART.rows; h += every) g.fillText("H" + h, 0, h * high + high / 2);
    for (let l = 0; l < columns; l += step) g.fillText("L" + PART.layers[l].number, X(l), PART.rows * high + 12);
  }
  const box = h => {
    const [column, row] = at[h], x = X(column);
    return [x, row * high, X(column + 1) - x - 1, high - 1];
  };
  for (const h of PART.heads.keys()) {
    const [x, y, w, tall] = box(h), c = shade(shown[h] / most);
    g.globalAlpha = faded(h) ? .18 : 1;
    g.fillStyle = rgb(c);
    g.fillRect(x, y, w, tall);
    const kind = marks && PART.kind[h];
    if (kind && w > 5) {
      g.strokeStyle = g.fillStyle = over(c);
      g.lineWidth = 1.4;
      mark(g, kind, x + w / 2, y + tall / 2, Math.min(w / 2 - 2, tall / 2 - 1.5, 4));
    }
  }
  g.globalAlpha = 1;
  const ring = (h, colour, thick) => {
    const [x, y, w, tall] = box(h), inset = y === 0 ? thick / 2 : 0;
    g.strokeStyle = colour;
    g.lineWidth = thick;
    g.strokeRect(x - .5, y - .5 + inset, w + 1, tall + 1 - inset);
  };
  if (S.hovered !== null && S.hovered !== S.head) ring(S.hovered, INK.ink, 1.5);
  ring(S.head, INK.accent, 2.5);
}

function gridEvents(id) {
  const c = $(id);
  const hit = event => {
    const box = c.getBoundingClientRect(), { wide, high, at } = c.geometry;
    const column = Math.floor((event.clientX - box.left - GUTTER) / wide), row = Math.floor((event.clientY - box.top) / high);
    const found = PART.heads.findIndex((_, h) => at[h][0] === column && at[h][1] === row);
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
  const order = [...shown.keys()].sort((a, b) => shown[b] - shown[a]), most = shown[order[0]] || 1, said = x => amount(x, unit);
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
  put("each-top", "Most: ", ...commas(order.slice(0, 4).map(n => [headLink(n), " " + said(shown[n])])));
  $("each").setAttribute("aria-label", `every head at the chosen token; most: ${heads[order[0]].name}, ${said(most)}`);
}
