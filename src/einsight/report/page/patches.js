/* ---- an image whose patches are keys: grey, with each patch in the colour of its weight ---- */

let PICTURE = null;                                                // the image in grey, once it is there

async function loadPicture() {
  if (!REPORT.picture) return;
  const packed = atob(REPORT.picture.data), bytes = Uint8Array.from(packed, c => c.charCodeAt(0));
  const bitmap = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
  const grey = el("canvas");
  grey.width = bitmap.width;
  grey.height = bitmap.height;
  const g = grey.getContext("2d", { willReadFrequently: true });
  g.drawImage(bitmap, 0, 0);
  const image = g.getImageData(0, 0, grey.width, grey.height), d = image.data;
  for (let n = 0; n < d.length; n += 4) d[n] = d[n + 1] = d[n + 2] = .3 * d[n] + .59 * d[n + 1] + .11 * d[n + 2];
  g.putImageData(image, 0, 0);
  PICTURE = { colour: bitmap, grey };
}

function patchBoard(list, { start, rows, columns }) {
  const board = el("canvas", "patches"), shape = REPORT.picture, ratio = shape ? shape.height / shape.width : rows / columns;
  board.setAttribute("role", "img");
  board.setAttribute("aria-label", `an image in ${rows} by ${columns} patches`);
  const size = () => {
    const room = Math.min(list.root.clientWidth || $("s-text").clientWidth, 560), width = ratio > 1 ? room / ratio : room;
    return { width, height: width * ratio };
  };
  const hit = event => {
    const box = board.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / box.height * rows), column = Math.floor((event.clientX - box.left) / box.width * columns);
    return row >= 0 && row < rows && column >= 0 && column < columns ? start + row * columns + column : null;
  };
  const paint = (shown, most, focus, other, focusShows) => {
    const { width, height } = size(), dpr = devicePixelRatio || 1;
    board.style.width = width + "px";
    board.style.height = height + "px";
    board.width = Math.round(width * dpr);
    board.height = Math.round(height * dpr);
    const g = board.getContext("2d"), w = board.width / columns, h = board.height / rows;
    const image = PICTURE && (shown ? PICTURE.grey : PICTURE.colour);
    if (image) {
      // Faint, so that the colours on it can be told; fainter on dark paper, where what is bright means much.
      g.globalAlpha = !shown ? 1 : INK.dark ? .28 : .5;
      g.drawImage(image, 0, 0, board.width, board.height);
      g.globalAlpha = 1;
    }
    const corner = n => [Math.round((n % columns) * w), Math.round(Math.floor(n / columns) * h)];
    for (let n = 0; n < rows * columns; n++) {
      const x = shown ? shown[start + n] : 0, part = Math.sqrt((x || 0) / most), [left, top] = corner(n);
      if (!shown && image) continue;
      if (Number.isNaN(x)) { g.globalAlpha = .85; g.fillStyle = INK.paper; }
      else { g.globalAlpha = image ? .12 + .8 * Math.min(1, part) : 1; g.fillStyle = rgb(shade(part)); }
      g.fillRect(left, top, Math.round(left + w) - left + (image ? 1 : 0), Math.round(top + h) - top + (image ? 1 : 0));
      g.globalAlpha = 1;
    }
    const ring = (n, colour, thick) => {
      if (n === null || n < start || n >= start + rows * columns) return;
      const [left, top] = corner(n - start);
      g.strokeStyle = colour;
      g.lineWidth = thick * dpr;
      g.strokeRect(left, top, w, h);
    };
    if (!image || shown) {
      g.strokeStyle = INK.paper;
      g.globalAlpha = .35;
      g.lineWidth = 1;
      g.beginPath();
      for (let n = 1; n < columns; n++) { const x = Math.round(n * w) - .5; g.moveTo(x, 0); g.lineTo(x, board.height); }
      for (let n = 1; n < rows; n++) { const y = Math.round(n * h) - .5; g.moveTo(0, y); g.lineTo(board.width, y); }
      g.stroke();
      g.globalAlpha = 1;
    }
    ring(other, INK.ink, 2);
    if (focusShows) ring(focus, INK.accent, S.pinned ? 3 : 2);
  };
  return { canvas: board, hit, paint };
}
