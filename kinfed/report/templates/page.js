(() => {
  "use strict";

  const darkColors = JSON.parse(document.getElementById("dark-colors").textContent);
  const darkScheme = matchMedia("(prefers-color-scheme: dark)");
  const phone = matchMedia("(max-width: 600px)");
  const PRINT_WIDTH = 660; // pixels that fit the text width of an A4 or letter page
  const hiddenMethods = new Set();
  let printing = false;

  const saveButton = (format) => ({
    name: `save-${format}`,
    title: `Save as ${format.toUpperCase()}`,
    icon: format === "png" ? Plotly.Icons.camera : Plotly.Icons.disk,
    click: (element) => {
      const paper = getComputedStyle(document.body).backgroundColor;
      const layout = { ...element.layout, showlegend: element.dataset.legend === "yes", paper_bgcolor: paper };
      Plotly.downloadImage({ data: element.data, layout }, { format, scale: format === "png" ? 2 : 1,
        width: element.clientWidth, height: element.clientHeight, filename: "kinfed-figure" });
    },
  });
  const config = { responsive: true, displaylogo: false, modeBarButtons: [[saveButton("png"), saveButton("svg")]] };

  // Figures are written in the colours of the light theme; "#rrggbbaa" keeps its opacity.
  function themed(value, dark) {
    if (typeof value === "string") {
      const color = dark && /^#[0-9a-f]{6}([0-9a-f]{2})?$/.test(value) && darkColors[value.slice(0, 7)];
      return color ? color + value.slice(7) : value;
    }
    if (Array.isArray(value)) return value.map((entry) => themed(entry, dark));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, entry]) => [key, themed(entry, dark)]));
    }
    return value;
  }

  const plots = [...document.querySelectorAll(".plot")].map((element) => {
    const figure = JSON.parse(element.parentElement.querySelector('script[type="application/json"]').textContent);
    return { element, figure, view: figure.view };
  });

  function draw(plot) {
    const { element, figure, view } = plot;
    if (!element.clientWidth && !printing) return; // inside a closed fold; drawn when it opens
    const dark = darkScheme.matches && !printing;
    const { data, layout } = themed({ data: figure.data, layout: figure.layout }, dark);
    for (const trace of data) {
      const { method, view: of } = trace.meta || {};
      trace.visible = (of === undefined || view === null || of === view) && !hiddenMethods.has(method);
    }
    const entry = figure.views.find((candidate) => candidate.key === view);
    for (const [path, value] of Object.entries(entry ? entry.patch : {})) {
      const keys = path.split(".");
      const last = keys.pop();
      keys.reduce((inner, key) => inner[key], layout)[last] = value;
    }
    layout.hoverlabel = { ...layout.hoverlabel, bgcolor: dark ? "#2b3036" : "#ffffff",
      bordercolor: dark ? "#565d65" : "#b3b8be", font: { ...(layout.hoverlabel || {}).font, color: layout.font.color } };
    if (phone.matches && !printing) {
      layout.margin = { ...layout.margin, l: Math.min(layout.margin.l, 36), r: 6 };
      layout.font = { ...layout.font, size: 12 };
    }
    layout.height = element.clientHeight || figure.height;
    layout.autosize = !printing;
    if (printing) layout.width = PRINT_WIDTH;
    const still = element.querySelector(":scope > svg.still");
    if (still) still.remove();
    try {
      Plotly.react(element, data, layout, config);
      element.dataset.state = "drawn";
    } catch (error) {
      element.dataset.state = "failed";
      element.replaceChildren(...(still ? [still] : [])); // what could be seen before
      console.error(error);
    }
  }

  // One figure per turn, so that the page can be read and scrolled from the start.
  function drawAll(queue = [...plots]) {
    if (!queue.length) {
      document.documentElement.dataset.figures = "done";
      return;
    }
    draw(queue.shift());
    setTimeout(() => drawAll(queue), 0);
  }

  darkScheme.addEventListener("change", () => drawAll());
  phone.addEventListener("change", () => drawAll());
  addEventListener("beforeprint", () => { printing = true; plots.forEach(draw); });
  addEventListener("afterprint", () => { printing = false; plots.forEach(draw); });
  for (const fold of document.querySelectorAll("details")) {
    fold.addEventListener("toggle", () => {
      if (fold.open) plots.filter((plot) => fold.contains(plot.element)).forEach(draw);
    });
  }

  function choose(control, view) {
    for (const button of control.querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String(button.value === view));
    }
    const section = control.closest("section");
    for (const plot of plots) {
      if (section.contains(plot.element) && plot.figure.views.some((entry) => entry.key === view)) {
        plot.view = view;
        draw(plot);
      }
    }
  }
  for (const control of document.querySelectorAll(".controls")) {
    control.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) choose(control, button.value);
    });
    control.addEventListener("change", (event) => {
      if (event.target.matches("select")) choose(control, event.target.value);
    });
  }

  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const method = Number(button.value);
      if (!hiddenMethods.delete(method)) hiddenMethods.add(method);
      for (const twin of document.querySelectorAll(`.legend button[value="${method}"]`)) {
        twin.setAttribute("aria-pressed", String(!hiddenMethods.has(method)));
      }
      plots.filter((plot) => plot.element.dataset.legend === "yes").forEach(draw);
    });
  }

  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => {
      const heading = button.closest("th");
      const body = heading.closest("table").tBodies[0];
      const ascending = heading.getAttribute("aria-sort") === "descending";
      for (const other of heading.closest("thead").querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const column = Number(button.value);
      const value = (row) => row.cells[column].dataset.value;
      const rows = [...body.rows].sort((a, b) => {
        if (value(a) === undefined || value(b) === undefined) return (value(a) === undefined) - (value(b) === undefined);
        return (ascending ? 1 : -1) * (Number(value(a)) - Number(value(b)));
      });
      body.append(...rows);
    });
  }

  for (const field of document.querySelectorAll("input[data-rows-of]")) {
    const rows = [...document.getElementById(field.dataset.rowsOf).tBodies[0].rows];
    const texts = rows.map((row) => row.textContent.toLowerCase());
    const control = field.closest(".search");
    control.hidden = false;
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      rows.forEach((row, index) => {
        row.hidden = !words.every((word) => texts[index].includes(word));
        count += row.hidden ? 0 : 1;
      });
      control.querySelector("output").textContent = `${count} of ${rows.length}`;
    });
  }

  for (const button of document.querySelectorAll("button[data-copies]")) {
    button.addEventListener("click", async () => {
      const source = document.getElementById(button.dataset.copies);
      const label = button.textContent;
      source.select();
      try {
        await navigator.clipboard.writeText(source.value);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Selected: press Ctrl+C or ⌘C"; // a page opened from disk may not write the clipboard
      }
      setTimeout(() => { button.textContent = label; }, 2500);
    });
  }

  drawAll();
})();
