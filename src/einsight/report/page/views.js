/* ---- drawing everything, and the sentences around it ---- */

const DIRECTIONS = { out: "looks at", in: "is looked at by", sum: "received" };
const SCOPES = { head: "by this head", layer: "in its layer", all: "in all layers" };
const MEASURES = { weight: "weights", value: "× value", write: "× output" };

let allDrawn = "";
function draw() {
  measureWidths();
  // A move over the text changes nothing in the grid of all heads.
  const shows = () => [PART.number, S.head, S.hovered, S.statistic, S.hide, S.sorted, S.least, S.kind, S.only, pans.all?.left, pans.all?.top, WIDTHS.all, devicePixelRatio, INK.dark].join();
  if (shows() !== allDrawn) drawAll();
  allDrawn = shows();
  drawEach();
  drawHeadline();
  drawTexts();
  drawReading();
  drawMap();
  drawSwitches();
}

function drawHeadline() {
  const h = current(), { layer, head } = PART.heads[h];
  put("h-text", PART.layers.length > 1 || layer.name ? `Layer ${layer.number}, head ${head}` : `Head ${head}`);
  $("h-text").title = layer.name;
  const scope = S.direction !== "sum" ? null : S.scope === "layer" ? `All ${layer.heads} heads of layer ${layer.number}.` : S.scope === "all" ? `All ${PART.heads.length} heads.` : null;
  put("text-note", scope ?? habit(h), " ", unit(h));
}

function habit(h) {
  const kind = PART.kind[h], score = PART.score;
  if (kind) {
    const where = { induction: "on what followed earlier copies of a token", previous: `on the ${PART.thing} before`, first: "of its attention" }[kind];
    return aKind(kind).replace(/^./, c => c.toUpperCase()) + `: ${percent(score[kind][h])} ${where}.`;
  }
  const wide = `${score.entropy[h].toFixed(1)} nats wide`;
  return score.distance ? `${wide}, ${plural(+score.distance[h].toFixed(0), PART.thing)} away on average.` : `${wide}; its strongest key has ${percent(score.strongest[h])} on average.`;
}

function unit(h) {
  if (S.direction === "sum") return `Numbers: percent received, on average; full colour from ${percent(largestReceived(received(h)))} on.`;
  const whose = S.direction === "out" ? "one query’s attention" : "each query’s attention";
  if (S.measure === "weight") return `Numbers: percent of ${whose}.`;
  if (S.measure === "value") return "Numbers: weight × length of the value.";
  return PART.percent ? "Numbers: length written, % of the residual stream." : "Numbers: length of what is written.";
}

/* The line under the text: what the token in focus has, in words. */
function drawReading() {
  const h = current(), found = values(h), list = S.direction === "in" ? PART.queries : PART.keys, measure = S.direction === "sum" ? "weight" : S.measure;
  const place = n => S.direction === "in" ? placeOf(n) : n, least = S.direction === "sum" ? .25 * largestReceived(found) : .01 * scaleOf(h);
  const top = found ? strongestOf(found, 4, least) : [];
  const names = commas(top.map(n => [tokenLink(list, place(n)), " " + amount(found[n], measure)]));
  const focus = S.focus, { q, k } = chosen(), line = [];
  if (!PART.heads[h].layer.arrays) line.push("Reading this layer…");
  else if (S.direction === "sum") {
    line.push("Most received: ", ...(names.length ? names : ["nothing stands out"]), ".");
    if (focus !== null && found && k !== null) line.push(" Here ", named(PART.keys, k), " ", percent(found[k]), ".");
  } else if (focus === null) line.push(PART.cross && PART.patches ? "Point at a token or a patch." : `Point at a ${PART.thing}.`);
  else if (!PART.cross && PART.padded.has(focus)) line.push(named(PART.keys, focus), " is padding: it counts nowhere.");
  else if (S.direction === "out" && q === null) line.push(named(PART.keys, focus), " was not a query here.");
  else if (S.direction === "out") {
    line.push(named(PART.queries, placeOf(q)), " looks at ", ...(names.length ? names : ["nothing in particular"]));
    const masked = found && !PART.cross && found.some(Number.isNaN);
    line.push(masked ? PART.future ? "; grey is still ahead of it." : "; grey is masked." : ".");
    if (!PART.whole) line.push(` Its ${strongestKeys(PART, h, q).length} strongest keys, which are all that is shown, cover ${percent(covered(h, q))}.`);
  } else {
    line.push(named(PART.keys, k), " is looked at by ", ...(names.length ? names : ["no one much"]));
    line.push(found && !PART.cross && found.some(Number.isNaN) ? PART.future ? "; grey came before it." : "; grey can’t see it." : ".");
    if (!PART.whole) line.push(" Only those count that have it among their strongest keys.");
  }
  line.push(...hiddenShare(h, q, k));
  if (PART.gaps && S.direction !== "sum" && !PART.whole) line.push(" Some keys inside the range are masked too.");
  put("text-read", ...line);
}
/* What the switch took away from what is pointed at, since it may have been nearly all. */
function hiddenShare(h, q, k) {
  if (!S.hide || !PART.heads[h].layer.arrays) return [];
  const first = named(PART.keys, PART.first), sum = S.direction === "sum";
  if (sum || (S.direction === "in" && q === null)) {
    const share = sum && S.scope !== "head" ? received(h, false)[PART.first] : receivedOf(PART, h, false)[PART.first];
    return [" Hidden: ", first, ", which receives ", bold(percent(share)), " of all attention on average; the rest is scaled up."];
  }
  if (q === null) return [];
  const w = rawWeight(PART, h, q, PART.first), whose = S.direction === "in" ? [" of what ", named(PART.queries, placeOf(q)), " has"] : [];
  if (Number.isNaN(w)) return [" It can’t see ", first, ", which is hidden."];
  return [" Hidden: ", first, ", which takes ", bold(percent(w)), ...whose, scaled(PART, h, q) ? "; the rest is scaled up." : "; too little is left to show."];
}
/* In a long text what a token looks at may be far from it: its name leads there. */
function tokenLink(list, n) {
  if (!isLong(list)) return named(list, n);
  const link = el("button", "link", named(list, n));
  link.onclick = () => reveal(n, list === PART.keys ? "key" : "query");
  return link;
}
function covered(h, q) {
  const { layer, head } = PART.heads[h];
  return layer.arrays.covered[head * PART.i + q] / 255;
}

