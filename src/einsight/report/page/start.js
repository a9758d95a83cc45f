/* ---- start ---- */

async function show(part) {
  openPart(part);
  const { layer } = part.heads[S.head];
  await load(part, layer.place);
  const q = strongestQuery(part, S.head), { arrays } = layer;
  part.future = !part.cross && part.i > 20 && arrays.hi.every((end, n) => end <= n + part.offset + 1) && arrays.lo.every((start, n) => !arrays.hi[n] || start === arrays.lo[part.i - 1]);
  buildPart();
  S.focus = q === null ? null : placeOf(q);
  draw();
  if (S.focus !== null && isLong(part.queries)) reveal(S.focus);
  document.documentElement.dataset.shown = part.number;
  for (const l of part.layers.keys()) {                            // the other layers, while nothing else happens
    if (PART !== part) return;
    if (part.layers[l].arrays) continue;
    await load(part, l);
    await new Promise(resolve => setTimeout(resolve));
    if (l % 8 === 7) set({});
  }
  if (PART === part) draw();
  document.documentElement.dataset.ready = part.number;
}

addEventListener("keydown", onKey);
$("find").oninput = event => find(event.target.value);
$("hide").onclick = () => set({ hide: !S.hide });
$("least").oninput = event => set({ least: +event.target.value });
$("ask").onclick = () => $("help").showModal();
$("help").onclick = event => { if (event.target === $("help") || event.target === $("close")) $("help").close(); };
matchMedia("(prefers-color-scheme: dark)").onchange = () => { readColours(); repaint(); set({}); };
addEventListener("resize", () => set({}));
readColours();
gridEvents("all");
gridEvents("each");
mapEvents();
if (REPORT.parts.length > 1) tabs("parts", Object.fromEntries(REPORT.parts.map(part => [part.number, part.name])), n => show(REPORT.parts[n]));
loadPicture().then(() => set({}));
if (typeof DecompressionStream === "function") show(REPORT.parts[0]);
else put("about", "This page needs a browser of 2023 or later.");
