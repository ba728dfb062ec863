"use strict";
(() => {
  const root = document.documentElement;
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  document.getElementById("theme").onclick = () => { root.dataset.theme = dark() ? "light" : "dark"; };

  const number = (value) => (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) ? value.toExponential(3) : String(+value.toPrecision(5));
  const bytes = (value) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    while (Math.abs(value) >= 1024 && units.length > 1) { value /= 1024; units.shift(); }
    return `${units[0] === "B" ? value : value.toFixed(1)} ${units[0]}`;
  };
  const write = { bytes, size: number, rate: (value) => `${number(value)}/s`, share: (value) => `${(100 * value).toFixed(1)} %`, loss: number };
  const clock = (seconds) => {
    if (seconds < 60) return `${seconds.toFixed(2)} s`;
    const whole = Math.floor(seconds), two = (part) => String(part).padStart(2, "0");
    return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
  };
  const at = (line, x) => {  // the point that holds at x: the last one before it, or the next one after it
    let low = 0, high = line.x.length;
    while (low < high) { const middle = (low + high) >> 1; if (line.x[middle] <= x) low = middle + 1; else high = middle; }
    const found = line.after ? low - 1 : Math.min(low, line.x.length - 1);
    return found < 0 ? null : line.y[found];
  };

  for (const lanes of document.querySelectorAll(".lanes")) {
    const values = JSON.parse(lanes.querySelector("script").textContent), hair = lanes.querySelector(".hair");
    const readouts = [...lanes.querySelectorAll(".readout")], plots = [...lanes.querySelectorAll(".plot")];
    lanes.addEventListener("pointermove", (event) => {
      const box = plots[0].getBoundingClientRect(), x = (event.clientX - box.left) / box.width;
      if (x < 0 || x > 1) return;
      hair.hidden = false;
      hair.style.left = `${event.clientX - lanes.getBoundingClientRect().left}px`;
      readouts.forEach((readout, number) => {
        const swatches = readout.parentNode.querySelectorAll(".swatch");
        readout.replaceChildren(clock(x * lanes.dataset.seconds), ...values[number].flatMap((line, i) => {
          const value = at(line, x), item = document.createElement("span"), name = document.createElement("span");
          name.textContent = ` ${line.name}`;
          item.append(swatches[i].cloneNode(true), name, ` ${value === null ? "" : write[line.unit](value)}`);
          return value === null ? [] : [item];
        }));
      });
    });
    lanes.addEventListener("pointerleave", () => { hair.hidden = true; for (const readout of readouts) readout.textContent = ""; });
  }

  const open = () => { const named = location.hash && document.getElementById(location.hash.slice(1)); if (named && named.matches("details")) named.open = true; };
  addEventListener("hashchange", open);
  open();
})();
