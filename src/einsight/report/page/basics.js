/* ---- colours, numbers, and other small helpers ---- */

const $ = id => document.getElementById(id);
const INK = {};
let RAMP = [], OVER = [];

function readColours() {
  const css = getComputedStyle(document.documentElement), get = name => css.getPropertyValue("--" + name).trim();
  for (const name of ["paper", "ink", "mute", "ghost", "hair", "accent", "sans", "mono"]) INK[name] = get(name);
  const stops = get("ramp").split(",").map(stop => [1, 3, 5].map(n => parseInt(stop.trim().slice(n, n + 2), 16)));
  RAMP = Array.from({ length: 256 }, (_, n) => {
    const x = n / 255 * (stops.length - 1), a = Math.min(stops.length - 2, Math.floor(x));
    return stops[a].map((c, rgb) => Math.round(c + (stops[a + 1][rgb] - c) * (x - a)));
  });
  OVER = RAMP.map(over);
  INK.dark = matchMedia("(prefers-color-scheme: dark)").matches;
}
/* Ink that reads on a shade: whichever of the two stands out more. */
const luminance = c => [.2126, .7152, .0722].reduce((sum, part, n) => sum + part * ((c[n] / 255 + .055) / 1.055) ** 2.4, 0);
const over = c => luminance(c) > .179 ? "#000000" : "#ffffff";
const level = x => Math.round(255 * Math.max(0, Math.min(1, x || 0)));
const shade = x => RAMP[level(x)];
const rgb = c => `rgb(${c})`;

const el = (tag, cls, ...kids) => {
  const made = document.createElement(tag);
  if (cls) made.className = cls;
  made.append(...kids);
  return made;
};
const put = (id, ...kids) => $(id).replaceChildren(...kids.filter(kid => kid !== null && kid !== ""));
const bold = text => el("b", "", text);
const percent = x => x < .00005 ? "0%" : (x * 100).toFixed(x >= .0995 ? 0 : x >= .00995 ? 1 : 2) + "%";
/* Lengths may be of any size: significant digits. */
const short = (x, digits = 3) => !(x > 0) ? "0" : x < 1e-4 || x >= 1e6 ? x.toExponential(digits - 1)
  : x.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, Math.floor(Math.log10(x)) + 1) });
const plural = (n, word) => `${n.toLocaleString("en")} ${n === 1 ? word : word === "query" ? "queries" : word + (/ch$/.test(word) ? "es" : "s")}`;
const clamp = (x, low, high) => Math.max(low, Math.min(high, x));
const commas = nodes => nodes.flatMap((node, n) => n ? [", ", ...node] : node);

/* A token's text with what can't be seen made visible; in sentences without the space before it. */
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u00a0\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\ufff9-\ufffb]/g;
/* Where letters are joined, or emoji, the characters that say how are part of the writing. */
const JOINED = /(?<=[\p{Script=Arab}\p{Script=Syrc}\p{Script=Mong}\p{Script=Nkoo}\p{Script=Deva}\p{Script=Beng}\p{Script=Guru}\p{Script=Gujr}\p{Script=Orya}\p{Script=Taml}\p{Script=Telu}\p{Script=Knda}\p{Script=Mlym}\p{Script=Sinh}\p{M}])[\u200c\u200d]|[\u200c\u200d](?=[\p{Script=Arab}\p{Script=Syrc}])|(?<=[\p{Extended_Pictographic}\p{Emoji_Modifier}\ufe0f])\u200d|(?<=[\p{Emoji}\p{Script=Han}\p{Script=Mong}])[\ufe0e\ufe0f]/u;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;
const joins = new RegExp(JOINED.source, "gu");
function joiners(text) {
  return new Set([...text.matchAll(joins)].map(found => found.index));
}
function visible(text) {
  const kept = /[\u200c\u200d\ufe0e\ufe0f]/.test(text) ? joiners(text) : null;
  return coded(text.replace(HIDDEN, (c, at) => kept?.has(at) ? c : c === "\u00a0" ? "⍽" : `‹${c.codePointAt(0).toString(16).padStart(4, "0")}›`));
}
const coded = text => text
  .replace(/\r\n|\n|\r/g, "↵").replace(/\t/g, "⇥");
function spoken(list, n) {
  const text = list.text[n], cut = list.cut[n], bare = visible(text.trim() || text.replace(/ /g, "␣") || "∅");
  return (bare.length > 24 ? bare.slice(0, 23) + "…" : bare) + (cut ? ` ${cut[0] + 1}/${cut[1]}` : "");
}
function named(list, n) {
  const made = document.createDocumentFragment();
  made.append(el("span", "token", spoken(list, n)), el("sub", "", String(n)));
  return made;
}

/* The numbers of the largest few, largest first: of thousands a sort takes too long for every move. */
function strongestOf(list, count, least = -Infinity) {
  const found = [];
  for (let n = 0; n < list.length; n++) {
    if (!(list[n] >= least) || (found.length === count && !(list[n] > list[found[count - 1]]))) continue;
    let at = found.length;
    while (at > 0 && list[n] > list[found[at - 1]]) at--;
    found.splice(at, 0, n);
    if (found.length > count) found.pop();
  }
  return found;
}

/* How wide a picture may be: read before anything is written, since reading afterwards would lay out the page twice. */
const WIDTHS = {};
const measureWidths = () => { for (const id of ["all", "each", "map"]) WIDTHS[id] = $(id).closest("section").clientWidth; };
const widthOf = id => WIDTHS[id];

/* A canvas as wide as its place, sharp on any screen. */
function canvas(id, height, width = widthOf(id)) {
  const c = $(id), dpr = devicePixelRatio || 1, w = Math.round(width * dpr), h = Math.round(height * dpr);
  c.style.height = height + "px";
  c.style.width = width + "px";
  if (c.width !== w || c.height !== h) { c.width = w; c.height = h; }
  const g = c.getContext("2d");
  g.setTransform(dpr, 0, 0, dpr, 0, 0);
  g.clearRect(0, 0, width, height);
  g.globalAlpha = 1;
  g.imageSmoothingEnabled = false;
  return { g, width, dpr };
}

/* The one scale of text and map: colour follows the square root. */
function drawScale() {
  const { g } = canvas("map-scale", 26, 172);
  for (let x = 0; x < 150; x++) {
    g.fillStyle = rgb(shade(x / 149));
    g.fillRect(x + 8, 0, 1.5, 8);
  }
  g.font = "10.5px " + INK.sans;
  g.fillStyle = INK.mute;
  g.textAlign = "center";
  const most = S.measure === "weight" || PART.percent ? null : scaleOf(current());
  for (const p of most === null ? [0, 1, 5, 20, 50, 100] : [0, 5, 20, 50, 100])
    g.fillText(most === null ? p + (p === 100 ? "%" : "") : short(p / 100 * most, 2), 8 + 150 * Math.sqrt(p / 100), 21);
  $("map-scale").setAttribute("aria-label", "the colours of text and map, from 0 to " + (most === null ? "100%" : short(most)));
}
