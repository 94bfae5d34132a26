// Elements, in HTML and SVG, without any markup made of text.

const SVG = "http://www.w3.org/2000/svg";

// h("p", {class: "note", onclick: f}, "text", child, ...)
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "width_percent") element.style.width = `${value}%`;
    else if (name === "color") element.style.setProperty("--color", value);
    else if (name === "value" && "value" in element) element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
  return element;
}

// Make nodes the children of a parent. Those that it has already are not touched, so that what is typed stays.
export function replaced(parent, nodes) {
  const kept = new Set(nodes);
  for (const child of [...parent.childNodes]) if (!kept.has(child)) child.remove();
  let at = parent.firstChild;
  for (const node of nodes) {
    if (node === at) at = at.nextSibling;
    else parent.insertBefore(node, at);
  }
}

// Text for a screen reader alone.
export const unseen = text => h("span", { class: "hidden" }, text);

export function announce(text) {
  const region = document.getElementById("announce");
  if (region.textContent !== text) region.textContent = text;
}

// A button that copies text, and says so in its own label for a moment.
export function copyButton(label, text) {
  const button = h("button", { type: "button", class: "copy" }, label);
  button.addEventListener("click", async () => {
    const done = await copy(typeof text === "function" ? text() : text);
    button.textContent = done ? "Copied" : "Not copied";
    announce(done ? `${label}: copied` : "The browser does not allow copying");
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { class: "hidden", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

export function table(caption, columns, rows, attributes = {}) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", attributes,
      h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, columns.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))),
      h("tbody", {}, rows.map(cells => h("tr", cells.attributes ?? {}, (cells.cells ?? cells).map((cell, at) =>
        h(at ? "td" : "th", { class: columns[at]?.[1], scope: at ? undefined : "row" }, cell)))))));
}
