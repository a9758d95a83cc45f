/* ---- the whole head: queries by keys, with zoom and cross-hair ---- */

const BARS = 60;                                                   // room above for what keys receive
const NAME = 20;                                                   // and below for what the chosen row is called
let VIEW = null;                                                   // what is in sight, in cells: {x, y, w, h}; null is all
let CELL = { w: 4, h: 4 };
let NAMED = null;                                                  // where the chosen row's name was written
let bitmap = { name: "", image: null };

/* One pixel per cell; in long reports per pooled cell. */
function mapImage(h) {
  const { layer } = PART.heads[h], a = layer.arrays;
  const name = [PART.number, h, S.hide, S.measure, INK.dark, a !== null].join();
  if (bitmap.name === name) return bitmap.image;
  const m = PART.whole ? PART.i : Math.ceil(PART.i / PART.block), n = PART.whole ? PART.j : Math.ceil(PART.j / PART.block);
  const image = new ImageData(n, m), most = PART.whole ? scaleOf(h) : 1, { head } = PART.heads[h];
  const cells = a && (PART.whole ? a.weights : S.hide ? a.pool_without_first : a.pool);
  for (let y = 0; a && y < m; y++) {
    const by = PART.whole && S.hide ? scaled(PART, h, y) : 1;
    for (let x = 0; x < n; x++) {
      const hidden = PART.whole && S.hide && x === PART.first;
      const code = cells[(head * m + y) * n + x];
      if (!code || hidden) continue;
      const w = WEIGHT[code] * by * (PART.whole ? factor(h, y, x) : 1), c = shade(Math.sqrt(w / most));
      image.data.set([c[0], c[1], c[2], 255], (y * n + x) * 4);
    }
  }
  const off = el("canvas");
  off.width = n;
  off.height = m;
  off.getContext("2d").putImageData(image, 0, 0);
  bitmap = { name, image: off };
  return off;
}

function view() {
  return VIEW ?? { x: 0, y: 0, w: PART.j, h: PART.i };
}

function drawMap() {
  const room = widthOf("map"), dpr = devicePixelRatio || 1, v = view(), { i, j } = PART;
  // Whole pixels per cell where there is room for them, else as it fits; long sides may be squeezed.
  const fit = count => { const raw = room / count, even = Math.floor(raw * dpr) / dpr; return Math.min(even > raw * .9 ? even : raw, 30); };
  const square = Math.min(fit(j), fit(i)), all = i === j ? { w: square, h: square } : { w: fit(j), h: clamp(fit(i), 0, Math.max(10, fit(j) * 3)) };
  const across = all.w * j, down = Math.min(all.h * i, room);
  CELL = { w: across / v.w, h: down / v.h };
  const h = current(), { g } = canvas("map", BARS + down + NAME), image = mapImage(h), per = PART.whole ? 1 : PART.block;
  const X = k => (k - v.x) * CELL.w, Y = q => BARS + (q - v.y) * CELL.h;
  const ready = PART.heads[h].layer.arrays !== null;
  g.save();
  g.beginPath();
  g.rect(0, BARS, across, down);
  g.clip();
  g.imageSmoothingEnabled = CELL.w * per * dpr < .75;
  g.imageSmoothingQuality = "high";
  const exact = !PART.whole && ready && CELL.w >= 1.2;
  if (exact) drawStrongest(g, h, v, X, Y);
  else g.drawImage(image, X(0), Y(0), image.width * per * CELL.w, image.height * per * CELL.h);
  if (PART.prompt) drawBoundary(g, X, Y, across, down);
  g.restore();

  const p = pair(), c = chosen(), q = p ? p[0] : S.direction === "out" ? c.q : null, k = p ? p[1] : S.direction !== "out" ? c.k : null;
  const tallest = drawBars(g, h, k, v, X);
  g.font = "11px " + INK.sans;
  g.fillStyle = INK.mute;
  g.textBaseline = "middle";
  const first = q === null || Y(q) > BARS + 40;                    // not where the chosen row is called by its name
  if (!VIEW && ready && PART.future && first) {
    g.textAlign = "right";
    g.fillText("the future: no query sees it", across, BARS + 12);
    g.textAlign = "left";
  }
  drawCross(g, q, k, v, X, Y, across, down);
  const found = p ? [named(PART.queries, placeOf(p[0])), " looks at ", named(PART.keys, p[1]), " ", said(h, ...p), ...(S.hide && p[1] !== PART.first ? hiddenShare(h, ...p) : [])] : [VIEW ? "Drag to move, double-click for more." : "Point at a cell; double-click to zoom."];
  put("map-read", ...found);
  put("map-note", PART.whole ? "Rows are queries, columns keys; bars: average share received" : exact ? "Each query’s strongest keys, exactly; bars: share received"
    : `Cells: what ${per} queries give to ${per} keys; bars: share received`, `, ${percent(tallest)} at most.`);
  drawScale();
}

