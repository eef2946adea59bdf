(() => {
  "use strict";

  const EVERY = 2000; // milliseconds between two looks
  const byId = (id) => document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)");

  // Names of runs, methods and data sets come from outside: they only ever become text.
  function element(tag, text = "", className = "") {
    const node = document.createElement(tag);
    node.textContent = text;
    if (className) node.className = className;
    return node;
  }

  function cell(row, content, className = "") {
    const td = element("td", "", className);
    td.append(content);
    row.append(td);
  }

  function progress(done, planned) {
    const share = planned ? Math.min(done / planned, 1) : 0;
    const bar = element("span", "", "progress");
    const inner = element("span");
    inner.style.width = `${100 * share}%`;
    bar.append(inner);
    const box = element("span", "", "amount");
    box.append(bar, `${done} of ${planned ?? "?"}`);
    return box;
  }

  const address = (kind, name) => `/${kind}/${encodeURIComponent(name)}`;

  async function fetchJson(path) {
    const answer = await fetch(path, { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }

  function repeat(look) {
    const again = async () => {
      try {
        await look();
        document.documentElement.dataset.board = "ready";
      } catch (error) {
        document.documentElement.dataset.board = "waiting"; // the server may have been ended, or a file is just changing
      }
      setTimeout(again, EVERY);
    };
    again();
  }

  // The list

  function fillChoices(select, values) {
    const present = new Set([...select.options].map((option) => option.value));
    for (const value of [...new Set(values)].sort()) {
      if (value && !present.has(value)) select.append(new Option(value, value));
    }
  }

  function showList() {
    const form = byId("filters");
    fillChoices(form.kind, runs.map((run) => run.kind));
    fillChoices(form.dataset_, runs.map((run) => run.dataset));
    fillChoices(form.algorithm, runs.flatMap((run) => run.algorithms));
    const text = form.text.value.trim().toLowerCase();
    const shown = runs.filter((run) =>
      (!form.state.value || run.state === form.state.value)
      && (!form.kind.value || run.kind === form.kind.value)
      && (!form.dataset_.value || run.dataset === form.dataset_.value)
      && (!form.algorithm.value || run.algorithms.includes(form.algorithm.value))
      && (!text || [run.name, run.dataset, ...run.algorithms].join(" ").toLowerCase().includes(text)));
    byId("count").textContent = `${shown.length} of ${runs.length}`;
    const body = byId("runs").tBodies[0];
    const focused = document.activeElement?.dataset?.run; // rows are made anew; the keyboard stays where it was
    body.replaceChildren(...shown.map((run) => {
      const row = element("tr");
      const link = element("a", run.name);
      if (run.opens) link.href = address(run.opens, run.name);
      else link.tabIndex = 0;
      link.dataset.run = run.name;
      const box = element("input");
      box.type = "checkbox";
      box.checked = chosen.has(run.name);
      box.disabled = !comparable(run);
      box.setAttribute("aria-label", `Choose ${run.name}`);
      box.addEventListener("change", () => choose(run.name));
      cell(row, box);
      cell(row, link);
      cell(row, run.kind, "wide");
      cell(row, element("span", run.state, `state ${run.state}`));
      cell(row, run.state === "damaged" ? run.problem : run.planned > 1 ? progress(run.done, run.planned) : "");
      cell(row, run.dataset);
      cell(row, run.algorithms.slice(0, 8).join(", ") + (run.algorithms.length > 8 ? ", …" : ""));
      cell(row, String(run.seeds || ""), "figure wide");
      cell(row, run.best);
      cell(row, run.changed, "wide");
      return row;
    }));
    if (focused) links().find((link) => link.dataset.run === focused)?.focus();
    byId("compare").disabled = chosen.size !== 2;
  }

  let runs = []; // as the server last listed them
  const chosen = new Set(); // names of at most two runs
  const links = () => [...byId("runs").tBodies[0].querySelectorAll("a")];

  const comparable = (run) => run.opens === "run" && run.state !== "damaged";

  function choose(name) {
    if (!comparable(runs.find((run) => run.name === name))) return;
    if (!chosen.delete(name)) {
      if (chosen.size === 2) chosen.delete([...chosen][0]);
      chosen.add(name);
    }
    byId("filters").dispatchEvent(new Event("input"));
  }

  function compareChosen() {
    if (chosen.size === 2) location.href = `/both/${[...chosen].map(encodeURIComponent).join("/")}`;
  }

  function pressed(event) {
    const typing = event.target.closest("input[type=search], select");
    if (event.ctrlKey || event.metaKey || event.altKey || (typing && event.key !== "Escape")) return;
    const all = links();
    const at = all.indexOf(document.activeElement);
    if (event.key === "/") byId("filters").text.focus();
    else if (event.key === "Escape" && typing) (all[0] ?? document.body).focus();
    else if (event.key === "j") all[Math.min(at + 1, all.length - 1)]?.focus();
    else if (event.key === "k") all[Math.max(at - 1, 0)]?.focus();
    else if (event.key === "x" && at >= 0) choose(all[at].dataset.run);
    else if (event.key === "c") compareChosen();
    else return;
    event.preventDefault();
  }

  // One run

  function themed(value, colors) {
    if (typeof value === "string") {
      const color = dark.matches && /^#[0-9a-f]{6}([0-9a-f]{2})?$/.test(value) && colors[value.slice(0, 7)];
      return color ? color + value.slice(7) : value;
    }
    if (Array.isArray(value)) return value.map((entry) => themed(entry, colors));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, entry]) => [key, themed(entry, colors)]));
    }
    return value;
  }

  function drawCurves(figure, colors) {
    const { data, layout } = themed({ data: figure.data, layout: figure.layout }, colors);
    const view = figure.views.find((entry) => entry.key === figure.view);
    for (const trace of data) trace.visible = !trace.meta || trace.meta.view === undefined || trace.meta.view === figure.view;
    for (const [path, value] of Object.entries(view ? view.patch : {})) {
      const keys = path.split(".");
      const last = keys.pop();
      keys.reduce((inner, key) => inner[key], layout)[last] = value;
    }
    Plotly.react(byId("curves"), data, { ...layout, height: 400, autosize: true }, { responsive: true, displayModeBar: false });
  }

  function showRun(run) {
    byId("title").textContent = run.title;
    byId("state").replaceChildren(element("span", run.state, `state ${run.state}`), " ", progress(run.done, run.planned));
    byId("notes").replaceChildren(...run.notes.map((note) => element("p", note)));
    byId("report").href = address("report", run.name);
    byId("legend").replaceChildren(...run.methods.map((method) => {
      const entry = element("span");
      const line = element("i");
      line.style.background = themed(method.color, run.dark);
      entry.append(line, method.label);
      return entry;
    }));
    byId("trials").tBodies[0].replaceChildren(...run.trials.map((trial) => {
      const row = element("tr");
      cell(row, trial.algorithm);
      cell(row, String(trial.seed), "figure");
      cell(row, progress(trial.round, trial.planned));
      cell(row, trial.figure);
      return row;
    }));
    byId("sites").hidden = !run.sites.length;
    byId("doing").textContent = [run.doing, run.budget].filter(Boolean).join("; ");
    byId("sites").tBodies[0].replaceChildren(...run.sites.map((site) => {
      const row = element("tr");
      cell(row, site.name);
      cell(row, element("span", site.connected ? "yes" : "no", `state ${site.connected ? "finished" : "damaged"}`));
      cell(row, site.awaited || "–");
      cell(row, site.answered || "–");
      cell(row, site.error || "–");
      return row;
    }));
    if (run.figure) drawCurves(run.figure, run.dark);
  }

  const name = document.body.dataset.run;
  if (name) {
    repeat(async () => showRun(await fetchJson(address("live", name))));
  } else {
    const form = byId("filters");
    form.dataset_ = form.elements.namedItem("dataset"); // `dataset` of an element means something else
    form.addEventListener("input", () => showList());
    form.addEventListener("submit", (event) => event.preventDefault());
    byId("compare").addEventListener("click", compareChosen);
    document.addEventListener("keydown", pressed);
    repeat(async () => { runs = await fetchJson("/api/runs"); showList(); });
  }
})();
