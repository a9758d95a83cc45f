/* ---- data: each layer is inflated when the page has time, and answers for rows and columns of weights ---- */

const REPORT = JSON.parse(document.getElementById("data").textContent);
const STEPS = 254;
/* A byte as the weight it stands for; 0 is a key that may not be seen. */
const WEIGHT = Float32Array.from({ length: 256 }, (_, code) => code ? ((code - 1) / STEPS) ** (4 / 3) : NaN);

for (const [number, part] of REPORT.parts.entries()) {
  part.number = number;
  part.heads = [];
  part.layers.forEach((layer, l) => {
    layer.place = l;
    layer.arrays = null;
    layer.from = part.heads.length;
    for (let h = 0; h < layer.heads; h++) part.heads.push({ layer, head: h, name: `L${layer.number}H${h}` });
  });
  part.rows = Math.max(...part.layers.map(layer => layer.heads));
  part.queries ??= part.keys;
  part.ready = 0;
  part.padded = new Set(part.padded);
}

async function load(part, l) {
  const layer = part.layers[l], holder = document.getElementById(`layer-${part.number}-${l}`);
  if (layer.arrays || !holder) return;
  const packed = atob(holder.textContent), bytes = new Uint8Array(packed.length);
  holder.remove();
  for (let n = 0; n < bytes.length; n++) bytes[n] = packed.charCodeAt(n);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  layer.arrays = unpacked(part, layer, await new Response(stream).arrayBuffer());
  part.ready++;
}

function unpacked(part, layer, buffer) {
  const types = { 1: Uint8Array, 2: Uint16Array, 4: Int32Array }, arrays = {};
  for (const [name, entry] of Object.entries(layer.index)) {
    if (name === "size" || name.endsWith("_range")) continue;
    const [at, count, width] = entry, array = new types[width](buffer, at, count), range = layer.index[name + "_range"];
    arrays[name] = range ? fromLogarithms(array, range) : array;
  }
  if (part.whole) arrays.weights = spread(part, layer, arrays);
  return arrays;
}

/* Lengths and what is received: what counts is their ratio. */
function fromLogarithms(codes, [low, high]) {
  return Float32Array.from(codes, code => code ? Math.exp(low + (code - 1) / 4094 * (high - low)) : 0);
}

/* Stored are the keys between each query's first and last, key after key; in memory [head][query][key] is quicker. */
function spread(part, layer, { weights, lo, hi }) {
  const { i, j } = part, all = new Uint8Array(layer.heads * i * j);
  let n = 0;
  for (let h = 0; h < layer.heads; h++)
    for (let k = 0; k < j; k++)
      for (let q = 0, at = h * i * j + k; q < i; q++, at += j)
        if (k >= lo[q] && k < hi[q]) all[at] = weights[n++];
  return all;
}

/* A head's row: the weight on each key; NaN where masked, 0 where a long report doesn't say (it is small there). */
function rawRow(part, h, q) {
  const { layer, head } = part.heads[h], a = layer.arrays, { i, j } = part;
  if (!a) return null;
  const row = new Float32Array(j);
  if (part.whole) {
    for (let k = 0, at = (head * i + q) * j; k < j; k++) row[k] = WEIGHT[a.weights[at + k]];
    return row;
  }
  row.fill(NaN, 0, a.lo[q]).fill(NaN, a.hi[q]);
  for (const [k, w] of strongestKeys(part, h, q)) row[k] = w;
  return row;
}

/* Of a long report: a query's strongest keys and their weights, strongest first. */
function strongestKeys(part, h, q) {
  const { layer, head } = part.heads[h], a = layer.arrays, found = [];
  for (let rank = 0; rank < part.strongest; rank++) {
    const at = (head * part.strongest + rank) * part.i + q;
    if (!a.top[at]) break;
    found.push([(((q + part.offset - a.keys[at]) % part.j) + part.j) % part.j, WEIGHT[a.top[at]]]);
  }
  return found;
}

function rawWeight(part, h, q, k) {
  const { layer, head } = part.heads[h], a = layer.arrays;
  if (!a) return 0;
  if (part.whole) return WEIGHT[a.weights[(head * part.i + q) * part.j + k]];
  if (k < a.lo[q] || k >= a.hi[q]) return NaN;
  for (let rank = 0; rank < part.strongest; rank++) {
    const at = (head * part.strongest + rank) * part.i + q;
    if (!a.top[at]) break;
    if ((((q + part.offset - a.keys[at]) % part.j) + part.j) % part.j === k) return WEIGHT[a.top[at]];
  }
  return 0;
}

/* What a row is multiplied by when its first token is hidden; too little left is not scaled up. */
function scaled(part, h, q) {
  const left = 1 - (rawWeight(part, h, q, part.first) || 0);
  return left > .004 ? 1 / left : 0;
}

function weight(part, h, q, k, hide) {
  const w = rawWeight(part, h, q, k);
  return hide ? (k === part.first ? w * 0 : w * scaled(part, h, q)) : w;
}

function rowOf(part, h, q, hide) {
  const row = rawRow(part, h, q);
  if (row && hide) {
    const by = scaled(part, h, q);
    row[part.first] *= 0;
    for (let k = 0; k < row.length; k++) row[k] *= by;
  }
  return row;
}

function columnOf(part, h, k, hide) {
  if (!part.heads[h].layer.arrays) return null;
  return Float32Array.from({ length: part.i }, (_, q) => weight(part, h, q, k, hide));
}

function receivedOf(part, h, hide) {
  const { layer, head } = part.heads[h], a = layer.arrays;
  return a && a[hide ? "received_without_first" : "received"].subarray(head * part.j, (head + 1) * part.j);
}

/* Averages of what keys receive over some heads; kept, since they are asked for at every move. */
const averages = new Map();
function receivedBy(part, heads, hide) {
  const ready = heads.filter(h => part.heads[h].layer.arrays), name = [part.number, heads[0], heads.length, ready.length, hide].join();
  if (!averages.has(name)) {
    const sum = new Float32Array(part.j);
    for (const h of ready) receivedOf(part, h, hide).forEach((share, k) => { sum[k] += share / ready.length; });
    averages.set(name, sum);
  }
  return averages.get(name);
}
