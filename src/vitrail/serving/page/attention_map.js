// Attention maps: from the server's grey PNG to colours over a photo.

const FINEST = 256; // points of a painted map's longer side: milliseconds on a phone; the browser smooths from there
const SHEER = 0.7; // how opaque the full overlay is where there is no attention: the photo is not lost under it
// From almost black to almost white, so that more is lighter, also on a photograph and in grey.
const COLOURS = colours([
  [9, 8, 32], [58, 18, 104], [128, 32, 122], [199, 54, 92], [243, 112, 50], [252, 184, 66], [254, 248, 205],
]);

/** A grey PNG with its headers → values from 0 to 1, where they lie on the photo, and the largest share. */
export async function readMap(response) {
  const picture = await createImageBitmap(await response.blob(), { colorSpaceConversion: "none" });
  const { width: columns, height: rows } = picture;
  const context = Object.assign(document.createElement("canvas"), { width: columns, height: rows }).getContext("2d");
  context.drawImage(picture, 0, 0);
  picture.close();
  const { data } = context.getImageData(0, 0, columns, rows);
  const values = Float32Array.from({ length: rows * columns }, (_, place) => data[place * 4] / 255);
  const box = (response.headers.get("X-Vitrail-Box") ?? "").split(",").map(Number);
  const sound = box.length === 4 && box.every(Number.isFinite);
  const peak = Number(response.headers.get("X-Vitrail-Peak"));
  return { values, rows, columns, box: sound ? box : [0, 0, 1, 1], peak };
}

/** Whether the model saw the whole photo. */
export function isWhole([left, top, width, height]) {
  return left < 0.001 && top < 0.001 && width > 0.998 && height > 0.998;
}

/** Paints a map over the part of the photo that the model saw. */
export function paintOverlay(canvas, map) {
  ["left", "top", "width", "height"].forEach((side, i) => { canvas.style[side] = `${map.box[i] * 100}%`; });
  canvas.classList.toggle("part", !isWhole(map.box));
  paint(canvas, map, Math.max(Math.round(FINEST / Math.max(map.rows, map.columns)), 2), SHEER);
}

/** Paints the colours from the least to the most. */
export function paintRamp(canvas) {
  const values = Float32Array.from({ length: canvas.width }, (_, place) => place / (canvas.width - 1));
  paint(canvas, { values, rows: 1, columns: canvas.width }, 1, 1);
}

/** A map in colours, `finer` points for each patch and in each direction; `sheer` is how opaque nothing is. */
function paint(canvas, { values, rows, columns }, finer, sheer) {
  [canvas.width, canvas.height] = [columns * finer, rows * finer];
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(canvas.width, canvas.height);
  const across = Array.from({ length: canvas.width }, (_, x) => weights(x, finer, columns));
  const line = new Float32Array(columns);
  for (let y = 0, point = 0; y < canvas.height; y++) {
    const around = weights(y, finer, rows);
    for (let x = 0; x < columns; x++) {
      line[x] = around.reduce((sum, [row, weight]) => sum + weight * values[row * columns + x], 0);
    }
    for (const column of across) {
      const value = column.reduce((sum, [x, weight]) => sum + weight * line[x], 0);
      const within = Math.min(Math.max(value, 0), 1);
      const colour = Math.round(within * 255) * 3;
      for (let channel = 0; channel < 3; channel++) pixels.data[point++] = COLOURS[colour + channel];
      pixels.data[point++] = 255 * (sheer + (1 - sheer) * within);
    }
  }
  context.putImageData(pixels, 0, 0);
}

/** The patches around a point with their weights: cubic, through the values themselves in the middles of patches. */
function weights(point, finer, count) {
  const place = (point + 0.5) / finer - 0.5;
  const first = Math.floor(place);
  const t = place - first;
  const cubic = [((2 - t) * t - 1) * t, (3 * t - 5) * t * t + 2, ((4 - 3 * t) * t + 1) * t, (t - 1) * t * t];
  return cubic.map((weight, step) => [Math.min(Math.max(first + step - 1, 0), count - 1), weight / 2]);
}

/** Stops → 256 colours of three bytes. */
function colours(stops) {
  const table = new Uint8ClampedArray(768);
  for (let value = 0; value < 256; value++) {
    const place = (value / 255) * (stops.length - 1);
    const first = Math.min(Math.floor(place), stops.length - 2);
    const mixed = stops[first].map((channel, i) => channel + (stops[first + 1][i] - channel) * (place - first));
    table.set(mixed, value * 3);
  }
  return table;
}
