// A round number at or above the highest value: 1, 1.5, 2, 3, 4, 6, 8 times a power of ten.
export function niceTop(value, least, whole) {
  const high = Math.max(value, least), power = 10 ** Math.floor(Math.log10(high));
  const top = [1, 1.5, 2, 3, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= high * 1.04 || step === high) ?? high;
  return whole && top % 2 ? top + 1 : top;
}