/* The weight of a pair in words; long reports know only the strongest. */
function said(h, q, k) {
  const w = weight(PART, h, q, k, S.hide);
  if (Number.isNaN(w)) return "nothing: masked";
  if (!PART.whole && !rawWeight(PART, h, q, k)) {
    const least = strongestKeys(PART, h, q).at(-1)?.[1] ?? 0;
    return `at most ${percent(least)}`;
  }
  return amount(w * factor(h, q, k));
}

/* Where the prompt ends and what was generated begins. */
function drawBoundary(g, X, Y, across, down) {
  g.strokeStyle = INK.mute;
  g.lineWidth = 1;
  g.setLineDash([3, 3]);
  g.beginPath();
  const x = Math.round(X(PART.prompt)) + .5, y = Math.round(Y(PART.cross ? PART.prompt : PART.prompt - PART.offset)) + .5;
  if (!PART.cross) { g.moveTo(x, BARS); g.lineTo(x, BARS + down); }
  g.moveTo(0, y);
  g.lineTo(across, y);
  g.stroke();
  g.setLineDash([]);
}

/* A part of a long head: its strongest keys, and the colour of 0 for others, which weigh less. */
function drawStrongest(g, h, v, X, Y) {
  const most = scaleOf(h), to = Math.min(PART.i, Math.ceil(v.y + v.h)), { lo, hi } = PART.heads[h].layer.arrays;
  for (let q = Math.max(0, Math.floor(v.y)); q < to; q++) {
    const by = S.hide ? scaled(PART, h, q) : 1;
    g.fillStyle = rgb(shade(0));
    g.fillRect(X(lo[q]), Y(q), X(hi[q]) - X(lo[q]), CELL.h + .5);
    for (const [k, w] of strongestKeys(PART, h, q)) {
      if (k < v.x - 1 || k > v.x + v.w || (S.hide && k === PART.first)) continue;
      g.fillStyle = rgb(shade(Math.sqrt(w * by * factor(h, q, k) / most)));
      g.fillRect(X(k), Y(q), Math.max(CELL.w, 1), Math.max(CELL.h, 1));
    }
  }
}

function drawBars(g, h, chosenKey, v, X) {
  const shares = receivedOf(PART, h, S.hide);
  if (!shares) return 0;
  let top = 0;
  const from = Math.max(0, Math.floor(v.x)), to = Math.min(PART.j, Math.ceil(v.x + v.w)), bins = new Map();
  for (let k = from; k < to; k++) {                               // narrower than a pixel: the largest of each pixel
    const at = Math.round(X(k) * 2);
    if (!bins.has(at) || shares[k] > shares[bins.get(at)]) bins.set(at, k);
    top = Math.max(top, shares[k]);
  }
  for (const k of bins.values()) {
    const tall = Math.max(shares[k] > .0005 ? 1 : 0, Math.sqrt(shares[k] / (top || 1)) * 34);
    g.fillStyle = k === chosenKey ? INK.accent : INK.mute;
    g.fillRect(Math.max(X(k), 0), BARS - 4 - tall, Math.max(CELL.w - 1, .7), tall);
  }
  return top;
}

function drawCross(g, q, k, v, X, Y, across, down) {
  g.strokeStyle = g.fillStyle = INK.accent;
  g.lineWidth = 1;
  g.font = "12px " + INK.mono;
  const thick = size => Math.max(size, 2), { layer } = PART.heads[current()], a = layer.arrays;
  if (q !== null && q >= v.y - 1 && q < v.y + v.h) {
    const end = a ? a.hi[q] : PART.j, right = Math.min(X(end), across), left = clamp(X(a ? a.lo[q] : 0), 0, across), label = spoken(PART.queries, placeOf(q));
    g.strokeRect(left - 1, Y(q) - .5, Math.max(right - left, 0) + 1.5, thick(CELL.h) + 1);
    // Beside the row only where all paper there is bare; else below the map, never over cells.
    const beside = PART.future && across - right > 14 + g.measureText(label).width;
    if (beside) g.fillText(label, right + 7, Math.max(Y(q) + CELL.h / 2, BARS + 7));
    else g.fillText("row " + label, 0, BARS + down + 12);
    NAMED = { beside, x: beside ? right + 7 : 0, y: beside ? Y(q) + CELL.h / 2 : BARS + down + 12 };
  }
  if (k !== null && k >= v.x - 1 && k < v.x + v.w) {
    const seen = a ? firstToSee(a, k) : 0, top = clamp(Y(seen), BARS, BARS + down);
    g.strokeRect(X(k) - .5, top - .5, thick(CELL.w) + 1, Math.max(BARS + down - top, 0) + 1);
    const far = X(k) > across * .8;
    g.textAlign = far ? "right" : "left";
    g.fillText(spoken(PART.keys, k), far ? X(k) + CELL.w : Math.max(X(k), 0), 8);
    g.textAlign = "left";
  }
}
function firstToSee(a, k) {
  for (let q = 0; q < PART.i; q++) if (k >= a.lo[q] && k < a.hi[q]) return q;
  return PART.i;
}

