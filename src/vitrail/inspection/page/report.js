// The report's two instruments: what a model attends to, and which of its tokens are alike. All else is plain HTML.
(() => {
  "use strict";

  const LONGER_SIDE = 720; // pixels of a canvas: sharp on dense screens, painted in a few milliseconds
  const FINER = 16; // points from patch to patch of a smoothed map
  const SMALL = 128; // pixels of an image that is enlarged as it is, without smoothing
  // From almost black to almost white, so that more is lighter, also on a photograph and in grey.
  const COLOURS = colours([
    [9, 8, 32], [58, 18, 104], [128, 32, 122], [199, 54, 92], [243, 112, 50], [252, 184, 66], [254, 248, 205],
  ]);

  const models = JSON.parse(document.getElementById("findings").textContent);
  const instruments = { attention: attentionInstrument, tokens: tokensInstrument };
  const together = { attention: [], tokens: [] };

  for (const root of document.querySelectorAll("[data-instrument]")) {
    const kind = root.dataset.instrument;
    together[kind].push(instruments[kind](root, models[Number(root.dataset.model)]));
    root.hidden = false;
    root.parentElement.classList.add("live"); // the drawing makes room
  }
  for (const box of document.querySelectorAll("[data-links]")) {
    box.closest("label").hidden = together[box.dataset.links].length < 2;
  }

  /** What an image's answer draws on: a map over the image, for rollout up to a layer or for the heads of one. */
  function attentionInstrument(root, model) {
    const found = model.attention;
    const rollout = unpacked(found.rollout.maps);
    const heads = unpacked(found.heads.maps);
    const size = found.rows * found.columns;
    const canvas = root.querySelector(".stage > canvas");
    const strength = Number(root.querySelector("[data-sets=strength]").defaultValue);
    const state = { image: 0, layer: found.layers.at(-1), mode: "rollout", head: -1, strength, patches: false };
    const allowed = { image: (i) => i in model.images, layer: (name) => found.layers.includes(name),
                      head: (head) => head < found.heads.peaks[0][0].length };

    /** Of one head, or of all of them: shares of attention on each patch, and on what is no patch. */
    function ofHeads(image, layer, wanted) {
      const peaks = found.heads.peaks[image][layer];
      const chosen = wanted < 0 ? [...peaks.keys()] : [wanted];
      const shares = new Float32Array(size);
      const prefix = found.prefix.map(() => 0);
      for (const head of chosen) {
        const start = ((image * found.layers.length + layer) * peaks.length + head) * size;
        for (let place = 0; place < size; place++) {
          shares[place] += (heads()[start + place] * peaks[head]) / 255 / chosen.length;
        }
        found.heads.prefix[image][layer][head].forEach((share, token) => { prefix[token] += share / chosen.length; });
      }
      return { shares, prefix };
    }

    function ofRollout(image, layer) {
      const start = (image * found.layers.length + layer) * size;
      const peak = found.rollout.peaks[image][layer];
      const shares = Float32Array.from(rollout().subarray(start, start + size), (value) => (value * peak) / 255);
      return { shares, prefix: found.rollout.prefix[image][layer] };
    }

    function show(image) {
      const layer = found.layers.indexOf(state.layer);
      const rolled = state.mode === "rollout";
      const { shares, prefix } = rolled ? ofRollout(state.image, layer) : ofHeads(state.image, layer, state.head);
      const peak = shares.reduce((most, share) => Math.max(most, share), 0);
      const context = photograph(canvas, image, model.images[state.image]);
      context.globalAlpha = state.strength / 100;
      const fine = state.patches ? 1 : FINER;
      context.imageSmoothingEnabled = !state.patches;
      const values = shares.map((share) => share / (peak || 1));
      context.drawImage(painted(values, found.rows, found.columns, fine), 0, 0, canvas.width, canvas.height);
      context.globalAlpha = 1;

      const which = ordinal(found.layers, layer);
      canvas.setAttribute("aria-label", `${model.images[state.image].name}, with what is attended to laid over it`);
      root.querySelector("[data-sets=head]").disabled = rolled;
      root.querySelector(".low").textContent = "0%";
      root.querySelector(".high").textContent = `${percent(peak)} on a patch`;
      const head = state.head < 0 ? "mean of all heads" : `head ${state.head + 1}`;
      const what = rolled ? `Rollout up to layer ${which}: what reaches ${found.reads} from each patch.`
                          : `Layer ${which}, ${head}: the attention of ${found.reads}.`;
      root.querySelector(".told").textContent = `${what}${apart(prefix)}`;
      return { layer: which, strength: `${state.strength}%` };
    }

    function apart(prefix) {
      if (prefix.length === 0) return "";
      const each = found.prefix.map((name, token) => `${name} (${percent(prefix[token])})`).join(", ");
      const total = prefix.reduce((sum, share) => sum + share, 0);
      return ` ${percent(total)} falls on what is no part of the image, and is not in the map: ${each}.`;
    }

    const guesses = (image) => showGuesses(root.querySelector(".guesses"), image.guesses);
    return controlled(root, model, state, allowed, found.layers, show, guesses);
  }

  /** How similar one chosen patch is to all others. */
  function tokensInstrument(root, model) {
    const found = model.tokens;
    const maps = found.maps.map((layer) => unpacked(layer.maps));
    const [chooser, map] = root.querySelectorAll(".pair > canvas");
    const state = { image: 0, layer: found.layers.at(-1), patch: [0.5, 0.5] }; // down and across, of the image
    const allowed = { image: (i) => i in model.images, layer: (name) => found.layers.includes(name) };
    const grid = () => found.maps[found.layers.indexOf(state.layer)];
    const cell = () => [Math.floor(state.patch[0] * grid().rows), Math.floor(state.patch[1] * grid().columns)];

    function show(image) {
      const layer = found.layers.indexOf(state.layer);
      const { rows, columns, lows } = grid();
      const [row, column] = cell();
      const size = rows * columns;
      const start = ((state.image * rows + row) * columns + column) * size;
      const values = Float32Array.from(maps[layer]().subarray(start, start + size), (value) => value / 255);
      const low = lows[state.image];
      photograph(chooser, image, model.images[state.image]);
      mark(chooser, row, column, rows, columns);
      [map.width, map.height] = [chooser.width, chooser.height];
      const context = map.getContext("2d");
      context.imageSmoothingEnabled = false;
      context.drawImage(painted(values, rows, columns, 1), 0, 0, map.width, map.height);
      mark(map, row, column, rows, columns);

      const others = values.filter((_, place) => place !== row * columns + column);
      const mean = others.reduce((sum, value) => sum + value, 0) / Math.max(others.length, 1);
      map.setAttribute("aria-label", `How alike the chosen patch and others of ${model.images[state.image].name} are`);
      root.querySelector(".low").textContent = signed(low);
      root.querySelector(".high").textContent = "1";
      const place = `row ${row + 1} of ${rows} and column ${column + 1} of ${columns}`;
      const similar = signed(low + mean * (1 - low));
      root.querySelector(".told").textContent =
        `After ${state.layer}: the patch in ${place} has a mean similarity of ${similar} to the others. ` +
        "The scale goes from the least of any two patches to 1.";
      return { layer: `${state.layer} (${layer + 1} of ${found.layers.length})` };
    }

    const follow = controlled(root, model, state, allowed, found.layers, show);
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const within = (place, count) => (Math.min(Math.max(place, 0), count - 1) + 0.5) / count;
    chooser.addEventListener("keydown", (event) => {
      if (!(event.key in moves) || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      const [down, across] = moves[event.key];
      const [row, column] = cell();
      follow({ patch: [within(row + down, grid().rows), within(column + across, grid().columns)] }, true);
    });
    const point = (event) => {
      const box = event.currentTarget.getBoundingClientRect();
      const [down, across] = [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width];
      const { rows, columns } = grid();
      follow({ patch: [within(Math.floor(down * rows), rows), within(Math.floor(across * columns), columns)] }, true);
    };
    for (const canvas of [chooser, map]) {
      canvas.addEventListener("click", point);
      canvas.addEventListener("pointermove", (event) => {
        if (event.pointerType === "mouse" && event.buttons === 1) point(event);
      });
    }
    return follow;
  }

  /**
   * Ties an instrument's controls to its state, in both directions. The answer is a function that takes changes of the
   * state: those that it cannot follow it leaves alone, those of a person it passes on to linked instruments.
   */
  function controlled(root, model, state, allowed, layers, show, onImage = () => {}) {
    const kind = root.dataset.instrument;
    const controls = [...root.querySelectorAll("[data-sets]")];
    const pictures = model.images.map(({ source }) => Object.assign(new Image(), { src: source }));
    const buttons = thumbnails(root.querySelector(".thumbnails"), model.images, (image) => follow({ image }, true));

    function follow(changes, byPerson = false) {
      for (const [name, value] of Object.entries(changes)) {
        if (name in state && (allowed[name]?.(value) ?? true)) state[name] = value;
      }
      refresh();
      if (byPerson && document.querySelector(`[data-links="${kind}"]`)?.checked) {
        together[kind].filter((other) => other !== follow).forEach((other) => other(changes));
      }
    }

    function refresh() {
      const picture = pictures[state.image];
      if (!picture.complete) {
        picture.addEventListener("load", refresh, { once: true });
        return;
      }
      const words = show(picture);
      onImage(model.images[state.image]);
      buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(index === state.image)));
      for (const control of controls) reflect(control, words);
    }

    /** What a control is set to, as the state has it. */
    function said(control) {
      if (control.type === "checkbox") return control.checked;
      if (control.type === "radio") return control.value;
      return control.dataset.sets === "layer" ? layers[Number(control.value)] : Number(control.value);
    }

    /** The state, as the control has it. */
    function reflect(control, words) {
      const name = control.dataset.sets;
      if (control.type === "radio") control.checked = control.value === state[name];
      else if (control.type === "checkbox") control.checked = state[name];
      else control.value = name === "layer" ? layers.indexOf(state.layer) : state[name];
      if (control.type === "range") {
        control.setAttribute("aria-valuetext", words[name]);
        control.parentElement.querySelector("output").textContent = words[name];
      }
    }

    for (const control of controls) {
      control.addEventListener("input", () => follow({ [control.dataset.sets]: said(control) }, true));
    }
    for (const ramp of root.querySelectorAll(".ramp")) {
      const values = Float32Array.from({ length: ramp.width }, (_, place) => place / (ramp.width - 1));
      ramp.getContext("2d").drawImage(painted(values, 1, ramp.width, 1), 0, 0);
    }
    refresh();
    return follow;
  }

  function thumbnails(place, images, choose) {
    const buttons = images.map(({ name, source }, index) => {
      const button = Object.assign(document.createElement("button"), { type: "button", title: name });
      button.append(Object.assign(new Image(), { src: source, alt: name }));
      button.addEventListener("click", () => choose(index));
      return button;
    });
    place.append(...buttons);
    place.hidden = images.length < 2;
    return buttons;
  }

  function showGuesses(list, guesses) {
    list.hidden = guesses.length === 0;
    list.replaceChildren(...guesses.map(([label, share, text, chosen]) => {
      const item = document.createElement("li");
      const [words, bar, number] = ["span", "i", "b"].map((tag) => document.createElement(tag));
      Object.assign(words, { textContent: label, dir: "auto" });
      bar.style.setProperty("--share", share ?? 0);
      number.textContent = text ?? (share === null ? "no number" : percent(share));
      item.append(words, number);
      if (text === undefined || share !== null) item.append(bar);
      if (text !== undefined) item.className = chosen ? "chosen" : "other";
      return item;
    }));
  }

  /** The image as the model saw it, over all of a canvas of its shape. */
  function photograph(canvas, picture, { width, height }) {
    const scale = LONGER_SIDE / Math.max(width, height);
    [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = Math.max(width, height) >= SMALL;
    context.imageSmoothingQuality = "high";
    context.drawImage(picture, 0, 0, canvas.width, canvas.height);
    return context;
  }

  /** Values from 0 to 1 in colours, `finer` points for each and in each direction. */
  function painted(values, rows, columns, finer) {
    const canvas = Object.assign(document.createElement("canvas"), { width: columns * finer, height: rows * finer });
    const context = canvas.getContext("2d");
    const pixels = context.createImageData(canvas.width, canvas.height);
    const across = Array.from({ length: canvas.width }, (_, x) => weights(x, finer, columns));
    const line = new Float32Array(columns);
    for (let y = 0, point = 0; y < canvas.height; y++) {
      const down = weights(y, finer, rows);
      for (let x = 0; x < columns; x++) {
        line[x] = down.reduce((sum, [row, weight]) => sum + weight * values[row * columns + x], 0);
      }
      for (const column of across) {
        const value = column.reduce((sum, [x, weight]) => sum + weight * line[x], 0);
        const colour = Math.round(Math.min(Math.max(value, 0), 1) * 255) * 4;
        for (let channel = 0; channel < 4; channel++) pixels.data[point++] = COLOURS[colour + channel];
      }
    }
    context.putImageData(pixels, 0, 0);
    return canvas;
  }

  /** The patches around a point with their weights: cubic, through the values themselves in the middles of patches. */
  function weights(point, finer, count) {
    const place = (point + 0.5) / finer - 0.5;
    const first = Math.floor(place);
    const t = place - first;
    const cubic = [((2 - t) * t - 1) * t, (3 * t - 5) * t * t + 2, ((4 - 3 * t) * t + 1) * t, (t - 1) * t * t];
    return cubic.map((weight, step) => [Math.min(Math.max(first + step - 1, 0), count - 1), weight / 2]);
  }

  /** A frame around a patch that is seen on light and on dark, and at the edge of the image as well. */
  function mark(canvas, row, column, rows, columns) {
    const context = canvas.getContext("2d");
    const from = (place, count, side) => Math.max((place / count) * side - 3, 4);
    const to = (place, count, side) => Math.min(((place + 1) / count) * side + 3, side - 4);
    const [left, top] = [from(column, columns, canvas.width), from(row, rows, canvas.height)];
    const [right, bottom] = [to(column, columns, canvas.width), to(row, rows, canvas.height)];
    for (const [colour, line] of [["#000", 7], ["#fff", 3]]) {
      Object.assign(context, { strokeStyle: colour, lineWidth: line });
      context.strokeRect(left, top, right - left, bottom - top);
    }
  }

  /** Stops → 256 colours of four bytes. */
  function colours(stops) {
    const table = new Uint8ClampedArray(1024);
    for (let value = 0; value < 256; value++) {
      const place = (value / 255) * (stops.length - 1);
      const first = Math.min(Math.floor(place), stops.length - 2);
      const mixed = stops[first].map((channel, i) => channel + (stops[first + 1][i] - channel) * (place - first));
      table.set([...mixed, 255], value * 4);
    }
    return table;
  }

  /** Base64 → a function that gives its bytes, decoded when first asked for. */
  function unpacked(base64) {
    let bytes = null;
    return () => (bytes ??= Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0)));
  }

  function ordinal(layers, index) {
    const plain = /^\d+$/.test(layers[index]);
    return plain ? `${layers[index]} of ${layers.length}` : `${layers[index]} (${index + 1} of ${layers.length})`;
  }

  function percent(share) {
    return `${(share * 100).toFixed(share >= 0.9995 ? 0 : share >= 0.001 || share === 0 ? 1 : 2)}%`;
  }

  function signed(value) {
    return value.toFixed(2).replace("-", "−");
  }
})();
