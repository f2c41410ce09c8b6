"use strict";
// The page is readable without this script. It adds sorting, filtering and the details of single examples.
(() => {
  const byId = (id) => document.getElementById(id);

  // ---- table: sorting and filtering ----

  const table = byId("table");
  if (table) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    const text = byId("filter-text");
    const choice = byId("filter-class");
    const searchTexts = new Map(
      rows.map((row) => [row, [...row.querySelectorAll("[data-search]")].map((c) => c.textContent).join(" ").toLowerCase()])
    );

    const perPage = 25;
    let current = 0; // page

    const filter = (to = 0) => {
      const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
      const found = rows.filter((row) => {
        const matches = words.every((word) => searchTexts.get(row).includes(word));
        return matches && (!choice || choice.value === "" || row.dataset.class === choice.value);
      });
      const count = found.length;
      const last = Math.max(0, Math.ceil(count / perPage) - 1);
      current = Math.min(last, Math.max(0, to));
      const shown = new Set(found.slice(current * perPage, (current + 1) * perPage));
      for (const row of rows) row.hidden = !shown.has(row);
      byId("pages").hidden = last === 0;
      byId("page-number").textContent = `Page ${current + 1} of ${last + 1}`;
      byId("previous").disabled = current === 0;
      byId("next").disabled = current === last;
      table.parentElement.hidden = count === 0;
      byId("no-rows").hidden = count !== 0;
      byId("count").textContent = `${count} of ${rows.length} suspects shown`;
    };

    const sort = (head) => {
      const numeric = head.dataset.kind === "number";
      const first = head.dataset.first || "ascending";
      const other = first === "ascending" ? "descending" : "ascending";
      const direction = head.getAttribute("aria-sort") === first ? other : first;
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", direction);
      const sign = direction === "ascending" ? 1 : -1;
      const value = (row) => row.cells[head.cellIndex].dataset.v || "";
      rows.sort((a, b) => {
        const [one, two] = [value(a), value(b)];
        if (one === "" || two === "") return (one === "") - (two === ""); // missing values come last in both directions
        return sign * (numeric ? Number(one) - Number(two) : one.localeCompare(two, "en", { numeric: true }));
      });
      body.append(...rows);
      filter();
    };

    heads.forEach((head) => head.querySelector("button")?.addEventListener("click", () => sort(head)));
    text.addEventListener("input", () => filter());
    choice?.addEventListener("change", () => filter());
    byId("previous").addEventListener("click", () => filter(current - 1));
    byId("next").addEventListener("click", () => filter(current + 1));
    document.querySelectorAll('input[name="marks"]').forEach((one) => {
      one.addEventListener("change", () => {
        document.querySelector("main").setAttribute("data-marks", one.value);
        byId("marks-meaning").textContent = one.parentElement.title;
      });
    });
    text.form.addEventListener("submit", (event) => event.preventDefault());
    const showAll = () => {
      text.value = "";
      if (choice) choice.value = "";
      filter();
    };
    byId("clear").addEventListener("click", () => {
      showAll();
      text.focus();
    });
    const reveal = (event) => {
      const link = event.target.closest('a[href^="#example-"]');
      const row = link && byId(link.getAttribute("href").slice(1));
      if (!row?.hidden) return;
      showAll(); // a hidden row cannot be scrolled to
      filter(Math.floor(rows.indexOf(row) / perPage));
    };
    byId("jump")?.addEventListener("click", reveal);
    body.addEventListener("click", reveal);
    text.form.hidden = false;
    filter();
  }

  // ---- scatter plot: details of the selected example ----

  const plot = byId("plot");
  if (plot) {
    const points = JSON.parse(byId("points").textContent);
    const circles = [...plot.querySelectorAll(".points circle")];
    const positions = circles.map((circle) => [parseFloat(circle.getAttribute("cx")), parseFloat(circle.getAttribute("cy"))]);
    const marker = byId("marker");
    const isShown = (i) => !circles[i].classList.contains("faded");
    const order = (axis, sign) => circles.map((_, i) => i).sort((a, b) => sign * (positions[a][axis] - positions[b][axis]) || a - b);
    const orders = { x: order(0, 1), y: order(1, -1) };
    const first = points.length - 1; // the first suspect is drawn last
    let current = -1;

    const showPreview = (point) => {
      const own = point.rank && byId(`example-${point.id}`)?.querySelector(".preview");
      let preview = null;
      if (own) {
        preview = own.cloneNode(true);
      } else if (point.preview) {
        const [kind, content, tiny] = point.preview;
        preview = document.createElement(kind === "image" ? "img" : "span");
        preview.className = `preview ${kind === "image" ? (tiny ? "tiny" : "") : kind}`;
        if (kind === "image") {
          preview.src = content;
          preview.alt = `Example ${point.id}`;
        } else {
          preview.textContent = content;
        }
      }
      byId("stage").hidden = !preview || preview.classList.contains("nothing");
      byId("stage").replaceChildren(...(preview ? [preview] : []));
    };

    const select = (i, announce) => {
      if (i < 0) return;
      current = i;
      const point = points[i];
      marker.setAttribute("cx", `${positions[i][0]}%`);
      marker.setAttribute("cy", `${positions[i][1]}%`);
      showPreview(point);
      const facts = [["Id", point.id], ["Label", point.label], ["Loss", point.loss], ["Gradient norm", point.norm], ["Suspect", point.rank && `no. ${point.rank}`]];
      const known = facts.filter(([, value]) => value !== undefined);
      byId("known").replaceChildren(
        ...known.flatMap(([name, value]) => [["dt", name], ["dd", value]]).map(([tag, content]) => {
          const element = document.createElement(tag);
          element.textContent = content;
          return element;
        })
      );
      byId("known-note").hidden = !point.note;
      byId("known-note").textContent = point.note || "";
      byId("jump").hidden = !point.rank;
      byId("jump").firstElementChild.href = point.rank ? `#example-${point.id}` : "#suspects";
      if (announce) {
        const words = known.map(([name, value]) => `${name} ${value}`);
        byId("spoken").textContent = [...words, point.note].filter(Boolean).join(", ");
      }
    };

    const findNearest = (event) => {
      const box = plot.getBoundingClientRect();
      let [best, least] = [-1, 28 * 28];
      positions.forEach(([x, y], i) => {
        const across = box.left + (x / 100) * box.width - event.clientX;
        const up = box.top + (y / 100) * box.height - event.clientY;
        const distance = across * across + up * up;
        if (distance <= least && isShown(i)) [best, least] = [i, distance]; // of circles at the same position, the last one is on top
      });
      return best;
    };

    const step = (axis, by) => {
      const shown = orders[axis].filter(isShown);
      if (!shown.length) return -1;
      const at = shown.indexOf(current);
      return at < 0 ? shown[0] : shown[Math.min(shown.length - 1, Math.max(0, at + by))];
    };

    const keys = {
      ArrowRight: () => step("x", 1),
      ArrowLeft: () => step("x", -1),
      ArrowUp: () => step("y", 1),
      ArrowDown: () => step("y", -1),
      PageUp: () => step("y", 25),
      PageDown: () => step("y", -25),
      Home: () => first,
    };

    plot.addEventListener("pointermove", (event) => select(findNearest(event), false));
    plot.addEventListener("pointerdown", (event) => select(findNearest(event), false));
    plot.addEventListener("keydown", (event) => {
      if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      select(keys[event.key](), true);
    });
    byId("detail").hidden = byId("hint").hidden = false;
    select(first, false);

    // ---- legend: show only the selected classes ----

    const selected = new Set();
    byId("legend")?.querySelectorAll("li[data-class]").forEach((item) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...item.childNodes);
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", () => {
        const own = item.dataset.class;
        if (!selected.delete(own)) selected.add(own);
        button.setAttribute("aria-pressed", String(selected.has(own)));
        circles.forEach((circle) => circle.classList.toggle("faded", selected.size > 0 && !selected.has(circle.dataset.class)));
      });
      item.replaceChildren(button);
    });
  }
})();
