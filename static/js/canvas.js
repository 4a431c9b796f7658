// What every canvas of the console needs: tokens, the screen's pixels, user marks.
export const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const hueToken = (user) => token(user.hue ? `--user-${user.hue}` : '--block-cached');

// A request's own mark, as users have theirs: hues before shapes, repeated past 32.
export const requestMark = (handle) => ({ hue: handle % 8 + 1, shape: Math.floor(handle / 8) % 4 });

// Sizes a canvas for the screen's pixels; returns a context in CSS pixels, cleared.
export function fit(canvas, width, height) {
  const ratio = devicePixelRatio || 1, w = Math.round(width * ratio), h = Math.round(height * ratio);
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// The second half of a user's mark, drawn over a filled box: bar across, bar down, cut corner.
export function shapeOver(context, shape, x, y, w, h, ground, thick = 2) {
  context.fillStyle = ground;
  if (shape === 1) context.fillRect(x, y + (h - thick) / 2, w, thick);
  if (shape === 2) context.fillRect(x + (w - thick) / 2, y, thick, h);
  if (shape === 3) {
    context.beginPath();
    context.moveTo(x + w / 2, y);
    context.lineTo(x + w, y);
    context.lineTo(x + w, y + h / 2);
    context.fill();
  }
}

export function hatch(context, x, y, w, h, colour, gap = 5) {
  context.save();
  context.beginPath();
  context.rect(x, y, w, h);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  for (let k = -h; k < w + h; k += gap) { context.moveTo(x + k, y + h); context.lineTo(x + k + h, y); }
  context.stroke();
  context.restore();
}