/* ---- pointing, zooming and moving ---- */

let before = null;                                                 // what was chosen when the pointer came
let dragged = null;

function cellAt(event) {
  const box = $("map").getBoundingClientRect(), v = view();
  const k = Math.floor(v.x + (event.clientX - box.left) / CELL.w), q = Math.floor(v.y + (event.clientY - box.top - BARS) / CELL.h);
  return event.clientY - box.top >= BARS && q >= 0 && q < PART.i && k >= 0 && k < PART.j ? [q, k] : null;
}

function zoom(by, around = null) {
  const v = view(), w = clamp(v.w / by, Math.min(8, PART.j), PART.j), h = clamp(v.h / by, Math.min(8, PART.i), PART.i);
  const p = pair(), c = chosen();
  const [q, k] = around ?? [p?.[0] ?? c.q ?? v.y + v.h / 2, p?.[1] ?? c.k ?? (c.q !== null && c.q !== undefined && !PART.cross ? placeOf(c.q) : v.x + v.w / 2)];
  // What lies under the pointer stays there; without one the chosen cell goes to the middle.
  const part = around ? [(k - v.x) / v.w, (q - v.y) / v.h] : [.5, .5];
  move({ x: k - part[0] * w, y: q - part[1] * h, w, h });
}
function move(v) {
  const whole = v.w >= PART.j && v.h >= PART.i;
  VIEW = whole ? null : { w: v.w, h: v.h, x: clamp(v.x, 0, PART.j - v.w), y: clamp(v.y, 0, PART.i - v.h) };
  set({});
}

function mapEvents() {
  const map = $("map");
  map.onpointermove = event => {
    if (dragged) {
      const v = dragged.view;
      dragged.moved ||= Math.abs(event.clientX - dragged.x) + Math.abs(event.clientY - dragged.y) > 4;
      if (VIEW && dragged.moved) move({ ...v, x: v.x - (event.clientX - dragged.x) / CELL.w, y: v.y - (event.clientY - dragged.y) / CELL.h });
      if (dragged.moved && VIEW) return;
    }
    const at = cellAt(event);
    before ??= { focus: S.focus, other: S.other, direction: S.direction };
    if (!at || Number.isNaN(rawWeight(PART, current(), ...at))) return set(before);
    const place = placeOf(at[0]);
    set(S.direction === "in" ? { focus: at[1], other: place } : { direction: "out", focus: place, other: at[1] });
  };
  map.onpointerdown = event => {
    if (event.pointerType !== "touch" || VIEW) dragged = { x: event.clientX, y: event.clientY, view: view(), moved: false };
    if (VIEW) { map.setPointerCapture(event.pointerId); map.classList.add("held"); }
    if (event.pointerType === "touch") map.onpointermove(event);
  };
  map.onpointerup = map.onpointercancel = () => { map.classList.remove("held"); setTimeout(() => { dragged = null; }); };
  map.onpointerleave = () => {
    if (before) { const back = before; before = null; set(back); }
  };
  map.onclick = event => {
    if (dragged?.moved && VIEW) return;
    const at = cellAt(event);
    if (!at || Number.isNaN(rawWeight(PART, current(), ...at))) return;
    before = { focus: S.focus, other: S.other, direction: S.direction };
    set({ pinned: true, kept: S.other });
    if (S.focus !== null) reveal(S.focus, S.direction === "out" ? "query" : "key");
  };
  map.ondblclick = event => { const at = cellAt(event); if (at) zoom(event.shiftKey ? .5 : 2, at); };
  map.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey) return;                  // the plain wheel scrolls the page
    event.preventDefault();
    const at = cellAt(event);
    if (at) zoom(Math.exp(-event.deltaY / 200), at);
  }, { passive: false });
  for (const [name, label, act] of [["in", "zoom in", () => zoom(2)], ["out", "out", () => zoom(.5)], ["all", "all", () => move({ x: 0, y: 0, w: PART.j, h: PART.i })]]) {
    const button = el("button", "", label);
    button.dataset.v = name;
    button.onclick = act;
    $("zooms").append(button);
  }
}
