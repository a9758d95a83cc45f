/* ---- what is chosen, and what follows from it ---- */

let PART = REPORT.parts[0];
const S = {
  head: 0, hovered: null,             // heads, by their number in the part
  statistic: null, sorted: false, kind: null, only: null, least: 0,
  direction: "out",                   // out: looks at, in: is looked at by, sum: received
  scope: "head", measure: "weight", hide: false,
  focus: null, other: null, kept: null, pinned: false,
  found: [], foundKeys: [],
};

let queued = false;
function set(change) {
  Object.assign(S, change);
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => { queued = false; if (PART.built) draw(); });
}

const current = () => S.hovered ?? S.head;                        // hovering a head previews it everywhere
const scores = (name = S.statistic) => (S.hide ? PART.score_without : PART.score)[name];

/* In one text a token stands at the same place among queries and keys, less where the queries begin. */
const queryAt = place => PART.cross ? place : inRange(place - PART.offset, PART.i);
const placeOf = q => PART.cross ? q : q + PART.offset;
const inRange = (n, count) => n >= 0 && n < count ? n : null;

/* The query and the key of what is chosen; either may be null. */
function chosen() {
  const out = S.direction === "out", other = S.other;
  const q = out ? S.focus : other, k = out ? other : S.focus;
  return { q: q === null ? null : queryAt(q), k };
}
function pair() {
  const { q, k } = chosen();
  return q !== null && k !== null && S.direction !== "sum" && !Number.isNaN(rawWeight(PART, current(), q, k)) ? [q, k] : null;
}

/* What a weight is multiplied by: nothing, the length of the value, or of what the value writes through the output
   matrix, in shares of the residual stream where that is known. */
function factor(h, q, k, measure = S.measure) {
  if (measure === "weight") return 1;
  const { layer, head } = PART.heads[h], a = layer.arrays;
  if (!a) return 0;
  const length = a[measure][head * PART.j + k];
  return measure === "write" && PART.percent ? length / (a.stream[q] || 1) : length;
}
/* What the darkest colour stands for. */
function scaleOf(h, measure = S.measure) {
  if (measure === "weight" || (measure === "write" && PART.percent)) return 1;
  const { layer, head } = PART.heads[h], a = layer.arrays;
  let most = 1e-9;
  if (a) for (let k = 0; k < PART.j; k++) most = Math.max(most, a[measure][head * PART.j + k]);
  return most;
}
/* What is received is shared by all tokens: its darkest colour is the largest share beside the first token's. */
function largestReceived(shares) {
  let most = 0;
  shares?.forEach((share, k) => { if (k !== PART.first && share > most) most = share; });
  return most || 1;
}
const inPercent = measure => measure === "weight" || (measure === "write" && PART.percent);
const amount = (x, measure = S.measure) => inPercent(measure) ? percent(x) : short(x);

/* What each key (or, turned round, each query) shows for the token in focus; null where there is none in focus. */
function values(h) {
  if (S.direction === "sum") return received(h);
  if (S.focus === null) return null;
  const { q, k } = chosen();
  if (S.direction === "out") {
    const row = q === null ? null : rowOf(PART, h, q, S.hide);
    return row && (S.measure === "weight" ? row : row.map((w, key) => w * factor(h, q, key)));
  }
  const column = columnOf(PART, h, k, S.hide);
  return column && (S.measure === "weight" ? column : column.map((w, query) => w * factor(h, query, k)));
}
function received(h, hide = S.hide) {
  if (S.scope === "head") return receivedOf(PART, h, hide);
  const { layer } = PART.heads[h];
  const heads = S.scope === "layer" ? Array.from({ length: layer.heads }, (_, n) => layer.from + n) : [...PART.heads.keys()];
  return receivedBy(PART, heads, hide);
}

/* Kinds of heads: the first threshold that a head reaches. */
const KINDS = { induction: .3, previous: .3, first: .7 };
const KIND_MARK = { induction: "○", previous: "‹", first: "·" };
const kindName = kind => ({ induction: "induction", previous: `previous ${PART.thing}`, first: `first ${PART.whole_thing}` })[kind];
const aKind = kind => ({ induction: "an induction head", previous: `a previous-${PART.thing} head`, first: `resting on the first ${PART.whole_thing}` })[kind];

