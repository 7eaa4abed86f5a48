"use strict";
const tip = document.createElement("div");
tip.id = "tip";
document.body.append(tip);

const escape = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

function showTip(event, content) {
  tip.innerHTML = content;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - 16 - box.width : event.clientX + 16;
  const top = event.clientY + 16 + box.height > innerHeight ? event.clientY - 12 - box.height : event.clientY + 16;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, top) + "px";
}
const hideTip = () => { tip.style.display = "none"; };
const table = (rows) => "<table>" + rows.map(([name, value, color]) =>
  `<tr><td>${color ? `<i style="background:var(--${color})"></i>` : ""}${escape(name)}</td><td>${escape(value)}</td></tr>`).join("") + "</table>";

function nearest(values, x) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(values[low] - x) <= Math.abs(values[high] - x) ? low : high;
}

for (const area of document.querySelectorAll("[data-plot]")) {
  const data = JSON.parse(area.dataset.plot);
  if (data.bars) {
    area.addEventListener("pointermove", (event) => {
      const box = area.getBoundingClientRect();
      const bar = data.bars[Math.floor((event.clientX - box.left) / box.width * data.bars.length)];
      if (bar) showTip(event, table([[bar.n, bar.v, bar.c]]));
    });
    area.addEventListener("pointerleave", hideTip);
    continue;
  }
  const cursor = area.appendChild(Object.assign(document.createElement("div"), { className: "cursor" }));
  const pips = data.s.map((series) => {
    const pip = area.appendChild(Object.assign(document.createElement("div"), { className: "pip" }));
    pip.style.background = `var(--${series.c})`;
    return pip;
  });
  const share = (y) => data.log ? Math.log(y / data.y0) / Math.log(data.y1 / data.y0) : (y - data.y0) / (data.y1 - data.y0);
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    const x = data.x0 + (event.clientX - box.left) / box.width * (data.x1 - data.x0);
    const reach = (data.x1 - data.x0) / 40;
    let at = null;
    const picks = data.s.map((series) => nearest(series.x, x));
    data.s.forEach((series, i) => {
      const candidate = series.x[picks[i]];
      if (at === null || Math.abs(candidate - x) < Math.abs(at - x)) at = candidate;
    });
    const rows = [];
    data.s.forEach((series, i) => {
      const k = picks[i], near = Math.abs(series.x[k] - at) <= reach;
      pips[i].style.display = near ? "block" : "none";
      if (!near) return;
      pips[i].style.left = (series.x[k] - data.x0) / (data.x1 - data.x0) * 100 + "%";
      pips[i].style.top = (1 - share(series.y[k])) * 100 + "%";
      rows.push([series.n, series.v[k], series.c]);
    });
    cursor.style.display = "block";
    cursor.style.left = (at - data.x0) / (data.x1 - data.x0) * 100 + "%";
    showTip(event, `<b>${escape(data.xl)} ${+at.toPrecision(6)}</b>` + table(rows));
  });
  area.addEventListener("pointerleave", () => {
    hideTip();
    cursor.style.display = "none";
    pips.forEach((pip) => { pip.style.display = "none"; });
  });
}

const samples = document.querySelector(".samples");
if (samples) {
  const reasons = JSON.parse(samples.dataset.reasons);
  const cache = new Map();
  const load = (element) => {
    const key = element.dataset.tokens;
    if (!cache.has(key)) cache.set(key, JSON.parse(document.getElementById(key).textContent));
    return cache.get(key);
  };
  const index = (token) => [...token.parentElement.querySelectorAll("s")].indexOf(token);
  const fixed = (value, digits = 4) => value === null || value === undefined ? "–" : Math.abs(value) > 0 && Math.abs(value) < 1e-3 ? value.toExponential(2) : value.toFixed(digits);

  samples.addEventListener("pointermove", (event) => {
    const token = event.target.closest(".tokens s");
    if (!token) { hideTip(); return; }
    const d = load(token.parentElement), i = index(token);
    const rows = [["position", d.at ? d.at[i] : i], ["token id", d.id[i]]];
    if (d.ver[i] >= 0) {
      rows.push(["sampled under version", `${d.ver[i]} (trained at ${d.tv})`], ["engine log-prob", fixed(d.lp[i])]);
      if (d.tlp) {
        const both = d.tlp[i] !== null && d.lp[i] !== null;
        rows.push(["trainer log-prob", fixed(d.tlp[i])], ["ratio", both ? fixed(Math.exp(d.tlp[i] - d.lp[i])) : "–"], ["value", fixed(d.val[i])], ["advantage", fixed(d.adv[i])], ["return", fixed(d.ret[i])]);
      }
    }
    rows.push(["mask", reasons[d.why[i]].replace("_", " ")]);
    showTip(event, `<code>${escape(JSON.stringify(token.textContent.replace("↵", "")))}</code>` + table(rows));
  });
  samples.addEventListener("pointerleave", hideTip);

  const mix = (color, amount) => `color-mix(in srgb, var(--${color}) ${Math.round(Math.min(1, Math.abs(amount)) * 75)}%, transparent)`;
  const paint = (element, mode) => {
    const d = load(element);
    const gap = (i) => d.tlp && d.tlp[i] !== null && d.lp[i] !== null ? d.tlp[i] - d.lp[i] : null;
    const scale = mode === "adv" && d.adv ? Math.max(1e-6, ...d.adv.map((v) => Math.abs(v ?? 0))) : 1;
    element.querySelectorAll("s").forEach((token, i) => {
      let color = "";
      if (mode !== "role") {
        color = "transparent";
        if (d.ver[i] >= 0) {
          if (mode === "adv" && d.adv && d.adv[i] !== null) color = mix(d.adv[i] >= 0 ? "c1" : "c5", d.adv[i] / scale);
          if (mode === "val" && d.val && d.val[i] !== null) color = mix("c2", d.val[i]);
          if (mode === "gap" && gap(i) !== null) color = mix(gap(i) >= 0 ? "c2" : "c3", gap(i) * 3);
          if (mode === "lp" && d.lp[i] !== null) color = mix("c4", 1 - Math.exp(d.lp[i]));
          if (mode === "age") color = mix("c3", 0.12 + (d.tv - d.ver[i]) / 6);
        }
      }
      token.style.background = color;
    });
  };
  const chooser = document.getElementById("colouring");
  const repaint = (root) => root.querySelectorAll(".tokens").forEach((element) => paint(element, chooser.value));
  chooser.addEventListener("change", () => {
    repaint(samples);
    document.querySelector(".tokens-legend").style.display = chooser.value === "role" ? "" : "none";
  });
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
