// What a page has to keep to be readable: run in the page, returns a list of sentences, empty if nothing is wrong.
(() => {
  const wrong = [], seen = element => { const r = element.getBoundingClientRect(); return r.width > 1 && r.height > 1 && getComputedStyle(element).visibility !== "hidden"; };
  const named = element => `<${element.tagName.toLowerCase()} id="${element.id}" class="${element.getAttribute("class") ?? ""}"> ${element.textContent.trim().slice(0, 40)}`;

  // contrast, of each element that has text of its own
  const channels = colour => { const [r, g, b, a = 1] = colour.match(/[\d.]+/g).map(Number); return { rgb: [r, g, b], a }; };
  const light = rgb => { const [r, g, b] = rgb.map(c => (c /= 255) <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const over = (top, a, under) => top.map((c, i) => c * a + under[i] * (1 - a));
  function behind(element) {
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      const { rgb, a } = channels(getComputedStyle(each).backgroundColor);
      if (a > 0) layers.push({ rgb, a });
      if (a === 1) break;
    }
    return layers.reverse().reduce((under, layer) => over(layer.rgb, layer.a, under), [255, 255, 255]);
  }
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!own || !seen(element) || element.closest(".hidden")) continue;
    const style = getComputedStyle(element), svg = element instanceof SVGElement, { rgb, a } = channels(svg ? style.fill : style.color);
    const under = behind(svg ? element.ownerSVGElement.parentElement : element), text = light(over(rgb, a, under)), ground = light(under);
    const ratio = (Math.max(text, ground) + .05) / (Math.min(text, ground) + .05), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) wrong.push(`contrast ${ratio.toFixed(2)}: ${named(element)}`);
    if (size < 11) wrong.push(`text of ${size} px: ${named(element)}`);
  }

  // nothing beside the window
  if (document.documentElement.scrollWidth > innerWidth) wrong.push(`scrolls sideways: ${document.documentElement.scrollWidth} > ${innerWidth}`);
  for (const element of document.body.querySelectorAll("*"))
    if (seen(element) && !element.closest(".skip, svg") && element.getBoundingClientRect().right > innerWidth + 1) wrong.push(`beside the window: ${named(element)}`);

  // no word of a usual length is broken
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = document.createRange();
  for (let node = words.nextNode(); node; node = words.nextNode()) {
    if (!seen(node.parentElement) || node.parentElement.closest("script, svg, pre, .hidden")) continue;
    for (const word of node.data.matchAll(/\S{2,19}(?!\S)/g)) {
      if (/\S/.test(node.data[word.index - 1] ?? " ")) continue;
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map(each => Math.round(each.top)));
      if (lines.size > 1 && !/[-/]/.test(word[0])) wrong.push(`broken: ${word[0]} in ${named(node.parentElement)}`);
    }
  }

  // structure
  if (!document.documentElement.lang) wrong.push("no language");
  const ids = [...document.querySelectorAll("[id]")].map(each => each.id), twice = ids.filter((id, i) => ids.indexOf(id) !== i);
  if (twice.length) wrong.push(`ids twice: ${twice}`);
  if (document.querySelectorAll("h1").length !== 1) wrong.push("not one h1");
  if (document.querySelectorAll("main").length !== 1) wrong.push("not one main");
  for (const box of document.querySelectorAll("*")) {
    const scrolls = box.scrollHeight > box.clientHeight + 2 && ["auto", "scroll"].includes(getComputedStyle(box).overflowY);
    if (scrolls && seen(box) && box.tabIndex < 0 && box.tagName !== "TEXTAREA" && box.tagName !== "DIALOG") wrong.push(`scrolls, and not by keyboard: ${named(box)}`);
  }
  return wrong;
})()