const STATISTICS = {
  entropy: { name: "entropy", format: v => `${v.toFixed(2)} nats, as wide as ${plural(+Math.exp(v).toFixed(1), `equal ${PART.thing}`)}`, end: v => v.toFixed(1) + " nats",
    say: part => `How spread out a row is, in nats, on average: 0 is a single ${part.thing}, ${Math.log(part.j).toFixed(1)} would be all ${part.j} alike.` },
  first: { name: "first", format: percent, say: part => `Share of attention that rests on the very first ${part.whole_thing}, on average over all later ones.` },
  previous: { name: "previous", format: percent, say: part => `Share of attention on the ${part.thing} just before, on average.` },
  next: { name: "next", format: percent, say: part => `Share of attention on the ${part.thing} just after, on average.` },
  itself: { name: "itself", format: percent, say: () => "Share of attention on the own place, on average." },
  induction: { name: "induction", format: percent, say: () => "Where a token came before: share of attention on what followed its earlier copies, on average." },
  distance: { name: "distance", format: v => plural(+v.toFixed(1), PART.thing), say: part => `How far away a head looks, in ${plural(2, part.thing).slice(2)}, on average.` },
  strongest: { name: "strongest", format: percent, say: () => "The largest weight of a row, on average: how decided a head is." },
};

function openPart(part) {
  PART = part;
  part.built = false;
  // What the keys are called: patches, if they are all (but a class token); of both kinds together, keys.
  const grid = part.patches ? part.patches.rows * part.patches.columns : 0;
  part.thing = grid && part.j - grid <= 1 ? "patch" : "token";
  part.whole_thing = grid && part.j > grid ? "key" : part.thing;
  const flat = table => Object.fromEntries(Object.entries(table).map(([name, rows]) => [name, Float32Array.from(rows.flat())]));
  part.score ??= flat(part.statistics);
  part.score_without ??= flat(part.without_first);
  part.kind ??= part.heads.map((_, h) => Object.keys(KINDS).find(kind => part.score[kind]?.[h] >= KINDS[kind]));
  part.percent = part.kept.includes("stream") && part.kept.includes("write");
  part.best = part.percent || part.kept.includes("write") ? "write" : part.kept.includes("value") ? "value" : "weight";
  Object.assign(S, { hovered: null, kind: null, only: null, least: 0, focus: null, other: null, kept: null, pinned: false, found: [], foundKeys: [],
    direction: "out", measure: part.kept.includes(S.measure) ? S.measure : "weight" });
  if (!(S.statistic in part.score)) S.statistic = part.targets ? "induction" : Object.keys(part.score)[0];
  S.head = opening(part);
}

/* Open on a finding: the strongest induction head, or else the most decided one that does not rest on the first token. */
function opening(part) {
  const by = part.targets ? part.score.induction : part.score_without.strongest;
  return by.indexOf(by.reduce((a, b) => Math.max(a, b), -1));
}
/* And at the token where it is strongest; where there are others not at padding, nor inside a run of special tokens. */
function strongestQuery(part, h) {
  let best = null, most = -1;
  const told = part.queries, first = part.cross ? 0 : part.offset;
  const dull = n => (!part.cross && part.padded.has(n)) || (isSpecial(told.text[n] ?? "") && (told.text[n - 1] === told.text[n] || told.text[n + 1] === told.text[n]));
  const all = Array.from({ length: part.i }, (_, q) => q), worth = all.filter(q => !dull(q + first));
  for (const q of worth.length ? worth : all) {
    let w;
    if (part.targets) w = part.targets[q] >= 0 ? rawWeight(part, h, q, part.targets[q]) : -1;
    else w = strongestKey(part, h, q)[1];
    if (w > most) { most = w; best = q; }
  }
  return best;
}

/* The key that brings a query most, by weight × how long what it moves is; the first token aside where it may be. */
function strongestKey(part, h, q, measure = "weight") {
  const beside = part.patches || part.cross ? -1 : part.first;
  let best = null, most = 0;
  const look = (k, w) => {
    const x = w * (measure === "weight" ? 1 : factor(h, q, k, measure));
    if (x > most && k !== beside) { most = x; best = k; }
  };
  const { layer, head } = part.heads[h], a = layer.arrays;
  if (!a) return [null, 0];
  if (part.whole) for (let k = 0, at = (head * part.i + q) * part.j; k < part.j; k++) { if (a.weights[at + k] > 1) look(k, WEIGHT[a.weights[at + k]]); }
  else for (const [k, w] of strongestKeys(part, h, q)) look(k, w);
  return [best, most];
}