/* ---- switches ---- */

function tabs(id, items, act) {
  $(id).replaceChildren();
  for (const [value, label] of Object.entries(items)) {
    const button = el("button", "", label);
    button.dataset.v = value;
    button.onclick = () => act(value);
    $(id).append(button);
  }
}

function drawSwitches() {
  const press = (id, value) => { for (const b of $(id).children) b.setAttribute("aria-pressed", b.dataset.v === String(value)); };
  press("statistics", S.statistic);
  const sort = $("sort");
  sort.setAttribute("aria-pressed", S.sorted);
  press("directions", S.direction);
  press("scopes", S.scope);
  press("measures", S.measure);
  press("parts", PART.number);
  $("scopes").hidden = S.direction !== "sum";
  $("scopes").style.display = S.direction === "sum" ? "" : "none";
  $("measures").style.display = S.direction === "sum" || !PART.kept.some(x => x in MEASURES) ? "none" : "";
  $("more").classList.toggle("below", S.direction === "sum" || PART.kept.some(x => x in MEASURES));
  $("hide").setAttribute("aria-pressed", S.hide);
  for (const b of $("kinds").querySelectorAll("[data-kind]")) b.classList.toggle("on", b.dataset.kind === S.only);
  for (const b of $("zooms").children) b.disabled = b.dataset.v !== "in" && !VIEW;
}

function buildPart() {
  tabs("statistics", Object.fromEntries(Object.keys(PART.score).map(name => [name, STATISTICS[name].name])), statistic => set({ statistic, only: null }));
  const sort = el("button", "check", "sort");
  sort.id = "sort";
  sort.onclick = () => set({ sorted: !S.sorted });
  $("statistics").append(sort);
  tabs("directions", DIRECTIONS, direction => set({ direction, other: null, kept: null, ...(PART.cross && direction !== S.direction ? { focus: null, pinned: false } : {}) }));
  tabs("scopes", PART.layers.length > 1 ? SCOPES : { head: SCOPES.head, all: "by all heads" }, scope => set({ scope }));
  tabs("measures", Object.fromEntries(Object.entries(MEASURES).filter(([name]) => name === "weight" || PART.kept.includes(name))), measure => set({ measure }));
  $("hide").lastChild.textContent = `hide first ${PART.whole_thing}`;
  $("hide").style.display = PART.patches?.start === 0 ? "none" : "";
  for (const id of ["s-all", "s-each"]) $(id).hidden = PART.heads.length < 2;
  $("help-digits").textContent = `1 – ${Object.keys(PART.score).length}`;
  for (const [cls, word] of [[".thing", PART.thing], [".whole-thing", PART.whole_thing]]) for (const place of document.querySelectorAll("#help " + cls)) place.textContent = word;
  put("about", about());
  put("help-note", `Layers, heads and ${plural(2, PART.thing).slice(2)} count from 0.` + " Colour follows the square root of a weight, so that 1% can be seen beside 100%. "
    + (PART.whole ? "Weights are stored in 8 bits and are right to 0.3 points." : `Of each query and head the ${PART.strongest} strongest keys are stored, in 8 bits; statistics, bars and what is received count every weight.`));
  buildKinds();
  buildTexts();
  VIEW = null;
  PART.built = true;
}

function about() {
  const { i, j, cross, layers, rows, heads } = PART;
  const what = cross ? `${plural(i, PART.named ? "token" : "query").replace("querys", "queries")} looking at ${plural(j, PART.thing === "patch" ? PART.whole_thing : "key")}` : plural(j, PART.whole_thing);
  const size = layers.length === 1 ? plural(heads.length, "head") : heads.length === layers.length * rows ? `${layers.length} layers of ${plural(rows, "head")}` : `${layers.length} layers, ${heads.length} heads`;
  return `${REPORT.model ? REPORT.model + (cross ? ": " : " reading ") : ""}${what}, ${size}`;
}
