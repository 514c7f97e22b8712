// Returns what cannot be read on the open page: text with little contrast, small text in pictures, cropped pictures.
// arguments[0]: the smallest contrast; arguments[1]: the smallest size of text in pixels.
const [least, smallest] = arguments;
const found = new Set();
const parse = (colour) => {
  const [r, g, b, a = 1] = (colour.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
  return { r, g, b, a };
};
const over = (top, below, opacity = 1) => {
  const a = top.a * opacity;
  return { r: top.r * a + below.r * (1 - a), g: top.g * a + below.g * (1 - a), b: top.b * a + below.b * (1 - a), a: 1 };
};
const luminance = ({ r, g, b }) => {
  const [x, y, z] = [r, g, b].map((v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const contrast = (one, other) => {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
const paper = (element) => {
  const layers = [];
  for (let e = element; e; e = e.parentElement) {
    const colour = parse(getComputedStyle(e).backgroundColor);
    if (colour.a) layers.push(colour);
    if (colour.a === 1) break;
  }
  return layers.reverse().reduce((below, top) => over(top, below), { r: 255, g: 255, b: 255, a: 1 });
};
const say = (kind, words) => found.add(`${kind}: ${words.trim().replace(/\s+/g, " ").slice(0, 50)}`);

for (const svg of document.querySelectorAll("article svg[viewBox]")) {
  const box = svg.getBoundingClientRect();
  if (!box.width || !svg.querySelector("text")) continue;
  const scale = box.width / svg.viewBox.baseVal.width;
  const right = svg.closest("figure, div").getBoundingClientRect().right;
  if (box.right > right + 1) say("wide picture", svg.getAttribute("class") + " " + svg.querySelector("title")?.textContent);
  const back = paper(svg.parentElement);
  const shapes = [];
  for (const mark of svg.querySelectorAll("rect, circle, text")) {
    const style = getComputedStyle(mark), place = mark.getBoundingClientRect();
    if (mark.tagName !== "text") {
      if (style.fill !== "none") shapes.push([place, parse(style.fill), style.opacity * style.fillOpacity]);
      continue;
    }
    if (!mark.textContent.trim() || style.display === "none" || !place.width) continue;
    if (parseFloat(style.fontSize) * scale < smallest - 0.05) say(`${(parseFloat(style.fontSize) * scale).toFixed(1)} pixels`, mark.textContent);
    if (place.right > box.right + 1 || place.left < box.left - 1) say("cut text", mark.textContent);
    const x = (place.left + place.right) / 2, y = (place.top + place.bottom) / 2;
    let below = back;
    for (const [at, fill, opacity] of shapes)
      if (at.left <= x && x <= at.right && at.top <= y && y <= at.bottom) below = over(fill, below, opacity);
    const value = contrast(over(parse(style.fill), below), below);
    if (value < least) say(`contrast ${value.toFixed(1)} in a picture`, mark.textContent);
  }
}
const walker = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_TEXT);
const seen = new Map();
while (walker.nextNode()) {
  const words = walker.currentNode.textContent, element = walker.currentNode.parentElement;
  if (!words.trim() || seen.has(element) || element.closest("svg, script, style, .headerlink, .md-clipboard")) continue;
  seen.set(element, true);
  const style = getComputedStyle(element);
  if (style.visibility === "hidden" || !element.getClientRects().length || style.opacity === "0") continue;
  if (parseFloat(style.fontSize) < smallest) say(`${style.fontSize} text`, words);
  const below = paper(element), value = contrast(over(parse(style.color), below), below);
  if (value < least) say(`contrast ${value.toFixed(1)}`, words);
}
return [...found];
